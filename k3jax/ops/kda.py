"""Kimi Delta Attention: a gated delta rule with one decay per key channel (report Eq. 1-6).

`impl="scan"` is the recurrence as written, one token at a time: the reference. `impl="chunked"` computes the
same from matrix products over tiles of `TILE` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

TILE = 16  # tokens of one matrix product: decay bounded by e^-5 a token spans e^80 in a tile, which float32 holds
GROUP = 8  # tiles whose state-free part is computed together


def l2norm(x: Array, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis, computed in at least float32 and returned in x's dtype."""
    wide = x.astype(accumulator(x.dtype))
    return (wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def accumulator(dtype) -> jnp.dtype:
    """The dtype sums are kept in: float64 for float64 inputs, float32 otherwise."""
    return jnp.dtype(jnp.float64) if jnp.dtype(dtype) == jnp.float64 else jnp.dtype(jnp.float32)


def kda_gate(z: Array, A_log: Array, dt_bias: Array, lower_bound: float | None) -> Array:
    """Log decay of every key channel.

    With a bound (Kimi K3): g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias)), in (lower_bound, 0).
    Without (Kimi-Linear): g = -exp(A_log) * softplus(z + dt_bias), unbounded below.

    Args:
        z: decay logits [B,T,H,K]. A_log: [H]. dt_bias: [H,K].
        lower_bound: negative, or None.

    Returns:
        g [B,T,H,K] in float32 (float64 for float64 logits).

    Example:
        >>> kda_gate(jnp.zeros((1, 1, 1, 1)), jnp.zeros(1), jnp.zeros((1, 1)), -5.0).item()
        -2.5
    """
    dtype = accumulator(z.dtype)
    rate = jnp.exp(A_log.astype(dtype))[None, None, :, None]
    shifted = z.astype(dtype) + dt_bias.astype(dtype)[None, None, :, :]
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * _sigmoid(rate * shifted)


@jax.custom_jvp
def _sigmoid(x: Array) -> Array:
    return jax.nn.sigmoid(x)


@_sigmoid.defjvp
def _(primals, tangents):
    # In float32 1 - s(x) rounds to zero where s(-x) keeps its digits: a saturated decay still learns. float64 has
    # digits to spare and takes the form the released code differentiates, so that the two agree to rounding.
    (x,), (dx,) = primals, tangents
    y = _sigmoid(x)
    return y, dx * y * (1 - y if x.dtype == jnp.float64 else _sigmoid(-x))


def kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    *,
    gate_lower_bound: float | None = None,
    impl: str = "auto",
) -> tuple[Array, Array | None]:
    """S <- Diag(exp g) S;  S <- S + beta k (v - k^T S)^T;  o = S^T q, for each head and token in order (Eq. 1-2).

    Args:
        q, k: [B,T,H,K], normalised, q scaled. v: [B,T,H,V]. Any floating dtype.
        g: log decay [B,T,H,K], at most 0, float32 or wider. beta: [B,T,H] in (0,1), float32 or wider.
        initial_state: [B,H,K,V]; with `segment_ids` one state a segment, [B,N,H,K,V]. Zeros by default.
        segment_ids: [B,T] int, 1-based and non-decreasing where not 0; 0 is padding, which leaves the state as it
            is and gives zeros. Segments do not see each other.
        gate_lower_bound: what the caller knows of g: no value lies below it. `kda_gate`'s bound belongs here;
            tiles are then plain matrix products. None assumes nothing.
        impl: "scan", "chunked", or "auto".

    Returns:
        o [B,T,H,V] in v's dtype, and the final state in float32 (float64 for float64 inputs): [B,H,K,V], or with
        `segment_ids` and `initial_state` [B,N,H,K,V] (a segment that does not occur keeps its initial state), or
        None with `segment_ids` alone.

    Raises:
        ValueError: an unknown `impl`, or shapes that do not fit, named.

    Example:
        >>> o, state = kda(q, k, v, kda_gate(z, A_log, dt_bias, -5.0), beta, gate_lower_bound=-5.0)
    """
    _check_shapes(q, k, v, g, beta, initial_state, segment_ids)
    if impl == "auto":
        # A tile costs the same however few of its tokens are real.
        impl = "chunked" if q.shape[1] >= TILE else "scan"
    if impl not in ("scan", "chunked"):
        raise ValueError(f"impl: found {impl!r}, must be 'auto', 'scan' or 'chunked'")
    out_dtype, dtype = v.dtype, accumulator(v.dtype)
    q, k, v, g, beta = (x.astype(dtype) for x in (q, k, v, g, beta))
    if initial_state is not None:
        initial_state = initial_state.astype(dtype)

    ids = None
    if segment_ids is not None:
        segment_ids = segment_ids.astype(jnp.int32)
        valid = segment_ids > 0
        ids = lax.cummax(segment_ids, axis=1)  # padding belongs to the segment before it
        # Without decay and without update a padding token is the identity on the state.
        k = jnp.where(valid[:, :, None, None], k, 0)
        g = jnp.where(valid[:, :, None, None], g, 0)
        beta = jnp.where(valid[:, :, None], beta, 0)
    if impl == "scan":
        o, state = _scan(q, k, v, g, beta, initial_state, ids)
    elif ids is None or initial_state is None:
        o, state = _chunked(q, k, v, g, beta, initial_state, ids, gate_lower_bound)
    else:
        o, state = _chunked_with_states(q, k, v, g, beta, initial_state, segment_ids, gate_lower_bound)
    if segment_ids is not None:
        o = jnp.where(valid[:, :, None, None], o, 0)
        state = None if initial_state is None else state
    return o.astype(out_dtype), state


def _check_shapes(q, k, v, g, beta, initial_state, segment_ids) -> None:
    B, T, H, K = q.shape
    V = v.shape[-1]
    states = (B, H, K, V)
    if segment_ids is not None and initial_state is not None and initial_state.ndim == 5:
        states = (B, initial_state.shape[1], H, K, V)
    expected = {"k": (B, T, H, K), "v": (B, T, H, V), "g": (B, T, H, K), "beta": (B, T, H)}
    expected |= {"initial_state": states, "segment_ids": (B, T)}
    found = {"k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "segment_ids": segment_ids}
    for name, shape in expected.items():
        if found[name] is not None and found[name].shape != shape:
            raise ValueError(f"{name}: found shape {found[name].shape}, must be {shape} to fit q {q.shape}")
    if segment_ids is not None and initial_state is not None and initial_state.ndim != 5:
        raise ValueError(f"initial_state: found shape {initial_state.shape}, must be [B,N,H,K,V] with segment_ids")


# ---- reference -------------------------------------------------------------------------------------------------------


def _scan(q, k, v, g, beta, initial_state, ids):
    """The recurrence, token by token."""
    B, T, H, K = q.shape
    rows = jnp.arange(B)
    segmented = ids is not None
    states = initial_state if segmented else None  # one state a segment
    state = jnp.zeros((B, H, K, v.shape[-1]), q.dtype)
    if not segmented:
        state = state if initial_state is None else initial_state
        ids = jnp.ones((B, T), jnp.int32)

    def step(carry, token):
        state, states, previous = carry
        q, k, v, g, beta, segment = token
        if segmented:
            fresh = jnp.zeros_like(state) if states is None else states[rows, jnp.maximum(segment - 1, 0)]
            state = jnp.where((segment != previous)[:, None, None, None], fresh, state)
        state = state * jnp.exp(g)[..., None]
        update = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * update[:, :, None, :]
        if states is not None:
            # Leading padding (segment 0) has no state of its own: index N is out of range and dropped.
            index = jnp.where(segment > 0, segment - 1, states.shape[1])
            states = states.at[rows, index].set(state, mode="drop")
        return (state, states, segment), jnp.einsum("bhk,bhkv->bhv", q, state)

    first = jnp.zeros(B, ids.dtype)
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, ids))
    (state, states, _), o = lax.scan(step, (state, states, first), tokens)
    return jnp.moveaxis(o, 0, 1), state if states is None else states


# ---- chunked ---------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def _unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)^-1 for strictly lower triangular [B,H,C,C], C a power of two, by blocks of 1, 2, 4, ...

    With the diagonal blocks a, d inverted, [[a, 0], [b, d]]^-1 = [[a^-1, 0], [-d^-1 b a^-1, d^-1]]. Unlike a product
    of powers this stays accurate when keys repeat and beta is near 1.
    """
    C = strict.shape[-1]
    index = jnp.arange(C)

    def below(size):
        block = index // size
        mask = (block % 2 == 1)[:, None] & (block[:, None] - 1 == block[None, :])
        return jnp.where(mask[None, None], strict, 0)

    inverse = jnp.eye(C, dtype=strict.dtype)[None, None] - below(1)
    size = 2
    while size < C:
        inverse = inverse - inverse @ below(size) @ inverse
        size *= 2
    return inverse


@_unit_lower_inverse.defjvp
def _(primals, tangents):
    inverse = _unit_lower_inverse(*primals)
    return inverse, -inverse @ tangents[0] @ inverse


def _decays(g: Array, gate_lower_bound: float | None):
    """Ways to decay from token s to token t of one tile, for log decays g [B,H,C,K].

    Returns (pair, total, to_end): `pair(x, y)` is sum_k x_tk y_sk exp(G_t - G_s) [B,H,C,C], exact for s < t and
    meaningless elsewhere, G the running sum of g; `total` = exp(G_t) and `to_end` = exp(G_C - G_s), [B,H,C,K].
    """
    C = g.shape[-2]
    G = jnp.cumsum(g, axis=-2)
    # Summed from the end rather than as G_C - G_s, whose gradient would cancel at the last token.
    to_end = jnp.exp(lax.cumsum(jnp.pad(g[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0))), axis=2, reverse=True))
    if gate_lower_bound is not None and -gate_lower_bound * C <= 80:
        # G_t lies between t * bound and 0. Centred at t * bound / 2 both factors stay within exp(+-40), for any g:
        # the centre depends on the position alone, so no later token changes the rounding of an earlier one.
        centre = gate_lower_bound / 2 * jnp.arange(1, C + 1, dtype=g.dtype)[None, None, :, None]
        up = jnp.exp(G - centre)
        down = jnp.exp(centre - G)
        recentre = jnp.exp(centre - centre.mT)

        def pair(x, y):
            return jnp.einsum("bhtk,bhsk->bhts", x * up, y * down) * recentre

        return pair, jnp.exp(G), to_end

    # Unbounded: a difference of running sums would cancel, so each G_t - G_s is summed on its own.
    later = jnp.tril(jnp.ones((C, C), bool), -1)[None, None, :, :, None]
    span = jnp.cumsum(jnp.where(later, g[:, :, :, None, :], 0), axis=2)  # [B,H,t,s,K]

    def pair(x, y):
        return jnp.einsum("bhtk,bhsk,bhtsk->bhts", x, y, jnp.exp(span))

    return pair, jnp.exp(G), to_end


class _Tile(NamedTuple):
    """What a tile does to any incoming state S: u = fresh - (read S)[:C], o = (read S)[C:] + p u, S <- keep S + k_out^T u."""

    read: Array  # [B,H,2C,K]
    fresh: Array  # [B,H,C,V]
    p: Array  # [B,H,C,C]
    k_out: Array  # [B,H,C,K]
    keep: Array  # [B,H,K,1]


def _tile(q, k, v, g, beta, ids, carried, gate_lower_bound) -> _Tile:
    """The part of one tile that no state enters: q, k, v, g [B,H,C,.]; beta [B,H,C]; ids [B,C] or None; carried [B] the
    segment of the incoming state.

    With u_t = beta_t (v_t - k_t^T S_t') the state is a decayed sum of k_t u_t^T, so the tile's u solve a unit lower
    triangular system and everything else is a matrix product (Eq. 3-6).
    """
    C = q.shape[-2]
    pair, total, to_end = _decays(g, gate_lower_bound)
    before = jnp.tril(jnp.ones((C, C), bool), -1)[None, None]
    keep = total[:, :, -1, :, None]
    k_out = k * to_end
    if ids is not None:
        before = before & (ids[:, None, :, None] == ids[:, None, None, :])
        total = jnp.where((ids == carried[:, None])[:, None, :, None], total, 0)
        k_out = jnp.where((ids == ids[:, -1:])[:, None, :, None], k_out, 0)
        keep = jnp.where((ids[:, -1] == carried)[:, None, None, None], keep, 0)
    inverse = _unit_lower_inverse(beta[..., None] * jnp.where(before, pair(k, k), 0)) * beta[:, :, None, :]
    # A token reads its own update undecayed.
    own = jnp.eye(C, dtype=q.dtype)[None, None] * jnp.sum(q * k, axis=-1, keepdims=True)
    p = jnp.where(before, pair(q, k), 0) + own
    read = jnp.concatenate([inverse @ (k * total), q * total], axis=-2)
    return _Tile(read, inverse @ v, p, k_out, keep)


def _advance(state: Array, tile: _Tile):
    """The part of one tile that waits for the state: (next state, (what is read of the old state, the updates u))."""
    read = tile.read @ state
    C = tile.fresh.shape[-2]
    u = tile.fresh - read[:, :, :C]
    return tile.keep * state + tile.k_out.mT @ u, (read[:, :, C:], u)


def _scan_tiles(carry, tokens, extra, advance, T: int, gate_lower_bound):
    """Runs tiles [n,...] in groups: what no state enters for a whole group at once, then the states one by one.

    Only the states between groups are kept for the backward pass.
    """
    n = tokens[0].shape[0]
    group = min(n, GROUP)

    @jax.checkpoint
    def step(carry, part):
        *tokens, extra = part
        tiles = jax.vmap(lambda *x: _tile(*x, gate_lower_bound))(*tokens)
        carry, (o, u) = lax.scan(advance, carry, (tiles, extra))
        return carry, o + tiles.p @ u

    grouped = jax.tree.map(lambda x: x.reshape(n // group, group, *x.shape[1:]), (*tokens, extra))
    carry, o = lax.scan(step, carry, grouped)
    o = jnp.einsum("mnbhcv->bmnchv", o)
    return o.reshape(o.shape[0], n * TILE, *o.shape[4:])[:, :T], carry


def _tiles(x: Array, n: int) -> Array:
    """[B,T,H,...] -> [n,B,H,C,...] and [B,T] -> [n,B,C], padded at the end; padded segment ids repeat the last."""
    B, T = x.shape[:2]
    pad = ((0, 0), (0, n * TILE - T)) + ((0, 0),) * (x.ndim - 2)
    x = jnp.pad(x, pad, mode="edge" if x.ndim == 2 else "constant")
    x = jnp.moveaxis(x.reshape(B, n, TILE, *x.shape[2:]), 1, 0)
    return x if x.ndim == 3 else jnp.moveaxis(x, 3, 2)


def _tile_count(tiles: int) -> int:
    """Tiles rounded up to whole groups."""
    return tiles if tiles <= GROUP else -(-tiles // GROUP) * GROUP


def _chunked(q, k, v, g, beta, initial_state, ids, gate_lower_bound):
    """Segments, if any, all start from zero."""
    B, T, H, K = q.shape
    n = _tile_count(-(-T // TILE))
    state = jnp.zeros((B, H, K, v.shape[-1]), q.dtype) if initial_state is None else initial_state
    tokens = [_tiles(x, n) for x in (q, k, v, g, beta)] + [None, None]
    if ids is not None:
        tokens[5] = _tiles(ids, n)
        tokens[6] = jnp.pad(tokens[5][:-1, :, -1], ((1, 0), (0, 0)))  # segment of the state each tile meets
    return _scan_tiles(state, tokens, None, lambda state, x: _advance(state, x[0]), T, gate_lower_bound)


def _chunked_with_states(q, k, v, g, beta, states, segment_ids, gate_lower_bound):
    """One initial and final state a segment: tokens are moved so that every segment starts a tile."""
    B, T = segment_ids.shape
    N = states.shape[1]
    valid = segment_ids > 0
    slot = jnp.where(valid, segment_ids - 1, N)
    rows = jnp.arange(B)
    lengths = jnp.zeros((B, N), jnp.int32).at[rows[:, None], slot].add(1, mode="drop")
    tiles_before = jnp.cumsum(-(-lengths // TILE), axis=1) - -(-lengths // TILE)
    tokens_before = jnp.cumsum(lengths, axis=1) - lengths
    rank = jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1
    shift = TILE * tiles_before - tokens_before
    n = _tile_count(-(-T // TILE) + N)
    place = jnp.where(valid, rank + jnp.take_along_axis(shift, jnp.minimum(slot, N - 1), axis=1), n * TILE)

    def move(x):
        return jnp.zeros((B, n * TILE, *x.shape[2:]), x.dtype).at[rows[:, None], place].set(x, mode="drop")

    def advance(states, x):
        tile, segment = x
        state, out = _advance(states[rows, jnp.maximum(segment - 1, 0)], tile)
        index = jnp.where(segment > 0, segment - 1, N)  # 0: nothing in this tile
        return states.at[rows, index].set(state, mode="drop"), out

    segments = jnp.max(move(segment_ids).reshape(B, n, TILE), axis=2).T
    tokens = [_tiles(move(x), n) for x in (q, k, v, g, beta)] + [None, None]
    o, states = _scan_tiles(states, tokens, segments, advance, n * TILE, gate_lower_bound)
    return o[rows[:, None], jnp.minimum(place, n * TILE - 1)], states
