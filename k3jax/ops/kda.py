"""Kimi Delta Attention: a gated delta rule with one decay per key channel (report Eq. 1-6).

`impl="scan"` is the recurrence as written, one token at a time: the reference. `impl="chunked"` computes the
same from matrix products over tiles of `TILE` tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda_chunked import CHUNK, TILE, Segments, Slots, chunked, whole_groups


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


def _chunked(q, k, v, g, beta, initial_state, ids, gate_lower_bound):
    """A state of its own has the first segment only; the others start from zero."""
    B, T, H, K = q.shape
    state = jnp.zeros((B, H, K, v.shape[-1]), g.dtype) if initial_state is None else initial_state
    pad = whole_groups(T) - T
    tokens = (_pad(x, pad) for x in (q, k, v, g, beta))
    segments = None
    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, pad)), mode="edge")
        segments = Segments(ids, jnp.concatenate([ids[:, :1], ids[:, TILE - 1 : -1 : TILE]], axis=1))
    o, state = chunked(gate_lower_bound, state, *tokens, segments, None)
    return o[:, :T], state


def _pad(x: Array, after: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, after)) + ((0, 0),) * (x.ndim - 2))


def _chunked_with_states(q, k, v, g, beta, states, segment_ids, gate_lower_bound):
    """One initial and final state a segment: tokens are moved so that every segment starts a chunk."""
    B, T = segment_ids.shape
    N = states.shape[1]
    valid = segment_ids > 0
    slot = jnp.where(valid, segment_ids - 1, N)
    rows = jnp.arange(B)
    lengths = jnp.zeros((B, N), jnp.int32).at[rows[:, None], slot].add(1, mode="drop")
    chunks = -(-lengths // CHUNK)
    shift = CHUNK * (jnp.cumsum(chunks, axis=1) - chunks) - (jnp.cumsum(lengths, axis=1) - lengths)
    length = whole_groups(T + N * (CHUNK - 1))
    rank = jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1
    place = jnp.where(valid, rank + jnp.take_along_axis(shift, jnp.minimum(slot, N - 1), axis=1), length)

    def move(x):
        return jnp.zeros((B, length, *x.shape[2:]), x.dtype).at[rows[:, None], place].set(x, mode="drop")

    segment = jnp.max(move(segment_ids).reshape(B, -1, CHUNK), axis=2)
    there = segment > 0
    first = there & (segment != jnp.pad(segment[:, :-1], ((0, 0), (1, 0))))
    last = there & (segment != jnp.pad(segment[:, 1:], ((0, 0), (0, 1))))
    tokens = (move(x) for x in (q, k, v, g, beta))
    o, states = chunked(gate_lower_bound, states, *tokens, None, Slots(segment, first, last))
    return o[rows[:, None], jnp.minimum(place, length - 1)], states
