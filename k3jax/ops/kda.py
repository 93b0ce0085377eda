"""Kimi Delta Attention: a gated delta rule with one decay per key channel (report Eq. 1-6).

`impl="scan"` is the recurrence as written, one token at a time: the reference. `impl="chunked"` computes the same from
matrix products over tiles of tokens (`kda_chunked.py`), `impl="tokamax"` by the library of that name
(`kda_tokamax.py`), and `impl="auto"` by whichever is fastest.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from k3jax.derivative import reverse_only
from k3jax.ops import kda_tokamax
from k3jax.ops.kda_chunked import Slots, chunked, whole_groups
from k3jax.ops.kda_tiles import CHUNK, TILE, Segments

IMPLS = ("auto", "scan", "chunked", "tokamax")


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

    What a token gives and what flows back to it depends on no later token, to the last bit.

    Args:
        q, k: [B,T,H,K], normalised, q scaled. v: [B,T,H,V]. Any floating dtype.
        g: log decay [B,T,H,K], at most 0, float32 or wider. beta: [B,T,H] in (0,1), float32 or wider.
        initial_state: [B,H,K,V], zeros by default. With `segment_ids` it continues the row's first segment and the
            others start from zeros; [B,N,H,K,V] gives each segment 1 ... N its own.
        segment_ids: [B,T] int, 1-based and non-decreasing where not 0; 0 is padding, which leaves the state as it
            is and gives zeros. Segments do not see each other.
        gate_lower_bound: what the caller knows of g: no value lies below it. `kda_gate`'s bound belongs here and
            makes the chunked form a third faster. None assumes nothing.
        impl: "scan", "chunked", "tokamax", or "auto".

    Returns:
        o [B,T,H,V] in v's dtype, and the final state in float32 (float64 for float64 inputs): [B,H,K,V], with
        `segment_ids` that of the last segment; [B,N,H,K,V] for an `initial_state` of that shape (a segment that does
        not occur keeps its own); None with `segment_ids` and no `initial_state`.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown `impl`, `segment_ids` that decrease (seen unless
            traced); each named.
        TypeError: forward-mode differentiation of any `impl` but "scan".

    Example:
        >>> o, state = kda(q, k, v, kda_gate(z, A_log, dt_bias, -5.0), beta, gate_lower_bound=-5.0)
    """
    _check(q, k, v, g, beta, initial_state, segment_ids, impl)
    dtype = accumulator(v.dtype)
    g, beta = g.astype(dtype), beta.astype(dtype)
    if initial_state is not None:
        initial_state = initial_state.astype(dtype)
    valid = None
    if segment_ids is not None:
        segment_ids = segment_ids.astype(jnp.int32)
        valid = segment_ids > 0
        # Without decay and without update a padding token is the identity on the state.
        k = jnp.where(valid[:, :, None, None], k, 0)
        g = jnp.where(valid[:, :, None, None], g, 0)
        beta = jnp.where(valid[:, :, None], beta, 0)

    tokens = (q, k, v, g, beta, initial_state)
    if impl != "scan":
        tokens = reverse_only(tokens)
    if impl == "auto":
        o, state = _auto(gate_lower_bound, tokens, segment_ids)
    else:
        o, state = _run(impl, gate_lower_bound, tokens, segment_ids)
    if segment_ids is not None:
        o = jnp.where(valid[:, :, None, None], o, 0)
        state = None if initial_state is None else state
    return o, state


def fastest(backend: str, T: int, K: int, V: int, gradients: bool, tokamax: bool) -> str:
    """What `impl="auto"` takes for T tokens of K x V states: the one place that decides.

    `gradients`: whether they are taken. `tokamax`: whether that library is there and takes such a call.

    Measured on 2 CPU cores, JAX 0.10.2 and 0.12 (B H from 4 to 32, `python -m k3jax bench kda` for long T):
    - one token: unrolled, 0.12 ms against 0.40 ms chunked.
    - without gradients the scan wins below 32 tokens (0.3 ms against 0.6 at 16), and at any length for states of
      32 x 32 or less (3.9 ms against 7.3 at 512 tokens of 16 x 16); 0.9 against 0.8 at 64 tokens of 128 x 128,
      28 against 16 at 2048.
    - with gradients the chunked form wins from 8 tokens on (0.96 ms against 1.4; 9 against 29 with 32 heads): a scan
      keeps a state a token.
    TPUs and GPUs run a scan's step as several kernels, so there the chunked form takes all but single tokens; this is
    reasoned, not measured, and so is the choice of tokamax's kernel on TPUs.
    """
    if T == 1:
        return "step"
    if backend == "cpu":
        scan = T < 8 if gradients else T < CHUNK or K * V <= 32 * 32
        return "scan" if scan else "chunked"
    return "tokamax" if backend == "tpu" and tokamax else "chunked"


def segment_summary(
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    segment_ids: Array | None = None,
    *,
    gate_lower_bound: float | None = None,
    impl: str = "auto",
) -> tuple[Array, Array]:
    """What a stretch of tokens does to the state S it meets: S -> M S + S~ (Eq. 17).

    The columns of S pass through the recurrence apart from each other, so M is what it makes of the identity without
    values, and S~ what it makes of zeros.

    Args:
        k, v, g, beta, segment_ids, gate_lower_bound, impl: as for `kda`. The state met belongs to the first
            segment. If that is another than the stretch before ended in, the caller sets M to 0.

    Returns:
        M [B,H,K,K] and S~ [B,H,K,V], float32 (float64 for float64 inputs). M is 0 where a second segment starts.

    Example:
        >>> summaries = [segment_summary(*x) for x in stretches]      # on each rank, its own
        >>> _, state = functools.reduce(compose, summaries[:rank])    # the state that `rank` meets, from zeros
    """
    B, _, H, K = k.shape
    dtype = accumulator(v.dtype)
    state = jnp.concatenate([jnp.zeros((K, v.shape[-1]), dtype), jnp.eye(K, dtype=dtype)], axis=-1)
    values = jnp.concatenate([v, jnp.zeros((*v.shape[:-1], K), v.dtype)], axis=-1)
    state = jnp.broadcast_to(state[None, None], (B, H, *state.shape))
    _, end = kda(k, k, values, g, beta, state, segment_ids, gate_lower_bound=gate_lower_bound, impl=impl)
    return end[..., v.shape[-1] :], end[..., : v.shape[-1]]


def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """The summary of one stretch followed by another: (M2 M1, M2 S1 + S2). Associative, as `lax.associative_scan` asks."""
    (m1, s1), (m2, s2) = first, second
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    return product(m2, m1), product(m2, s1) + s2


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(q, k, v, g, beta, initial_state, segment_ids, impl) -> None:
    if impl not in IMPLS:
        raise ValueError(f"impl: found {impl!r}, must be one of {', '.join(IMPLS)}")
    if q.ndim != 4:
        raise ValueError(f"q: found shape {q.shape}, must be [B,T,H,K]")
    B, T, H, K = q.shape
    V = v.shape[-1]
    if T == 0:
        raise ValueError(f"q: found shape {q.shape}, must hold at least one token")
    states = (B, H, K, V)
    if segment_ids is not None and initial_state is not None and initial_state.ndim == 5:
        states = (B, initial_state.shape[1], H, K, V)
    expected = {"k": (B, T, H, K), "v": (B, T, H, V), "g": (B, T, H, K), "beta": (B, T, H)}
    expected |= {"initial_state": states, "segment_ids": (B, T)}
    found = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "segment_ids": segment_ids}
    for name, shape in expected.items():
        if found[name] is not None and found[name].shape != shape:
            raise ValueError(f"{name}: found shape {found[name].shape}, must be {shape} to fit q {q.shape}")
    for name, x in found.items():
        kind = jnp.integer if name == "segment_ids" else jnp.floating
        if x is not None and not jnp.issubdtype(x.dtype, kind):
            raise ValueError(f"{name}: found dtype {x.dtype}, must be {kind.__name__}")
        if name in ("g", "beta") and x.dtype.itemsize < 4:
            raise ValueError(f"{name}: found dtype {x.dtype}, must be float32 or wider: decays add up over tokens")
    if segment_ids is not None and not isinstance(segment_ids, jax.core.Tracer):
        ids = np.asarray(segment_ids)
        highest = np.maximum.accumulate(ids, axis=1)
        wrong = np.argwhere((ids != 0) & (ids < highest))
        if len(wrong):
            b, t = wrong[0]
            raise ValueError(
                f"segment_ids: found {ids[b, t]} after {highest[b, t]} (row {b}, token {t}), must not decrease within a row"
            )


# ---- choice ----------------------------------------------------------------------------------------------------------


def _run(impl: str, gate_lower_bound: float | None, tokens, segment_ids: Array | None):
    """By any form, o in v's dtype and the state in g's: what gradients are taken of may be another form than what is not."""
    o, state = _form(impl, gate_lower_bound, tokens, segment_ids)
    _, _, v, g, _, _ = tokens
    return o.astype(v.dtype), state.astype(g.dtype)


def _form(impl: str, gate_lower_bound: float | None, tokens, segment_ids: Array | None):
    q, k, v, g, beta, state = tokens
    if impl == "tokamax":
        return kda_tokamax.kda(q, k, v, g, beta, state, segment_ids)
    ids = None
    if segment_ids is not None:
        # Padding belongs to the segment before it, in front of all to the first.
        first = jnp.min(jnp.where(segment_ids > 0, segment_ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        ids = jnp.maximum(lax.cummax(segment_ids, axis=1), jnp.where(first == jnp.iinfo(jnp.int32).max, 0, first))
    if impl == "chunked":
        if state is not None and state.ndim == 5:
            return _chunked_with_states(q, k, v, g, beta, state, segment_ids, gate_lower_bound)
        return _chunked(q, k, v, g, beta, state, ids, gate_lower_bound)
    q, k, v = (x.astype(g.dtype) for x in (q, k, v))
    if impl == "step" and (state is None or state.ndim == 4):
        return _step(q, k, v, g, beta, state)
    return _scan(q, k, v, g, beta, state, ids)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _auto(gate_lower_bound, tokens, segment_ids):
    return _run(_choose(tokens, segment_ids, gradients=False), gate_lower_bound, tokens, segment_ids)


def _auto_forward(gate_lower_bound, tokens, segment_ids):
    impl = _choose(tokens, segment_ids, gradients=True)
    return jax.vjp(lambda tokens: _run(impl, gate_lower_bound, tokens, segment_ids), tokens)


def _auto_backward(gate_lower_bound, pull, cotangents):
    return (*pull(cotangents), None)


_auto.defvjp(_auto_forward, _auto_backward)


def _choose(tokens, segment_ids, gradients: bool) -> str:
    q, _, v, _, _, state = tokens
    tokamax = kda_tokamax.takes(q, v, state, segment_ids)
    return fastest(jax.default_backend(), q.shape[1], q.shape[-1], v.shape[-1], gradients, tokamax)


# ---- reference -------------------------------------------------------------------------------------------------------


def _scan(q, k, v, g, beta, initial_state, ids):
    """The recurrence, token by token."""
    B, T, H, K = q.shape
    rows = jnp.arange(B)
    state = jnp.zeros((B, H, K, v.shape[-1]), q.dtype)
    states = None  # one a segment
    if initial_state is not None and initial_state.ndim == 5:
        states = initial_state
    elif initial_state is not None:
        state = initial_state
    segmented = ids is not None
    ids = ids if segmented else jnp.ones((B, T), jnp.int32)

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
            # A row of padding alone is segment 0, which has no state: index N is out of range and dropped.
            index = jnp.where(segment > 0, segment - 1, states.shape[1])
            states = states.at[rows, index].set(state, mode="drop")
        return (state, states, segment), jnp.einsum("bhk,bhkv->bhv", q, state)

    first = ids[:, 0] if states is None else jnp.zeros(B, ids.dtype)
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, ids))
    (state, states, _), o = lax.scan(step, (state, states, first), tokens)
    return jnp.moveaxis(o, 0, 1), state if states is None else states


# ---- one token -------------------------------------------------------------------------------------------------------


def _step(q, k, v, g, beta, state):
    """T = 1: the state is read once and rewritten once.

    Both products with the decayed state are one; o = S^T q follows from the update without reading the new S.
    """
    q, k, v, g, beta = (x[:, 0] for x in (q, k, v, g, beta))
    if state is None:
        state = jnp.zeros((*k.shape, v.shape[-1]), g.dtype)
    decay = jnp.exp(g)
    reads = jnp.stack([k * decay, q * decay], axis=2)
    seen = jnp.einsum("bhck,bhkv->bhcv", reads, state, precision=lax.Precision.HIGHEST)
    u = beta[..., None] * (v - seen[:, :, 0])
    o = seen[:, :, 1] + jnp.sum(q * k, axis=-1, keepdims=True) * u
    return o[:, None], decay[..., None] * state + k[..., None] * u[:, :, None, :]


# ---- chunked ---------------------------------------------------------------------------------------------------------


def _chunked(q, k, v, g, beta, initial_state, ids, gate_lower_bound):
    """`initial_state` is the first segment's; the others start from zero."""
    B, T, H, K = q.shape
    state = jnp.zeros((B, H, K, v.shape[-1]), g.dtype) if initial_state is None else initial_state
    pad = whole_groups(T) - T
    tokens = (jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, g, beta))
    segments = None
    if ids is not None:
        ids = jnp.pad(ids, ((0, 0), (0, pad)), mode="edge")
        segments = Segments(ids, jnp.concatenate([ids[:, :1], ids[:, TILE - 1 : -1 : TILE]], axis=1))
    o, state = chunked(gate_lower_bound, state, *tokens, segments, None)
    return o[:, :T], state


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
