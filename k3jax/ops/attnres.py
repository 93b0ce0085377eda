"""Attention Residuals: a sublayer reads a learned mixture over depth (report Eq. 8-10)."""

from functools import partial

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


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def read_depth(
    sources: Array, tape: Array, count: Array, query: Array, norm: Array, eps: float
) -> tuple[Array, Array, Array]:
    """`attnres_mix(sources, count, query, norm, eps)`, sources and tape, keeping for the backward pass no more of the
    sources than the running sum, as a plain residual would.

    Finished blocks never change, so after the last read the sources still hold what every read saw, but for the running
    sums. `keep_depth` stands there and sends them back as the "gradient" of `tape`, an array of zeros like the sources that
    passes through all reads; each read puts its running sum in. Every result must be used further on in this order.

    Example:
        >>> h, sources, tape = read_depth(sources, tape, count, query, norm, 1e-5)
        >>> sources = keep_depth(sources, tape)   # after the last read
    """
    return attnres_mix(sources, count, query, norm, eps), sources, tape


def _read_forward(sources, tape, count, query, norm, eps):
    running = lax.dynamic_index_in_dim(sources, count, 0, keepdims=False)
    return read_depth(sources, tape, count, query, norm, eps), (running, count, query, norm)


def _read_backward(eps, kept, cotangents):
    running, count, query, norm = kept
    d_mix, d_sources, values = cotangents
    values = lax.dynamic_update_index_in_dim(values, running, count, 0)
    _, pull = jax.vjp(lambda *x: attnres_mix(x[0], count, *x[1:], eps), values, query, norm)
    d_values, d_query, d_norm = pull(d_mix)
    return d_sources + d_values, values, None, d_query, d_norm


read_depth.defvjp(_read_forward, _read_backward)


@jax.custom_vjp
def keep_depth(sources: Array, tape: Array) -> Array:
    """The sources, which the backward pass hands to every `read_depth` before."""
    return sources


keep_depth.defvjp(lambda sources, tape: (sources, sources), lambda sources, d: (d, sources))
