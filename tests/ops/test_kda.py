"""KDA: both forms against exact values, each other and the definition."""

from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from k3jax.ops import kda, kda_gate, l2norm

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "ops" / "kda.npz")
CASES = sorted({name.split(".")[0] for name in GOLDEN.files})
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}


def relative(found, golden):
    return float(np.max(np.abs(np.asarray(found, np.float64) - golden)) / np.max(np.abs(golden)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("impl", ["scan", "chunked"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, impl, dtype):
    golden = {name.split(".", 1)[1]: GOLDEN[name] for name in GOLDEN.files if name.startswith(case + ".")}
    bound = float(golden["lower_bound"])
    bound = None if np.isnan(bound) else bound
    names = ["q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias"]
    names += ["initial_state"] * ("initial_state" in golden)
    inputs = {name: jnp.asarray(golden[name], dtype) for name in names}
    H, K = golden["q"].shape[2:]
    segment_ids = None
    if "cu_seqlens" in golden:
        ends = golden["cu_seqlens"]
        segment_ids = jnp.asarray(np.repeat(np.arange(1, len(ends)), np.diff(ends)))[None]

    def forward(x):
        state = x.get("initial_state")
        state = state[None] if segment_ids is not None else state
        o, final = kda(
            l2norm(x["q"]) * K**-0.5,
            l2norm(x["k"]),
            x["v"],
            kda_gate(x["g_raw"], x["A_log"], x["dt_bias"].reshape(H, K), bound),
            jax.nn.sigmoid(x["beta_raw"]),
            state,
            segment_ids,
            gate_lower_bound=bound,
            impl=impl,
        )
        return o, final[0] if segment_ids is not None else final

    (o, final), vjp = jax.vjp(jax.jit(forward), inputs)
    (gradients,) = vjp((jnp.asarray(golden["do"], dtype), jnp.asarray(golden["dfinal_state"], dtype)))
    errors = {"o": relative(o, golden["o"]), "final_state": relative(final, golden["final_state"])}
    errors |= {name: relative(gradients[name], golden[f"grad.{name}"]) for name in names}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def draw(seed, B, T, H, K, V, low=-5.0):
    rng = np.random.default_rng(seed)
    q, k = (np.asarray(l2norm(jnp.asarray(rng.normal(size=(B, T, H, K))))) for _ in range(2))
    v = rng.normal(size=(B, T, H, V))
    g = low * rng.uniform(size=(B, T, H, K)) ** 2
    beta = rng.uniform(size=(B, T, H))
    return tuple(map(jnp.asarray, (q, k, v, g, beta)))


def by_definition(q, k, v, g, beta, state):
    """One head, plain numpy."""
    out = []
    for t in range(len(q)):
        state = np.exp(g[t])[:, None] * state
        state = state + beta[t] * np.outer(k[t], v[t] - k[t] @ state)
        out.append(q[t] @ state)
    return np.array(out), state


@pytest.mark.parametrize("impl", ["scan", "chunked"])
def test_definition(impl):
    q, k, v, g, beta = draw(0, 1, 19, 1, 4, 3)
    state = np.random.default_rng(1).normal(size=(1, 1, 4, 3))
    o, final = kda(q, k, v, g, beta, jnp.asarray(state), gate_lower_bound=-5.0, impl=impl)
    expected, end = by_definition(*(np.asarray(x)[0, :, 0] for x in (q, k, v, g, beta)), state[0, 0])
    np.testing.assert_allclose(o[0, :, 0], expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(final[0, 0], end, rtol=1e-12, atol=1e-13)


def test_hand_computed():
    # One channel: S = 1*exp(-ln 2) = 0.5; S += 0.5 * 1 * (3 - 0.5) = 1.75; o = 2 * 1.75.
    one = jnp.ones((1, 1, 1, 1))
    o, state = kda(2 * one, one, 3 * one, -np.log(2.0) * one, 0.5 * one[..., 0], one)
    assert float(o[0, 0, 0, 0]) == pytest.approx(3.5, rel=1e-15)
    assert float(state[0, 0, 0, 0]) == pytest.approx(1.75, rel=1e-15)


@partial(jax.jit, static_argnums=(3, 4))
def _loss_and_gradients(inputs, ids, weights, bounded, impl):
    def loss(inputs):
        o, _ = kda(*inputs, None, ids, gate_lower_bound=-5.0 if bounded else None, impl=impl)
        return jnp.sum(o * weights)

    return jax.value_and_grad(loss)(inputs)


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(T=st.sampled_from([1, 5, 16, 31, 50]), bounded=st.booleans(), seed=st.integers(0, 99), segments=st.booleans())
def test_scan_equals_chunked(T, bounded, seed, segments):
    """Outputs and gradients at odd lengths, with segments and padding anywhere."""
    inputs = draw(seed, 2, T, 2, 4, 3, -5.0 if bounded else -300.0)
    rng = np.random.default_rng(seed)
    ids = None
    if segments:
        ids = np.sort(rng.integers(1, 5, size=(2, T)), axis=1)
        ids = jnp.asarray(np.where(rng.uniform(size=(2, T)) < 0.15, 0, ids))
    weights = jnp.asarray(rng.normal(size=(2, T, 2, 3)))

    a, b = (_loss_and_gradients(inputs, ids, weights, bounded, impl) for impl in ("scan", "chunked"))
    chex.assert_trees_all_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("impl", ["scan", "chunked"])
def test_segments_are_separate_sequences(impl):
    """A packed row with one state a segment gives what each document gives alone; absent segments keep theirs."""
    q, k, v, g, beta = draw(3, 1, 40, 2, 4, 3)
    ids = jnp.asarray([0] * 2 + [1] * 7 + [2] * 18 + [0] * 3 + [4] * 10)[None]
    states = jnp.asarray(np.random.default_rng(4).normal(size=(1, 4, 2, 4, 3)))
    o, final = kda(q, k, v, g, beta, states, ids, gate_lower_bound=-5.0, impl=impl)
    assert final.shape == states.shape
    for n, (start, stop) in {0: (2, 9), 1: (9, 27), 3: (30, 40)}.items():
        alone = (x[:, start:stop] for x in (q, k, v, g, beta))
        expected, end = kda(*alone, states[:, n], impl="scan")
        np.testing.assert_allclose(o[:, start:stop], expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(final[:, n], end, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(final[:, 2], states[:, 2])
    np.testing.assert_array_equal(o[:, :2], 0)
    np.testing.assert_array_equal(o[:, 27:30], 0)


@pytest.mark.parametrize("impl", ["scan", "chunked"])
def test_state_continues_a_sequence(impl):
    inputs = draw(5, 2, 45, 2, 4, 3)
    whole, end = kda(*inputs, gate_lower_bound=-5.0, impl=impl)
    first, state = kda(*(x[:, :21] for x in inputs), gate_lower_bound=-5.0, impl=impl)
    second, final = kda(*(x[:, 21:] for x in inputs), state, gate_lower_bound=-5.0, impl=impl)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(final, end, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_repeated_keys(bound):
    """The same key in every token with beta near 1 and no decay: the hardest system to invert."""
    q, k, v, g, beta = draw(6, 1, 64, 1, 8, 8)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    inputs = tuple(x.astype(jnp.float32) for x in (q, k, v, g * 0, beta * 0 + 0.999))
    exact, _ = kda(*(x.astype(jnp.float64) for x in inputs), impl="scan")
    o, _ = kda(*inputs, gate_lower_bound=bound, impl="chunked")
    assert relative(o, np.asarray(exact)) <= 2e-5


def test_prefix_does_not_see_later_tokens():
    inputs = draw(7, 1, 48, 2, 4, 3)
    changed = tuple(x.at[:, 21:].multiply(0.5) for x in inputs)
    run = jax.jit(lambda x: kda(*x, gate_lower_bound=-5.0, impl="chunked")[0])
    np.testing.assert_array_equal(run(inputs)[:, :21], run(changed)[:, :21])
    assert not np.array_equal(run(inputs)[:, 21:], run(changed)[:, 21:])


def test_gate():
    z = jnp.asarray([[[[0.0, 1.0], [2.0, -3.0]]]])
    A_log, dt_bias = jnp.asarray([0.0, 0.5]), jnp.asarray([[0.1, 0.2], [0.3, 0.4]])
    x = np.exp([[0.0], [0.5]]) * (np.asarray(z)[0, 0] + np.asarray(dt_bias))
    np.testing.assert_allclose(kda_gate(z, A_log, dt_bias, -5.0)[0, 0], -5 / (1 + np.exp(-x)), rtol=1e-14)
    soft = -np.exp([[0.0], [0.5]]) * np.log1p(np.exp(np.asarray(z)[0, 0] + np.asarray(dt_bias)))
    np.testing.assert_allclose(kda_gate(z, A_log, dt_bias, None)[0, 0], soft, rtol=1e-14)
    assert kda_gate(z.astype(jnp.bfloat16), A_log, dt_bias, -5.0).dtype == jnp.float32


def test_bfloat16_inputs_keep_a_float32_state():
    inputs = draw(8, 1, 33, 2, 4, 3)
    exact, _ = kda(*inputs, impl="scan")
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs[:3])
    o, state = kda(q, k, v, *(x.astype(jnp.float32) for x in inputs[3:]), gate_lower_bound=-5.0)
    assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    assert relative(o, np.asarray(exact)) <= 2e-2


def test_errors_name_the_argument():
    q, k, v, g, beta = draw(9, 1, 4, 2, 4, 3)
    with pytest.raises(ValueError, match=r"beta: found shape \(1, 4, 2, 1\), must be \(1, 4, 2\)"):
        kda(q, k, v, g, beta[..., None])
    with pytest.raises(ValueError, match=r"initial_state: .* must be \[B,N,H,K,V\]"):
        kda(q, k, v, g, beta, jnp.zeros((1, 2, 4, 3)), jnp.ones((1, 4), jnp.int32))
    with pytest.raises(ValueError, match="impl: found 'fast'"):
        kda(q, k, v, g, beta, impl="fast")
