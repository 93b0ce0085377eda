"""KDA and its convolution over a sequence whose stretches lie in order along a mesh axis. Called inside `shard_map`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.conv import short_conv
from k3jax.ops.kda import accumulator, kda, segment_summary


def short_conv_over(axis: str, x: Array, weight: Array, segment_ids: Array | None) -> Array:
    """`short_conv` of a sequence split over `axis`: x [B,T,H,K] and segment_ids [B,T] are this device's stretch.

    The last W-1 tokens go to the next device, and nothing else moves.

    Raises:
        ValueError: a stretch shorter than that.
    """
    halo = weight.shape[-1] - 1
    if x.shape[1] < halo:
        raise ValueError(f"mesh.{axis}: leaves {x.shape[1]} tokens a device, must leave {halo} for the convolution")

    def extended(x):
        return jnp.concatenate([_from_previous(axis, x[:, -halo:]), x], axis=1)

    ids = None if segment_ids is None else extended(segment_ids)
    return short_conv(extended(x), weight, segment_ids=ids)[0][:, halo:]


def _from_previous(axis: str, x: Array) -> Array:
    """What the device before holds of x; zeros on the first."""
    return lax.ppermute(x, axis, [(rank, rank + 1) for rank in range(lax.axis_size(axis) - 1)])


def kda_over(axis: str, q, k, v, g, beta, segment_ids: Array | None, **options) -> Array:
    """o of `kda` for a sequence split over `axis`; arguments are this device's stretch, `options` those of `kda`.

    Every device summarises its stretch, one all-gather passes the summaries (M, S~) to all, and each composes those
    before it into the state it meets (Eq. 17). A document may cross devices.
    """
    B, T, H, K = q.shape
    ids = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
    last = jnp.max(ids, axis=1)
    first = jnp.min(jnp.where(ids > 0, ids, last[:, None]), axis=1)  # 0 where all is padding, which changes nothing
    summary = segment_summary(k, v, g, beta, segment_ids, **options)

    def meet(carry, stretch):
        state, segment = carry
        m, s, first, last = stretch
        continues = (first == segment) | (first == 0)
        state = jnp.where(continues[:, None, None, None], state, 0)
        after = jnp.matmul(m, state, precision=lax.Precision.HIGHEST) + s
        return (after, jnp.maximum(segment, last)), state

    nothing = jnp.zeros((B, H, K, v.shape[-1]), accumulator(v.dtype)), jnp.zeros(B, ids.dtype)
    _, met = lax.scan(meet, nothing, lax.all_gather((*summary, first, last), axis))
    return kda(q, k, v, g, beta, met[lax.axis_index(axis)], segment_ids, **options)[0]
