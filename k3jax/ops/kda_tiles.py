"""What a tile of tokens does to any KDA state it meets: the part of the chunked form that no state enters.

Inside a tile the updates u_t = beta_t (v_t - k_t^T S_t') are decayed sums of each other, so they solve a unit lower
triangular system; with that solved, a tile acts on the state S it meets by matrix products alone (report Eq. 3-6):

    u = beta N (v - k_in S)      N = (I + A diag(beta))^-1, A_ts = k_t^T decay(s -> t) k_s for s < t
    o = q_in S + P u             P_ts = q_t^T decay(s -> t) k_s for s <= t
    S <- keep S + k_out^T u

Arrays are [X,C,...]: X tiles, of all batch rows and heads and of a group of neighbours, each of C tokens. Neighbours
merge: C is TILE first and CHUNK in the end.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

TILE = 16  # decay bounded by e^-5 a token spans e^80 in a tile, which float32 holds as e^-40 ... e^40
CHUNK = 32  # tokens of a merged tile: between two states. On CPUs 16, 32 and 64 take the same time within a tenth.

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)  # else TPUs would round float32 factors to bfloat16


class Segments(NamedTuple):
    """Which tokens see each other.

    ids: [B,T] of every token. met: [B,T / TILE], the segment that owns the state a tile meets.
    """

    ids: Array
    met: Array


class Tile(NamedTuple):
    """What a tile does to the state it meets."""

    read: Array  # [X,2C,K]: k_in above q_in
    out: Array  # [X,C,K]: k_out
    keep: Array  # [X,K]
    A: Array  # [X,C,C], strictly lower
    P: Array  # [X,C,C], lower


class Masks(NamedTuple):
    """[X or 1,...] bool, from the segments of a tile's tokens."""

    before: Array  # [X,C,C]: s < t and of one segment
    upto: Array  # [X,C,C]: the same with s <= t
    reads: Array  # [X,C,1]: the token's segment owns the state met
    writes: Array  # [X,C,1]: the token's segment is that of the last token
    keeps: Array  # [X,1]: both


def masks_of(segments: Segments | None, heads: int) -> Masks:
    upto = jnp.tril(jnp.ones((1, TILE, TILE), bool))
    before = jnp.tril(upto, -1)
    if segments is None:
        one = jnp.ones((1, 1, 1), bool)
        return Masks(before, upto, one, one, one[0])
    ids, met = (jnp.repeat(x, heads, axis=0) for x in _by_tile(segments))  # [X,C], [X]
    same = ids[:, :, None] == ids[:, None, :]
    reads, writes = ids == met[:, None], ids == ids[:, -1:]
    return Masks(before & same, upto & same, reads[..., None], writes[..., None], reads[:, -1:])


def _by_tile(segments: Segments) -> Segments:
    """One group's ids [B,G*C] -> [G*B,C] and met [B,G] -> [G*B]."""
    ids, met = segments
    return Segments(jnp.swapaxes(ids.reshape(*met.shape, TILE), 0, 1).reshape(-1, TILE), met.T.reshape(-1))


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
        G = einsum("xts,xsk->xtk", _each(m.upto, g), g)
        up, down = jnp.exp(G - self.centre), jnp.exp(self.centre - G)
        return up, down, jnp.concatenate([k * up, q * up], axis=1), k * down

    def tile(self, q, k, g, m: Masks) -> Tile:
        up, down, rows, columns = self._factors(q, k, g, m)
        pairs = einsum("xtk,xsk->xts", rows, columns)
        A = jnp.where(m.before, pairs[:, :TILE] * self.recentre, 0)
        P = jnp.where(m.before, pairs[:, TILE:] * self.recentre, 0)
        P = P + _own(q, k)
        return Tile(
            jnp.where(_twice(m.reads), rows * self.start, 0),
            jnp.where(m.writes, columns * self.end * up[:, -1:], 0),
            jnp.where(m.keeps, up[:, -1] * self.start[:, -1], 0),
            A,
            P,
        )

    def pull(self, q, k, g, m: Masks, tile: Tile, d: Tile):
        """Gradients of q, k, g from those of a tile. Written out so that no large terms cancel in that of g."""
        up, down, rows, columns = self._factors(q, k, g, m)
        dpairs = jnp.concatenate([jnp.where(m.before, x * self.recentre, 0) for x in (d.A, d.P)], axis=1)
        from_rows, from_columns = einsum("xts,xsk->xtk", dpairs, columns), einsum("xts,xtk->xsk", dpairs, rows)
        own = jnp.einsum("xtt->xt", d.P)[..., None]
        to_read = jnp.where(_twice(m.reads), d.read * self.start, 0)
        drows = from_rows + to_read
        to_out = jnp.where(m.writes, d.out * self.end * up[:, -1:], 0)
        dq = drows[:, TILE:] * up + own * k
        dk = drows[:, :TILE] * up + (from_columns + to_out) * down + own * q
        # A decay acts on what was written before it and is read after it, and on the state if that outlives the tile.
        weight = drows * rows
        read_later = weight[:, :TILE] + weight[:, TILE:] - from_columns * columns
        dg = einsum("xts,xtk->xsk", _each(m.upto, g), read_later)
        dg = dg + einsum("xts,xsk->xtk", _each(m.before, g), d.out * tile.out) + (d.keep * tile.keep)[:, None]
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

    def tile(self, q, k, g, m: Masks) -> Tile:
        spans = einsum("xts,xsk->xtk", jnp.broadcast_to(self.sums, (len(g), *self.sums.shape[1:])), g)
        decay = jnp.exp(spans).reshape(len(g), -1, TILE, g.shape[-1])
        halves, total, to_end = decay[:, :-2], decay[:, -2], decay[:, -1]
        by_k, by_q = k[:, None] * halves, q[:, None] * halves
        part = (self.pairs & m.before[:, None]).astype(q.dtype)
        A = jnp.sum(einsum("xltk,xlsk->xlts", by_k, by_k) * part, axis=1)
        P = jnp.sum(einsum("xltk,xlsk->xlts", by_q, by_k) * part, axis=1)
        P = P + _own(q, k)
        return Tile(
            jnp.where(_twice(m.reads), jnp.concatenate([k * total, q * total], axis=1), 0),
            jnp.where(m.writes, k * to_end, 0),
            jnp.where(m.keeps, total[:, -1], 0),
            A,
            P,
        )

    def pull(self, q, k, g, m: Masks, tile: Tile, d: Tile):
        return jax.vjp(lambda *x: self.tile(*x, m), q, k, g)[1](d)


def decays(lower_bound: float | None, dtype):
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


def _merge(a: Tile, b: Tile) -> Tile:
    """Two neighbours as one tile: b meets the state that a leaves."""
    C = a.out.shape[1]
    across = einsum("xtk,xsk->xts", b.read, a.out)
    read = b.read * a.keep[:, None]
    return Tile(
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


def together(x):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)


def to_chunk(tile: Tile, rows: int) -> Tile:
    """Tiles [G*rows,...] merged to chunks of CHUNK tokens."""
    size = TILE
    while size < CHUNK:
        pairs = jax.tree.map(lambda x: x.reshape(-1, 2, rows, *x.shape[1:]), tile)
        tile = _merge(*(together(jax.tree.map(lambda x, i=i: x[:, i], pairs)) for i in (0, 1)))
        size *= 2
    return tile


def unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)^-1 for strictly lower triangular [X,C,C], C a power of two, by blocks of 1, 2, 4, ...

    With the diagonal blocks a, d inverted, [[a, 0], [b, d]]^-1 = [[a^-1, 0], [-d^-1 b a^-1, d^-1]]. Unlike a product
    of powers this stays accurate when keys repeat and beta is near 1.
    """
    C = strict.shape[-1]
    if C > TILE:
        a, d = (unit_lower_inverse(strict[:, half, half]) for half in (slice(C // 2), slice(C // 2, C)))
        b = einsum("xts,xsr->xtr", d, einsum("xts,xsr->xtr", strict[:, C // 2 :, : C // 2], a))
        return _lower(a, -b, d)
    index = jnp.arange(C)

    def below(size):
        block = index // size
        mask = (block % 2 == 1)[:, None] & (block[:, None] - 1 == block[None, :])
        return jnp.where(mask[None], strict, 0)

    product = partial(einsum, "xts,xsr->xtr")
    inverse = jnp.eye(C, dtype=strict.dtype)[None] - below(1)
    size = 2
    while size < C:
        inverse = inverse - product(product(inverse, below(size)), inverse)
        size *= 2
    return inverse
