"""KDA from matrix products over tiles of `TILE` tokens, with its own derivative.

Inside a tile the updates u_t = beta_t (v_t - k_t^T S_t') are decayed sums of each other, so they solve a unit lower
triangular system; with that solved, a tile acts on the state S it meets by matrix products alone (report Eq. 3-6):

    u = beta N (v - k_in S)      N = (I + A diag(beta))^-1, A_ts = k_t^T decay(s -> t) k_s for s < t
    o = q_in S + P u             P_ts = q_t^T decay(s -> t) k_s for s <= t
    S <- keep S + k_out^T u

The forward pass keeps S once a group of `GROUP` tiles and, a tile, N, A, P and u / beta: O(T (K + V)) a head. The
backward pass recomputes the rest group by group, from the last to the first.

Everything below works on [X,C,...]: X tiles of all batch rows and heads (and of a whole group where no state enters),
C = TILE.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

TILE = 16  # decay bounded by e^-5 a token spans e^80 in a tile, which float32 holds as e^-40 ... e^40
CHUNK = 32  # tokens between two states: tiles are merged to this length
GROUP = 8  # chunks, at most, between two kept states; they are unrolled, which saves CPUs a tenth of the time in copies

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)  # else TPUs would round float32 factors to bfloat16


class Segments(NamedTuple):
    """Which tokens see each other.

    ids: [B,T] of every token. met: [B,T / TILE], the segment that owns the state a tile meets.
    """

    ids: Array
    met: Array


class Slots(NamedTuple):
    """One initial and final state a segment, every segment starting a tile.

    segment: [B,T / TILE], 1-based, the only one in each tile; 0 for tiles without tokens. first, last: [B,T / TILE]
    bool, whether a tile is the first or last of its segment.
    """

    segment: Array
    first: Array
    last: Array


class _Tile(NamedTuple):
    """What a tile does to the state it meets."""

    read: Array  # [X,2C,K]: k_in above q_in
    out: Array  # [X,C,K]: k_out
    keep: Array  # [X,K]
    A: Array  # [X,C,C], strictly lower
    P: Array  # [X,C,C], lower


class _Masks(NamedTuple):
    """[X or 1,...] bool, from the segments of a tile's tokens."""

    before: Array  # [X,C,C]: s < t and of one segment
    upto: Array  # [X,C,C]: the same with s <= t
    reads: Array  # [X,C,1]: the token's segment owns the state met
    writes: Array  # [X,C,1]: the token's segment is that of the last token
    keeps: Array  # [X,1]: both


def _masks(segments: Segments | None, heads: int) -> _Masks:
    upto = jnp.tril(jnp.ones((1, TILE, TILE), bool))
    before = jnp.tril(upto, -1)
    if segments is None:
        one = jnp.ones((1, 1, 1), bool)
        return _Masks(before, upto, one, one, one[0])
    ids, met = (jnp.repeat(x, heads, axis=0) for x in _by_tile(segments))  # [X,C], [X]
    same = ids[:, :, None] == ids[:, None, :]
    reads, writes = ids == met[:, None], ids == ids[:, -1:]
    return _Masks(before & same, upto & same, reads[..., None], writes[..., None], reads[:, -1:])


def _by_tile(segments: Segments) -> Segments:
    """One group's ids [B,G*C] -> [G*B,C] and met [B,G] -> [G*B]."""
    ids, met = segments
    return Segments(jnp.swapaxes(ids.reshape(*met.shape, TILE), 0, 1).reshape(-1, TILE), met.T.reshape(-1))


# ---- what no state enters --------------------------------------------------------------------------------------------


class _Bounded:
    """Log decays in (lower_bound, 0): one product a tile, of factors relative to a point inside the tile.

    The running sum G_t lies between t * bound and 0. Against the centre c_t = t * bound / 2, exp(G_t - c_t) and its
    inverse stay within exp(+-40). The centre depends on the position alone, so no later token changes the rounding of
    an earlier one.
    """

    def __init__(self, lower_bound: float, dtype):
        self.centre = (lower_bound / 2 * jnp.arange(1, TILE + 1, dtype=dtype))[None, :, None]
        self.recentre = jnp.exp(self.centre - self.centre.mT)  # [1,t,s]
        self.start = jnp.exp(jnp.concatenate([self.centre, self.centre], axis=1))  # [1,2C,1]
        self.end = jnp.exp(self.centre[:, -1:] - self.centre)

    def _factors(self, q, k, g, m):
        G = _einsum("xts,xsk->xtk", _each(m.upto, g), g)
        up, down = jnp.exp(G - self.centre), jnp.exp(self.centre - G)
        return up, down, jnp.concatenate([k * up, q * up], axis=1), k * down

    def tile(self, q, k, g, m: _Masks) -> _Tile:
        up, down, rows, columns = self._factors(q, k, g, m)
        pairs = _einsum("xtk,xsk->xts", rows, columns)
        A = jnp.where(m.before, pairs[:, :TILE] * self.recentre, 0)
        P = jnp.where(m.before, pairs[:, TILE:] * self.recentre, 0)
        P = P + _own(q, k)
        return _Tile(
            jnp.where(_twice(m.reads), rows * self.start, 0),
            jnp.where(m.writes, columns * self.end * up[:, -1:], 0),
            jnp.where(m.keeps, up[:, -1] * self.start[:, -1], 0),
            A,
            P,
        )

    def pull(self, q, k, g, m: _Masks, tile: _Tile, d: _Tile):
        """Gradients of q, k, g from those of a tile. Written out so that no large terms cancel in that of g."""
        up, down, rows, columns = self._factors(q, k, g, m)
        dpairs = jnp.concatenate([jnp.where(m.before, x * self.recentre, 0) for x in (d.A, d.P)], axis=1)
        from_rows, from_columns = _einsum("xts,xsk->xtk", dpairs, columns), _einsum("xts,xtk->xsk", dpairs, rows)
        own = jnp.einsum("xtt->xt", d.P)[..., None]
        to_read = jnp.where(_twice(m.reads), d.read * self.start, 0)
        drows = from_rows + to_read
        to_out = jnp.where(m.writes, d.out * self.end * up[:, -1:], 0)
        dq = drows[:, TILE:] * up + own * k
        dk = drows[:, :TILE] * up + (from_columns + to_out) * down + own * q
        # A decay acts on what was written before it and is read after it, and on the state if that outlives the tile.
        weight = drows * rows
        read_later = weight[:, :TILE] + weight[:, TILE:] - from_columns * columns
        dg = _einsum("xts,xtk->xsk", _each(m.upto, g), read_later)
        dg = dg + _einsum("xts,xsk->xtk", _each(m.before, g), d.out * tile.out) + (d.keep * tile.keep)[:, None]
        return dq, dk, dg


class _Unbounded:
    """Any log decays: the tile is halved again and again, and a pair is decayed by way of the middle between them.

    Each of log2(TILE) levels holds the pairs (s, t) that one halving parts. With r the last token of the lower half,
    decay(s -> t) = exp(sum of g over (r, t]) exp(sum of g over (s, r]): no factor exceeds 1, and each exponent is a
    sum of its own, so none is a difference of large numbers.
    """

    def __init__(self, dtype):
        t = np.arange(TILE)
        sums, pairs = [], []
        size = 1
        while size < TILE:
            middle = t // (2 * size) * (2 * size) + size - 1
            upper = t > middle
            between = (middle[:, None] < t) & (t <= t[:, None])
            after = (t[:, None] < t) & (t <= middle[:, None])
            sums.append(np.where(upper[:, None], between, after))
            pairs.append(upper[:, None] & ~upper & (middle[:, None] == middle))
            size *= 2
        sums += [t <= t[:, None], t > t[:, None]]  # from the start up to a token, and from it to the end
        self.sums = jnp.asarray(np.concatenate(sums)[None], dtype)
        self.pairs = np.stack(pairs)[None]

    def tile(self, q, k, g, m: _Masks) -> _Tile:
        spans = _einsum("xts,xsk->xtk", jnp.broadcast_to(self.sums, (len(g), *self.sums.shape[1:])), g)
        decay = jnp.exp(spans).reshape(len(g), -1, TILE, g.shape[-1])
        halves, total, to_end = decay[:, :-2], decay[:, -2], decay[:, -1]
        by_k, by_q = k[:, None] * halves, q[:, None] * halves
        part = (self.pairs & m.before[:, None]).astype(q.dtype)
        A = jnp.sum(_einsum("xltk,xlsk->xlts", by_k, by_k) * part, axis=1)
        P = jnp.sum(_einsum("xltk,xlsk->xlts", by_q, by_k) * part, axis=1)
        P = P + _own(q, k)
        return _Tile(
            jnp.where(_twice(m.reads), jnp.concatenate([k * total, q * total], axis=1), 0),
            jnp.where(m.writes, k * to_end, 0),
            jnp.where(m.keeps, total[:, -1], 0),
            A,
            P,
        )

    def pull(self, q, k, g, m: _Masks, tile: _Tile, d: _Tile):
        return jax.vjp(lambda *x: self.tile(*x, m), q, k, g)[1](d)


def _decays(lower_bound: float | None, dtype):
    if lower_bound is not None and -lower_bound * TILE <= 80:
        return _Bounded(lower_bound, dtype)
    return _Unbounded(dtype)


def _each(mask: Array, x: Array) -> Array:
    """A mask as a factor of x's dtype for every tile of x."""
    return jnp.broadcast_to(mask, (len(x), TILE, TILE)).astype(x.dtype)


def _twice(reads: Array) -> Array:
    """[X,C,1] for the queries as for the keys; [1,1,1] as it is."""
    return reads if reads.shape[1] == 1 else jnp.concatenate([reads, reads], axis=1)


def _own(q: Array, k: Array) -> Array:
    """diag(q_t^T k_t): a token reads its own update undecayed."""
    return jnp.eye(TILE, dtype=q.dtype)[None] * jnp.sum(q * k, axis=-1, keepdims=True)


def _merge(a: _Tile, b: _Tile) -> _Tile:
    """Two neighbours as one tile: b meets the state that a leaves."""
    C = a.out.shape[1]
    across = _einsum("xtk,xsk->xts", b.read, a.out)
    read = b.read * a.keep[:, None]
    return _Tile(
        jnp.concatenate([a.read[:, :C], read[:, :C], a.read[:, C:], read[:, C:]], axis=1),
        jnp.concatenate([a.out * b.keep[:, None], b.out], axis=1),
        a.keep * b.keep,
        _lower(a.A, across[:, :C], b.A),
        _lower(a.P, across[:, C:], b.P),
    )


def _lower(a: Array, b: Array, d: Array) -> Array:
    """[[a, 0], [b, d]]"""
    return jnp.concatenate(
        [jnp.concatenate([a, jnp.zeros_like(a)], axis=2), jnp.concatenate([b, d], axis=2)], axis=1
    )


def _chunk(tile: _Tile, rows: int) -> _Tile:
    """Tiles [G*rows,...] merged to chunks of CHUNK tokens."""
    size = TILE
    while size < CHUNK:
        pairs = jax.tree.map(lambda x: x.reshape(-1, 2, rows, *x.shape[1:]), tile)
        tile = _merge(*(_together(jax.tree.map(lambda x, i=i: x[:, i], pairs)) for i in (0, 1)))
        size *= 2
    return tile


def _unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)^-1 for strictly lower triangular [X,C,C], C a power of two, by blocks of 1, 2, 4, ...

    With the diagonal blocks a, d inverted, [[a, 0], [b, d]]^-1 = [[a^-1, 0], [-d^-1 b a^-1, d^-1]]. Unlike a product
    of powers this stays accurate when keys repeat and beta is near 1.
    """
    C = strict.shape[-1]
    if C > TILE:
        a, d = (_unit_lower_inverse(strict[:, half, half]) for half in (slice(C // 2), slice(C // 2, C)))
        b = _einsum("xts,xsr->xtr", d, _einsum("xts,xsr->xtr", strict[:, C // 2 :, : C // 2], a))
        return _lower(a, -b, d)
    index = jnp.arange(C)

    def below(size):
        block = index // size
        mask = (block % 2 == 1)[:, None] & (block[:, None] - 1 == block[None, :])
        return jnp.where(mask[None], strict, 0)

    product = partial(_einsum, "xts,xsr->xtr")
    inverse = jnp.eye(C, dtype=strict.dtype)[None] - below(1)
    size = 2
    while size < C:
        inverse = inverse - product(product(inverse, below(size)), inverse)
        size *= 2
    return inverse


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


def _together(x):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)


def _scan(step, carry, xs, reverse=False):
    return lax.scan(step, carry, xs, reverse=reverse, unroll=True)


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
    return keep[..., None] * state + _einsum("xck,xcv->xkv", out, u)


def _group_forward(lower_bound, states, carry, tokens):
    q, k, v, g, beta, segments, slots = tokens
    (B, T, H), dtype = beta.shape, g.dtype
    G = T // CHUNK
    q, k, g = (_to_tiles(x, TILE).astype(dtype) for x in (q, k, g))
    v, beta = (_to_tiles(x, CHUNK).astype(dtype) for x in (v, beta))
    tile = _chunk(_decays(lower_bound, dtype).tile(q, k, g, _masks(segments, H)), B * H)
    N = _unit_lower_inverse(tile.A * beta[:, None, :])

    def step(carry, x):
        state, finals = carry
        (read, out, keep, N, v, beta), slot = x
        state = _enter(state, states, slot)
        seen = _einsum("xck,xkv->xcv", read[:, :CHUNK], state)
        y = _einsum("xts,xsv->xtv", N, v - seen)
        seen = _einsum("xck,xkv->xcv", read[:, CHUNK:], state)
        state = _advance(state, out, keep, beta[..., None] * y)
        if finals is not None:
            finals = _store(finals, slot.last, slot.segment, state)
        return (state, finals), (y, seen)

    xs = _apart((tile.read, tile.out, tile.keep, N, v, beta), G), jax.tree.map(jnp.transpose, slots)
    carry, (y, seen) = _scan(step, carry, xs)
    y, seen = _together((y, seen))
    o = seen + _einsum("xts,xsv->xtv", tile.P, beta[..., None] * y)
    return carry, _to_time(o, B, H), (y, N, tile.A, tile.P)


def _group_backward(lower_bound, states, dfinals, carry, x):
    (q, k, g, beta, segments, slots), kept, (y, N, A, P), do = x
    (B, T, H), dtype = beta.shape, g.dtype
    G = T // CHUNK
    dtypes = q.dtype, k.dtype, do.dtype
    q, k, g = (_to_tiles(x, TILE).astype(dtype) for x in (q, k, g))
    beta, do = (_to_tiles(x, CHUNK).astype(dtype) for x in (beta, do))
    m, decays = _masks(segments, H), _decays(lower_bound, dtype)
    tiles = decays.tile(q, k, g, m)
    tile, unmerge = jax.vjp(lambda tiles: _chunk(tiles, B * H), tiles)
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
        du = du + _einsum("xck,xkv->xcv", out, dstate)
        dv = _einsum("xts,xtv->xsv", N, beta[..., None] * du)
        dseen = jnp.concatenate([-dv, do], axis=1)
        dread = _einsum("xcv,xkv->xck", dseen, state)
        dout = _einsum("xcv,xkv->xck", u, dstate)
        dkeep = jnp.sum(dstate * state, axis=-1)
        dstate = _advance(dstate, read, keep, dseen)
        if states is not None:
            dstates = _store(dstates, slot.first, slot.segment, dstate)
            ends = jnp.repeat(slot.first, H)[:, None, None]
            dstate = jnp.where(ends, 0, dstate)
        return (dstate, dstates), (du, dv, dread, dout, dkeep)

    du = _einsum("xts,xtv->xsv", P, do)
    xs = _apart((tile.read, tile.out, tile.keep, u, N, beta, do, du), G), met, slots
    carry, out = _scan(back, carry, xs, reverse=True)
    du, dv, dread, dout, dkeep = _together(out)

    # u solves (diag(1 / beta) + A) u = v - k_in S, and dv is the solution of the transposed system.
    dbeta = jnp.sum((du - _einsum("xts,xtv->xsv", A, dv)) * y, axis=-1)
    dpairs = _einsum("xtv,xsv->xts", jnp.concatenate([-dv, do], axis=1), u)
    (dtiles,) = unmerge(_Tile(dread, dout, dkeep, dpairs[:, :CHUNK], dpairs[:, CHUNK:]))
    dq, dk, dg = decays.pull(q, k, g, m, tiles, dtiles)
    dq, dk, dv, dg, dbeta = (_to_time(x, B, H) for x in (dq, dk, dv, dg, dbeta))
    dq, dk, dv = (x.astype(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
    return carry, (dq, dk, dv, dg, dbeta)


# ---- the whole sequence ----------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked(lower_bound, state, q, k, v, g, beta, segments: Segments | None, slots: Slots | None):
    """o [B,T,H,V] and the final state or states, both in g's dtype but o in v's.

    T is a multiple of TILE, and of TILE * GROUP where it exceeds that. `state` is [B,H,K,V] or, with `slots`,
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
    """Leaves [B,T,...] or [B,T / TILE] -> [groups,B,what belongs to a group,...]."""
    count = -(-T // (CHUNK * GROUP))
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), count, -1, *x.shape[2:]), 1, 0), x)


def _ungroup(x):
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), x)


chunked.defvjp(_save, _backward)


def whole_groups(T: int) -> int:
    """T rounded up to a length that `chunked` takes: equal groups of at most GROUP chunks."""
    groups = max(1, -(-T // (CHUNK * GROUP)))
    return groups * CHUNK * -(-T // (CHUNK * groups))
