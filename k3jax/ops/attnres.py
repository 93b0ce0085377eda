"""Attention Residuals: a sublayer reads a learned mixture over depth (report Eq. 8-10)."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda import accumulator


def attnres_mix(sources: Array, count: Array, query: Array, norm: Array, eps: float) -> Array:
    """h = sum_j softmax_j( <v_j / rms(v_j), norm * query> ) v_j over the sources v_0..v_count.

    A zero query gives their plain average.

    Args:
        sources: [N,B,T,D]; slots 0..count-1 are finished blocks, slot `count` is the running sum, later ones, which
            must be finite, are ignored exactly.
        count: int scalar. query, norm: [D] pseudo-query and norm weight. eps: of the norm.

    Returns:
        h [B,T,D] in the sources' dtype; everything inside is float32 (float64 for float64).

    Example:
        >>> h = attnres_mix(sources, 2, jnp.zeros(D), jnp.ones(D), 1e-5)   # the mean of sources[:3]
    """
    dtype = accumulator(sources.dtype)
    v = sources.astype(dtype)
    # Sums of products, not matrix products: each is one pass over the sources.
    scores = jnp.sum(v * (query.astype(dtype) * norm.astype(dtype))[None, None, None], axis=-1)
    scores = scores * lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    present = (jnp.arange(v.shape[0], dtype=jnp.int32) <= count)[:, None, None]
    weights = jax.nn.softmax(jnp.where(present, scores, -jnp.inf), axis=0)
    return jnp.einsum("nbt,nbtd->btd", weights, v).astype(sources.dtype)
