"""Attention Residuals: a sublayer reads a learned mixture over depth (report Eq. 8-10)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.derivative import by_hand
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


def read_depth(
    sources: Array, tape: Array | None, count: Array, query: Array, norm: Array, eps: float
) -> tuple[Array, Array, Array | None]:
    """`attnres_mix(sources, count, query, norm, eps)`, sources and tape, keeping for the backward pass no more of the
    sources than the running sum, as a plain residual would.

    Finished blocks never change, so after the last read the sources still hold what every read saw, but for the running
    sums. `keep_depth` stands there and sends them back as the "gradient" of `tape`, an array of zeros like the sources that
    passes through all reads; each read puts its running sum in. Every result must be used further on in this order.

    Without a tape JAX differentiates `attnres_mix` as it is, in forward mode too, and keeps what each read saw.

    Example:
        >>> h, sources, tape = read_depth(sources, tape, count, query, norm, 1e-5)
        >>> sources = keep_depth(sources, tape)   # after the last read
    """
    read = _read.plain if tape is None else _read
    return read(sources, tape, count, query, norm, eps)


@partial(by_hand, nondiff_argnums=(5,))
def _read(sources, tape, count, query, norm, eps):
    return attnres_mix(sources, count, query, norm, eps), sources, tape


# The derivative by hand: loops over the slots in use, half of all on average, each read as few times as can be, and the
# weights of the mixture, 1/D of its size, are kept. Derived from the plain form it takes three times as long.


def _read_forward(sources, tape, count, query, norm, eps):
    dtype = accumulator(sources.dtype)
    direction = query.astype(dtype) * norm.astype(dtype)

    def score(j, found):
        v = _slot(sources, j, dtype)
        values = jnp.sum(v * direction[None, None], axis=-1), lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
        return tuple(lax.dynamic_update_index_in_dim(x, y, j, 0) for x, y in zip(found, values, strict=True))

    zeros = jnp.zeros(sources.shape[:-1], dtype)
    scores, scale = lax.fori_loop(0, count + 1, score, (zeros, zeros))
    present = (jnp.arange(sources.shape[0], dtype=jnp.int32) <= count)[:, None, None]
    weights = jax.nn.softmax(jnp.where(present, scores * scale, -jnp.inf), axis=0)

    def add(j, h):
        return h + weights[j][..., None] * _slot(sources, j, dtype)

    h = lax.fori_loop(1, count + 1, add, weights[0][..., None] * _slot(sources, 0, dtype))
    kept = _slot(sources, count, sources.dtype), count, query, norm, scores, scale, weights
    return (h.astype(sources.dtype), sources, tape), kept


def _read_backward(eps, kept, cotangents):
    running, count, query, norm, scores, scale, weights = kept
    d_mix, d_sources, values = cotangents
    dtype = weights.dtype
    values = lax.dynamic_update_index_in_dim(values, running, count, 0)
    d_mix = d_mix.astype(dtype)
    direction = query.astype(dtype) * norm.astype(dtype)

    def weigh(j, d):
        return lax.dynamic_update_index_in_dim(d, jnp.sum(_slot(values, j, dtype) * d_mix, axis=-1), j, 0)

    d_weights = lax.fori_loop(0, count + 1, weigh, jnp.zeros_like(weights))
    d_logits = weights * (d_weights - jnp.sum(weights * d_weights, axis=0)[None])
    along = d_logits * scale  # with the direction, and with the source through its norm
    inward = -d_logits * scores * scale**3 / values.shape[-1]

    def add(j, sums):
        d_sources, d_directions = sums
        v = _slot(values, j, dtype)
        d_v = weights[j][..., None] * d_mix + along[j][..., None] * direction[None, None] + inward[j][..., None] * v
        d = _slot(d_sources, j, d_sources.dtype) + d_v.astype(d_sources.dtype)
        return lax.dynamic_update_index_in_dim(d_sources, d, j, 0), d_directions + along[j][..., None] * v

    d_sources, d_directions = lax.fori_loop(0, count + 1, add, (d_sources, jnp.zeros_like(d_mix)))
    d_direction = jnp.sum(d_directions, axis=(0, 1))  # after the loop: over devices it is summed once, not for every slot
    d_query, d_norm = d_direction * norm.astype(dtype), d_direction * query.astype(dtype)
    return d_sources, values, None, d_query.astype(query.dtype), d_norm.astype(norm.dtype)


def _slot(sources: Array, j: Array, dtype) -> Array:
    return lax.dynamic_index_in_dim(sources, j, 0, keepdims=False).astype(dtype)


_read.defvjp(_read_forward, _read_backward)


def keep_depth(sources: Array, tape: Array | None) -> Array:
    """The sources, which the backward pass hands to every `read_depth` before."""
    return sources if tape is None else _keep(sources, tape)


@by_hand
def _keep(sources, tape):
    return sources


_keep.defvjp(lambda sources, tape: (sources, sources), lambda sources, d: (d, sources))
