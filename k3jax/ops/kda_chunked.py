"""KDA from matrix products over chunks of `CHUNK` tokens (`kda_tiles.py` has the equations), with its own derivative.

The forward pass keeps S once a group of `GROUP` chunks and, a chunk, N, A, P and y = u / beta: O(T (K + V)) a head. The
backward pass recomputes the rest group by group, from the last to the first.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda_tiles import (
    CHUNK,
    TILE,
    Segments,
    Tile,
    decays,
    einsum,
    masks_of,
    to_chunk,
    together,
    unit_lower_inverse,
)

GROUP = 4  # chunks, at most, between two kept states; unrolled on CPUs, which saves them a tenth of the time in copies


class Slots(NamedTuple):
    """One initial and final state a segment, every segment starting a chunk.

    segment: [B,T / CHUNK], 1-based, the only one in each chunk; 0 for chunks without tokens. first, last:
    [B,T / CHUNK] bool, whether a chunk is the first or last of its segment.
    """

    segment: Array
    first: Array
    last: Array


# ---- one group -------------------------------------------------------------------------------------------------------


def _to_tiles(x: Array, C: int) -> Array:
    """[B,G*C,H,...] -> [G*B*H,C,...]"""
    B, T, H = x.shape[:3]
    x = x.reshape(B, T // C, C, H, *x.shape[3:])
    return jnp.einsum("bgch...->gbhc...", x).reshape(-1, C, *x.shape[4:])


def _to_time(x: Array, batch: int, heads: int) -> Array:
    """[G*B*H,C,...] -> [B,G*C,H,...]"""
    x = jnp.einsum("gbhc...->bgch...", x.reshape(-1, batch, heads, *x.shape[1:]))
    return x.reshape(batch, -1, heads, *x.shape[4:])


def _apart(x, tiles: int):
    """[tiles*X,...] -> [tiles,X,...], leaf by leaf."""
    return jax.tree.map(lambda x: x.reshape(tiles, -1, *x.shape[1:]), x)


def _scan(step, carry, xs, reverse=False):
    # Unrolled, the TPU compiler takes seven times as long over it (138 s for one layer of 96 heads).
    return lax.scan(step, carry, xs, reverse=reverse, unroll=jax.default_backend() == "cpu")


def _enter(state: Array, states: Array | None, slot) -> Array:
    """The state [B*H,K,V] a tile meets: its segment's own at the segment's first tile."""
    if states is None:
        return state
    segment, first, _ = slot
    mine = states[jnp.arange(len(segment)), jnp.maximum(segment - 1, 0)]
    return jnp.where(first[:, None, None, None], mine, state.reshape(mine.shape)).reshape(state.shape)


def _store(states: Array, where: Array, segment: Array, state: Array) -> Array:
    """`states` [B,N,H,K,V] with the row's `segment` replaced by `state` [B*H,K,V] in the rows named by `where` [B]."""
    index = jnp.where(where, segment - 1, states.shape[1])
    return states.at[jnp.arange(len(segment)), index].set(state.reshape(-1, *states.shape[2:]), mode="drop")


def _advance(state: Array, out: Array, keep: Array, u: Array) -> Array:
    return keep[..., None] * state + einsum("xck,xcv->xkv", out, u)


def _group_forward(lower_bound, states, carry, tokens):
    q, k, v, g, beta, segments, slots = tokens
    (B, T, H), dtype = beta.shape, g.dtype
    G = T // CHUNK
    q, k, g = (_to_tiles(x, TILE).astype(dtype) for x in (q, k, g))
    v, beta = (_to_tiles(x, CHUNK).astype(dtype) for x in (v, beta))
    tile = to_chunk(decays(lower_bound, dtype).tile(q, k, g, masks_of(segments, H)), B * H)
    N = unit_lower_inverse(tile.A * beta[:, None, :])

    def step(carry, x):
        state, finals = carry
        (read, out, keep, N, v, beta), slot = x
        state = _enter(state, states, slot)
        seen = einsum("xck,xkv->xcv", read[:, :CHUNK], state)
        y = einsum("xts,xsv->xtv", N, v - seen)
        seen = einsum("xck,xkv->xcv", read[:, CHUNK:], state)
        state = _advance(state, out, keep, beta[..., None] * y)
        if finals is not None:
            finals = _store(finals, slot.last, slot.segment, state)
        return (state, finals), (y, seen)

    xs = _apart((tile.read, tile.out, tile.keep, N, v, beta), G), jax.tree.map(jnp.transpose, slots)
    carry, (y, seen) = _scan(step, carry, xs)
    y, seen = together((y, seen))
    o = seen + einsum("xts,xsv->xtv", tile.P, beta[..., None] * y)
    return carry, _to_time(o, B, H), (y, N, tile.A, tile.P)


def _group_backward(lower_bound, states, dfinals, carry, x):
    (q, k, g, beta, segments, slots), kept, (y, N, A, P), do = x
    (B, T, H), dtype = beta.shape, g.dtype
    G = T // CHUNK
    dtypes = q.dtype, k.dtype, do.dtype
    q, k, g = (_to_tiles(x, TILE).astype(dtype) for x in (q, k, g))
    beta, do = (_to_tiles(x, CHUNK).astype(dtype) for x in (beta, do))
    masks, way = masks_of(segments, H), decays(lower_bound, dtype)
    tiles = way.tile(q, k, g, masks)
    tile, unmerge = jax.vjp(lambda tiles: to_chunk(tiles, B * H), tiles)
    u = beta[..., None] * y
    slots = jax.tree.map(jnp.transpose, slots)

    def again(state, x):
        (out, keep, u), slot = x
        state = _enter(state, states, slot)
        return _advance(state, out, keep, u), state

    _, met = _scan(again, kept, (_apart((tile.out, tile.keep, u), G), slots))

    def back(carry, x):
        dstate, dstates = carry
        (read, out, keep, u, N, beta, do, du), state, slot = x
        if states is not None:
            dstate = _enter(dstate, dfinals, Slots(slot.segment, slot.last, slot.first))
        du = du + einsum("xck,xkv->xcv", out, dstate)
        dv = einsum("xts,xtv->xsv", N, beta[..., None] * du)
        dseen = jnp.concatenate([-dv, do], axis=1)
        dread = einsum("xcv,xkv->xck", dseen, state)
        dout = einsum("xcv,xkv->xck", u, dstate)
        dkeep = jnp.sum(dstate * state, axis=-1)
        dstate = _advance(dstate, read, keep, dseen)
        if states is not None:
            dstates = _store(dstates, slot.first, slot.segment, dstate)
        return (dstate, dstates), (du, dv, dread, dout, dkeep)

    du = einsum("xts,xtv->xsv", P, do)
    xs = _apart((tile.read, tile.out, tile.keep, u, N, beta, do, du), G), met, slots
    carry, out = _scan(back, carry, xs, reverse=True)
    du, dv, dread, dout, dkeep = together(out)

    # u solves (diag(1 / beta) + A) u = v - k_in S, and dv is the solution of the transposed system.
    dbeta = jnp.sum((du - einsum("xts,xtv->xsv", A, dv)) * y, axis=-1)
    dpairs = einsum("xtv,xsv->xts", jnp.concatenate([-dv, do], axis=1), u)
    (dtiles,) = unmerge(Tile(dread, dout, dkeep, dpairs[:, :CHUNK], dpairs[:, CHUNK:]))
    dq, dk, dg = way.pull(q, k, g, masks, tiles, dtiles)
    dq, dk, dv, dg, dbeta = (_to_time(x, B, H) for x in (dq, dk, dv, dg, dbeta))
    dq, dk, dv = (x.astype(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return carry, (dq, dk, dv, dg, dbeta)


# ---- the whole sequence ----------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked(lower_bound, state, q, k, v, g, beta, segments: Segments | None, slots: Slots | None):
    """o [B,T,H,V] and the final state or states, both in g's dtype but o in v's.

    T is one of `whole_groups`. `state` is [B,H,K,V] or, with `slots`,
    [B,N,H,K,V].
    """
    return _forward(lower_bound, state, q, k, v, g, beta, segments, slots, keep=False)[0]


def _forward(lower_bound, state, q, k, v, g, beta, segments, slots, keep=True):
    B, T, H, K = q.shape
    states = None if slots is None else state
    zeros = jnp.zeros((B * H, K, v.shape[-1]), g.dtype)

    def step(carry, tokens):
        after, o, saved = _group_forward(lower_bound, states, carry, tokens)
        return after, (o.astype(v.dtype), (carry[0], saved) if keep else None)

    carry = (state.reshape(zeros.shape), None) if slots is None else (zeros, states)
    (last, finals), (o, saved) = lax.scan(step, carry, _groups((q, k, v, g, beta, segments, slots), T))
    return (_ungroup(o), last.reshape(state.shape) if slots is None else finals), saved


def _save(lower_bound, state, q, k, v, g, beta, segments, slots):
    out, saved = _forward(lower_bound, state, q, k, v, g, beta, segments, slots)
    return out, (state if slots is not None else None, q, k, g, beta, segments, slots, saved)


def _backward(lower_bound, saved, cotangents):
    states, q, k, g, beta, segments, slots, (kept, tiles) = saved
    do, dfinal = cotangents
    zeros = jnp.zeros_like(kept[0])

    def step(carry, x):
        return _group_backward(lower_bound, states, dfinal, carry, x)

    carry = (dfinal.reshape(zeros.shape), None) if slots is None else (zeros, dfinal)
    T = q.shape[1]
    xs = _groups((q, k, g, beta, segments, slots), T), kept, tiles, _groups(do, T)
    (first, dstates), grads = lax.scan(step, carry, xs, reverse=True)
    return (first.reshape(dfinal.shape) if slots is None else dstates, *_ungroup(grads), None, None)


def _groups(x, T: int):
    """Leaves [B,T,...], [B,T / TILE] or [B,T / CHUNK] -> [groups,B,what belongs to a group,...]."""
    count = -(-T // (CHUNK * GROUP))
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), count, -1, *x.shape[2:]), 1, 0), x)


def _ungroup(x):
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), x)


chunked.defvjp(_save, _backward)


def whole_groups(T: int) -> int:
    """T rounded up to a length that `chunked` takes: equal groups of at most GROUP chunks."""
    groups = max(1, -(-T // (CHUNK * GROUP)))
    return groups * CHUNK * -(-T // (CHUNK * groups))
