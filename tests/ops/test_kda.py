"""KDA: both forms against exact values, each other and the definition."""

import sys
from functools import partial, reduce
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from k3jax.ops import compose, kda, kda_chunked, kda_gate, kda_tokamax, l2norm, segment_summary
from k3jax.ops.conv import short_conv

kda_op = sys.modules["k3jax.ops.kda"]  # the name `k3jax.ops.kda` is the function
GOLDEN = np.load(Path(__file__).parents[1] / "data" / "ops" / "kda.npz")
CASES = sorted({name.split(".")[0] for name in GOLDEN.files})
TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-2}


def relative(found, golden):
    return float(np.max(np.abs(np.asarray(found, np.float64) - golden)) / np.max(np.abs(golden)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("impl", ["scan", "chunked"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, impl, dtype):
    """Outputs, states and all gradients. "bfloat16" rounds what may be: q, k, v after their normalisation."""
    golden = {name.split(".", 1)[1]: GOLDEN[name] for name in GOLDEN.files if name.startswith(case + ".")}
    bound = float(golden["lower_bound"])
    bound = None if np.isnan(bound) else bound
    names = ["q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias"]
    names += ["initial_state"] * ("initial_state" in golden)
    wide, narrow = ("float32", dtype) if dtype == "bfloat16" else (dtype, dtype)
    inputs = {name: jnp.asarray(golden[name], wide) for name in names}
    H, K = golden["q"].shape[2:]
    segment_ids = None
    if "cu_seqlens" in golden:
        ends = golden["cu_seqlens"]
        segment_ids = jnp.asarray(np.repeat(np.arange(1, len(ends)), np.diff(ends)))[None]

    def forward(x):
        state = x.get("initial_state")
        state = state[None] if segment_ids is not None else state
        o, final = kda(
            (l2norm(x["q"]) * K**-0.5).astype(narrow),
            l2norm(x["k"]).astype(narrow),
            x["v"].astype(narrow),
            kda_gate(x["g_raw"], x["A_log"], x["dt_bias"].reshape(H, K), bound),
            jax.nn.sigmoid(x["beta_raw"]),
            state,
            segment_ids,
            gate_lower_bound=bound,
            impl=impl,
        )
        return o, final[0] if segment_ids is not None else final

    (o, final), vjp = jax.vjp(jax.jit(forward), inputs)
    assert o.dtype == narrow and final.dtype == wide
    (gradients,) = vjp((jnp.asarray(golden["do"], narrow), jnp.asarray(golden["dfinal_state"], wide)))
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


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(T=st.sampled_from([1, 5, 33, 50]), bounded=st.booleans(), seed=st.integers(0, 99), segments=st.booleans())
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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_prefix_knows_nothing_of_later_tokens(bound, packed):
    """Not one bit of its outputs, nor of its gradients, changes with them; and what comes later gets no gradient."""
    low = -5.0 if bound else -20.0
    inputs, others = draw(7, 1, 70, 2, 4, 3, low), draw(8, 1, 70, 2, 4, 3, low)
    inputs, others = (tuple(x.astype(jnp.float32) for x in xs) for xs in (inputs, others))
    weights = jnp.asarray(np.random.default_rng(9).normal(size=(1, 70, 2, 3)), jnp.float32)
    ids = jnp.asarray(np.repeat([1, 2, 3], [20, 25, 25]))[None] if packed else None

    @jax.jit
    def run(x, weights):
        o, pull = jax.vjp(lambda x: kda(*x, None, ids, gate_lower_bound=bound, impl="chunked")[0], x)
        return o, pull(weights)[0]

    for cut in (1, 15, 16, 21, 32, 40, 64):
        mixed = tuple(jnp.concatenate([a[:, :cut], b[:, cut:]], axis=1) for a, b in zip(inputs, others, strict=True))
        kept = weights.at[:, cut:].set(0)
        (o, gradients), (o2, gradients2) = run(inputs, kept), run(mixed, kept)
        np.testing.assert_array_equal(o[:, :cut], o2[:, :cut])
        assert not np.array_equal(o[:, cut:], o2[:, cut:])
        for a, b in zip(gradients, gradients2, strict=True):
            np.testing.assert_array_equal(a[:, :cut], b[:, :cut])
            np.testing.assert_array_equal(a[:, cut:], 0)
            assert cut == 1 or np.any(a[:, :cut])


@pytest.mark.parametrize("bound", [-5.0, None])
def test_no_gradient_between_segments(bound):
    inputs = draw(10, 1, 70, 2, 4, 3)
    ids = jnp.asarray(np.repeat([1, 2, 3], [20, 25, 25]))[None]
    gradients = jax.grad(
        lambda x: jnp.sum(kda(*x, None, ids, gate_lower_bound=bound, impl="chunked")[0][:, 20:45] ** 2)
    )(inputs)
    for x in gradients:
        assert np.any(x[:, 20:45])
        np.testing.assert_array_equal(x[:, :20], 0)
        np.testing.assert_array_equal(x[:, 45:], 0)


@pytest.mark.parametrize("impl", ["scan", "chunked"])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_extreme_gates(bound, impl):
    """A gate that is a step (exp(A_log) huge), decay at its bound throughout, and none: all finite, all as exact."""
    q, k, v, _, beta = (x.astype(jnp.float32) for x in draw(11, 1, 80, 2, 8, 8))
    z = jnp.asarray(np.random.default_rng(12).normal(size=(1, 80, 2, 8)), jnp.float32)

    def loss(x, A_log, dt_bias, impl):
        q, k, v, z, beta = x
        g = kda_gate(z, A_log, dt_bias, bound)
        o, state = kda(q, k, v, g, beta, jnp.ones((1, 2, 8, 8), v.dtype), gate_lower_bound=bound, impl=impl)
        return jnp.sum(o**2) + jnp.sum(state**2)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    for A_log, shift in ((10.0, 0.0), (0.0, 40.0), (0.0, -40.0), (4.0, 3.0)):
        args = ((q, k, v, z, beta), jnp.full(2, A_log, jnp.float32), jnp.full((2, 8), shift, jnp.float32))
        found, exact = run(*args, impl), run(*jax.tree.map(lambda x: x.astype(jnp.float64), args), "scan")
        chex.assert_tree_all_finite(found)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
            scale = max(float(jnp.max(jnp.abs(b))), 1e-6)
            assert float(jnp.max(jnp.abs(a - b.astype(a.dtype)))) <= 3e-5 * scale, (A_log, shift)


@pytest.mark.parametrize("impl", ["scan", "chunked"])
def test_a_state_continues_the_first_segment(impl):
    inputs = draw(13, 2, 45, 2, 4, 3)
    ids = jnp.asarray([[0, 0] + [3] * 20 + [5] * 20 + [0] * 3, [1] * 45])
    whole, _ = kda(*inputs, None, ids, gate_lower_bound=-5.0, impl="scan")
    last, _ = kda(*(x[:1, 22:42] for x in inputs), jnp.zeros((1, 2, 4, 3)), impl="scan")
    np.testing.assert_allclose(whole[:1, 22:42], last, rtol=1e-10, atol=1e-12)
    for cut in (22, 30):
        _, state = kda(*(x[:, :cut] for x in inputs), jnp.zeros((2, 2, 4, 3)), ids[:, :cut], impl="scan")
        state = jnp.where((ids[:, cut - 1] == ids[:, cut])[:, None, None, None], state, 0)
        o, end = kda(*(x[:, cut:] for x in inputs), state, ids[:, cut:], gate_lower_bound=-5.0, impl=impl)
        np.testing.assert_allclose(o, whole[:, cut:], rtol=1e-10, atol=1e-12)
        assert end.shape == (2, 2, 4, 3)


def test_one_token_runs_without_a_loop():
    inputs, state = draw(14, 3, 1, 2, 8, 4), jnp.asarray(np.random.default_rng(15).normal(size=(3, 2, 8, 4)))

    def run(impl):
        return lambda *x: kda(*x, gate_lower_bound=-5.0, impl=impl)

    assert "scan" in str(jax.make_jaxpr(run("scan"))(*inputs, state))
    assert not {"scan", "while"} & set(str(jax.make_jaxpr(run("auto"))(*inputs, state)).replace("[", " ").split())
    weights = jnp.asarray(np.random.default_rng(16).normal(size=(3, 1, 2, 4)))

    def loss(impl):
        def loss(x):
            o, final = run(impl)(*x)
            return jnp.sum(o * weights) + jnp.sum(final**2)

        return jax.value_and_grad(loss)((*inputs, state))

    chex.assert_trees_all_close(loss("auto"), loss("scan"), rtol=1e-12, atol=1e-13)
    donated = jax.jit(run("auto"), donate_argnums=5).lower(*inputs, state).compile()
    assert donated.memory_analysis().alias_size_in_bytes >= state.nbytes


def test_fastest_decides_by_backend_length_and_gradients():
    def choice(T, gradients, backend="cpu", K=128, tokamax=False):
        return kda_op.fastest(backend, T, K, K, gradients, tokamax)

    assert [choice(T, False) for T in (1, 2, 31, 32, 4096)] == ["step", "scan", "scan", "chunked", "chunked"]
    assert [choice(T, True) for T in (1, 2, 7, 8, 4096)] == ["step", "scan", "scan", "chunked", "chunked"]
    assert [choice(4096, gradients, K=16) for gradients in (False, True)] == ["scan", "chunked"]
    assert [choice(T, True, "tpu", tokamax=True) for T in (1, 64)] == ["step", "tokamax"]
    assert [choice(T, False, backend) for T in (2, 64) for backend in ("tpu", "gpu")] == ["chunked"] * 4


def test_auto_sees_whether_gradients_are_taken(monkeypatch):
    seen = []
    run = kda_op._run
    monkeypatch.setattr(kda_op, "_run", lambda impl, *x: (seen.append(impl), run(impl, *x))[1])
    inputs = draw(17, 1, 20, 2, 4, 4)
    kda(*inputs, gate_lower_bound=-5.0)
    assert seen == ["scan"]
    jax.grad(lambda x: jnp.sum(kda(*x, gate_lower_bound=-5.0)[0]))(inputs)
    assert seen[-1] == "chunked"


def test_what_is_kept_for_the_gradient_grows_with_k_plus_v():
    def kept(T, K, V):
        q, v = jax.ShapeDtypeStruct((1, T, 3, K), jnp.float32), jax.ShapeDtypeStruct((1, T, 3, V), jnp.float32)
        beta, state = jax.ShapeDtypeStruct((1, T, 3), jnp.float32), jax.ShapeDtypeStruct((1, 3, K, V), jnp.float32)
        _, saved = jax.eval_shape(lambda *x: kda_chunked._save(-5.0, *x, None, None), state, q, q, v, q, beta)
        return sum(x.size for x in jax.tree.leaves(saved)) / (T * 3)

    # q, k, g and y; N, A and P; a state a group.
    assert kept(1024, 64, 64) <= 4 * 64 + 3 * kda_chunked.CHUNK + 64 * 64 / (kda_chunked.CHUNK * kda_chunked.GROUP) + 1
    assert kept(8192, 64, 64) == kept(1024, 64, 64)
    assert kept(1024, 128, 128) <= 2.01 * kept(1024, 64, 64)


# Inside documents, at their ends, and one or two tokens apart: inside the convolution's window.
STRETCHES = {"scan": (0, 1, 7, 18, 20, 21, 33, 45), "chunked": (0, 20, 45)}


@pytest.mark.parametrize("packed", [False, True])
def test_stretches_compose_to_the_whole(packed):
    """Every stretch summarised alone, the states before them composed, then every stretch run from its state: outputs
    and gradients of the whole, wherever it is cut; the convolution takes the three inputs before a cut."""
    B, T, H, K = 2, 45, 2, 4
    q, k, v, g, beta = draw(18, B, T, H, K, K)
    taps = jnp.asarray(np.random.default_rng(19).normal(size=(H, K, 4)))
    ids = jnp.asarray([[1] * 18 + [2] * 4 + [3] * 23, [1] * 33 + [0] * 2 + [2] * 10]) if packed else None
    weights = jnp.asarray(np.random.default_rng(20).normal(size=(B, T, H, K)))

    def whole(x):
        q, k, v, g, beta = x
        k, _ = short_conv(k, taps, segment_ids=ids)
        return kda(q, l2norm(k), v, g, beta, None, ids, gate_lower_bound=-5.0, impl="scan")[0]

    def parts(x, cuts, impl):
        q, k, v, g, beta = x
        stretches = []
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
            halo = max(0, start - 3)
            near = None if ids is None else ids[:, halo:stop]
            y, _ = short_conv(k[:, halo:stop], taps, segment_ids=near)
            cut = lambda x: x[:, start:stop]  # noqa: B023, E731
            stretches.append((*map(cut, (q, v, g, beta)), l2norm(y[:, start - halo :]), ids if ids is None else cut(ids)))
        met, out = (jnp.zeros((B, H, K, K)), jnp.zeros((B, H, K, K))), []
        for n, (q, v, g, beta, k, here) in enumerate(stretches):
            state = met[1]
            if here is not None and n:
                continued = _last(stretches[n - 1][5]) == _first(here)
                state = jnp.where(continued[:, None, None, None], state, 0)
            out.append(kda(q, k, v, g, beta, state, here, gate_lower_bound=-5.0, impl=impl)[0])
            summary = segment_summary(k, v, g, beta, here, gate_lower_bound=-5.0, impl=impl)
            met = compose((met[0], state), summary)
        return jnp.concatenate(out, axis=1)

    inputs = (q, k, v, g, beta)

    def both(run):
        o, pull = jax.vjp(run, inputs)
        return o, pull(weights)

    expected = jax.jit(partial(both, whole))()
    for impl, cuts in STRETCHES.items():
        found = jax.jit(partial(both, lambda x, cuts=cuts, impl=impl: parts(x, cuts, impl)))()
        chex.assert_trees_all_close(found, expected, rtol=1e-8, atol=1e-10)


def _first(ids):
    return jnp.take_along_axis(ids, jnp.argmax(ids > 0, axis=1, keepdims=True), axis=1)[:, 0]


def _last(ids):
    return jnp.max(ids, axis=1)


def test_compose_is_associative_and_scans():
    rng = np.random.default_rng(21)
    m, s = jnp.asarray(rng.normal(size=(5, 1, 2, 4, 4))), jnp.asarray(rng.normal(size=(5, 1, 2, 4, 3)))
    each = [(m[n], s[n]) for n in range(5)]
    all_m, all_s = jax.lax.associative_scan(compose, (m, s))
    for n in range(1, 6):
        expected = reduce(compose, each[:n])
        np.testing.assert_allclose(all_m[n - 1], expected[0], rtol=1e-12)
        np.testing.assert_allclose(all_s[n - 1], expected[1], rtol=1e-12)


@pytest.mark.skipif(not kda_tokamax.installed(), reason="the tokamax library is not installed")
@pytest.mark.parametrize("packed", [False, True])
def test_tokamax_agrees(packed):
    inputs = tuple(x.astype(jnp.float32) for x in draw(22, 2, 50, 2, 8, 4))
    ids = jnp.asarray([[1] * 20 + [2] * 27 + [0] * 3, [1] * 50]) if packed else None
    shape = (2, 2, 2, 8, 4) if packed else (2, 2, 8, 4)
    state = jnp.asarray(np.random.default_rng(23).normal(size=shape), jnp.float32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = kda(*inputs, state, ids, impl="tokamax")
    chex.assert_trees_all_close(found, kda(*inputs, state, ids, impl="scan"), rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(kda_tokamax.installed(), reason="the tokamax library is installed")
def test_tokamax_missing_says_so():
    with pytest.raises(ValueError, match="impl: found 'tokamax', which is not installed"):
        kda(*draw(24, 1, 4, 1, 4, 4), impl="tokamax")


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


# Lengths and sizes at which the choice of "auto" changes, with gradients or without.
CHOICES = [(1, 4, 3), (7, 4, 3), (8, 4, 3), (31, 33, 32), (32, 32, 32), (32, 33, 32)]


def typed(dtype, T, K, V, ids=False, states=()):
    """Arguments of `kda` as shapes: q, k, v in `dtype`; ids; an initial state with the axes `states` between B and H."""
    wide = jnp.float32
    shape = lambda *x, dtype=dtype: jax.ShapeDtypeStruct((2, *x), dtype)  # noqa: E731
    state = None if states is None else shape(*states, 2, K, V, dtype=wide)
    tokens = shape(T, 2, K), shape(T, 2, K), shape(T, 2, V), shape(T, 2, K, dtype=wide), shape(T, 2, dtype=wide)
    return (*tokens, state), shape(T, dtype=jnp.int32) if ids else None


@pytest.mark.parametrize("ids, states", [(False, None), (False, ()), (True, None), (True, ()), (True, (3,))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_do_not_depend_on_the_form(dtype, ids, states):
    """With gradients, which may be taken of another form than what is not differentiated, and without."""
    forms = [("auto", *choice) for choice in CHOICES] + [(impl, 8, 4, 3) for impl in ("scan", "chunked")]
    forms += [("tokamax", 8, 4, 3)] * (kda_tokamax.installed() and (not ids or states == (3,)))
    for impl, T, K, V in forms:
        inputs, segments = typed(dtype, T, K, V, ids, states)

        def run(inputs, segments, impl=impl):
            return kda(*inputs, segments, gate_lower_bound=-5.0, impl=impl)

        def both(inputs, segments):
            # Within jit, as within a scan over layers, both forms are traced, and are compared.
            out, pull = jax.vjp(jax.jit(lambda x: run(x, segments)), inputs)  # noqa: B023
            return out, pull(out)[0]

        strict = "strict" if impl != "tokamax" else "standard"
        with jax.numpy_dtype_promotion(strict), jax.numpy_rank_promotion("allow"):
            alone, (out, gradients) = (jax.eval_shape(f, inputs, segments) for f in (run, both))
        state = inputs[5] if ids or states is not None else jax.ShapeDtypeStruct((2, 2, K, V), jnp.float32)
        for found in (alone, out):
            assert (found[0].shape, found[0].dtype) == ((2, T, 2, V), dtype), (impl, T, K)
            assert (found[1] is None) if state is None else (found[1].shape, found[1].dtype) == (state.shape, "float32")
        assert gradients == inputs, (impl, T, K)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_gradients_of_auto_in_narrow_types(dtype, tolerance):
    """Of 20 tokens: what is not differentiated is the scan, what is the chunked form."""
    wide, ids = draw(25, 2, 20, 2, 4, 3), jnp.asarray(np.repeat([[1, 2, 0]], [12, 5, 3], axis=1).repeat(2, axis=0))
    inputs = tuple(x.astype(dtype if i < 3 else jnp.float32) for i, x in enumerate(wide))
    weights = jnp.asarray(np.random.default_rng(26).normal(size=(2, 20, 2, 3)))

    @partial(jax.jit, static_argnums=1)
    def run(inputs, impl):
        out, pull = jax.vjp(jax.jit(lambda x: kda(*x, None, ids, gate_lower_bound=-5.0, impl=impl)[0]), inputs)
        return out, *pull(weights.astype(out.dtype))[0]

    alone = jax.jit(lambda x: kda(*x, None, ids, gate_lower_bound=-5.0)[0])(inputs)
    exact = run(tuple(x.astype(jnp.float64) for x in inputs), "scan")
    names = ("o", "q", "k", "v", "g", "beta", "o alone")
    errors = {n: relative(a, np.asarray(b)) for n, a, b in zip(names, (*run(inputs, "auto"), alone), (*exact, exact[0]), strict=True)}
    assert max(errors.values()) <= tolerance, errors


def test_errors_name_the_argument():
    q, k, v, g, beta = draw(9, 1, 4, 2, 4, 3)
    with pytest.raises(ValueError, match=r"beta: found shape \(1, 4, 2, 1\), must be \(1, 4, 2\)"):
        kda(q, k, v, g, beta[..., None])
    with pytest.raises(ValueError, match=r"initial_state: found shape \(1, 2, 4\), must be \(1, 2, 4, 3\)"):
        kda(q, k, v, g, beta, jnp.zeros((1, 2, 4)), jnp.ones((1, 4), jnp.int32))
    with pytest.raises(ValueError, match=r"q: found shape \(4, 2, 4\), must be \[B,T,H,K\]"):
        kda(q[0], k, v, g, beta)
    with pytest.raises(ValueError, match=r"q: found shape \(1, 0, 2, 4\), must hold at least one token"):
        kda(*(x[:, :0] for x in (q, k, v, g, beta)))
    with pytest.raises(ValueError, match="g: found dtype bfloat16, must be float32 or wider"):
        kda(q, k, v, g.astype(jnp.bfloat16), beta)
    with pytest.raises(ValueError, match="v: found dtype int32, must be floating"):
        kda(q, k, v.astype(jnp.int32), g, beta)
    with pytest.raises(ValueError, match="segment_ids: found dtype float64, must be integer"):
        kda(q, k, v, g, beta, None, jnp.ones((1, 4)))
    with pytest.raises(ValueError, match=r"segment_ids: found 1 after 2 \(row 0, token 3\), must not decrease"):
        kda(q, k, v, g, beta, None, jnp.asarray([[1, 2, 0, 1]]))
    with pytest.raises(ValueError, match="impl: found 'fast'"):
        kda(q, k, v, g, beta, impl="fast")
