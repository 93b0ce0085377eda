"""Routed experts: dispatch against every expert on every token, whatever the routing, and the gated units."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import grouped, mx
from k3jax.ops.experts import Activation, Unit, apply_experts, experts_reference, fastest

n, k, E, L, F = 40, 3, 16, 32, 64
SITU, SILU = Activation("situ"), Activation("silu")
RNG = np.random.default_rng(0)
W1, W3, W2 = (jnp.asarray(RNG.normal(size=shape)) for shape in ((E, F, L), (E, F, L), (E, L, F)))


def choices(experts, count):
    return np.stack([RNG.permutation(experts)[:count] for _ in range(n)])


ROUTINGS = {
    "random": choices(E, k),
    "all to the same": np.broadcast_to([5, 0, 15], (n, k)),
    "one for all": np.concatenate([np.full((n, 1), 7), choices(7, k - 1)], axis=1),
    "most idle": choices([1, 2, 8, 9], k),
    "one idle": choices(np.delete(np.arange(E), 6), k),
}


@cache
def both(mxfp8, impl):
    """Jitted (output, gradients) of the dispatch and of the reference."""

    def dispatch(x, weights, experts, indices, valid):
        return apply_experts(x, weights, indices, valid, experts, Unit(SITU, mxfp8), impl=impl)[0]

    def reference(x, weights, experts, indices, valid):
        return jnp.where(valid[:, None], experts_reference(x, weights, indices, experts, Unit(SITU, mxfp8)), 0)

    def with_gradients(form, cotangent, indices, valid, *arrays):
        y, vjp = jax.vjp(lambda *a: form(*a, indices, valid), *arrays)
        return y, *vjp(cotangent)

    return tuple(jax.jit(partial(with_gradients, form)) for form in (dispatch, reference))


def compare(indices, valid, mxfp8=False, impl="fixed"):
    rng = np.random.default_rng(1)
    rows = len(indices)
    x, cotangent = (jnp.asarray(rng.normal(size=(rows, L))) for _ in range(2))
    weights = jnp.asarray(rng.uniform(size=(rows, k)))
    dispatch, reference = both(mxfp8, impl)
    inputs = (cotangent, jnp.asarray(indices, jnp.int32), jnp.asarray(valid), x, weights, (W1, W3, W2))
    found, expected = dispatch(*inputs), reference(*inputs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * np.abs(b).max())  # float64, another order
    return found


FORMS = ("fixed", "ragged")


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("mxfp8", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_meets_its_experts(routing, mxfp8, impl):
    indices = ROUTINGS[routing]
    assert all(len(set(row)) == k for row in indices.tolist())
    y, *_, (*_, to_w2) = compare(indices, np.ones(n, bool), mxfp8, impl)
    assert np.all(np.any(y != 0, axis=1))
    used = np.isin(np.arange(E), indices)
    assert np.all(np.any(to_w2 != 0, axis=(1, 2)) == used)  # idle experts get no gradient


@pytest.mark.parametrize("impl", FORMS)
def test_tokens_that_are_not_there(impl):
    valid = np.arange(n) % 3 > 0
    y, to_x, to_weights, _ = compare(ROUTINGS["all to the same"], valid, impl=impl)
    for array in (y, to_x, to_weights):
        assert np.all(array[~valid] == 0) and np.all(np.any(array[valid] != 0, axis=1))


@pytest.mark.parametrize("impl", FORMS)
def test_tokens_that_are_not_there_take_no_room(impl):
    # What they hold does not matter, not even to the rounding of the others.
    rng = np.random.default_rng(2)
    valid, indices = jnp.arange(n) < 20, jnp.asarray(ROUTINGS["all to the same"], jnp.int32)
    x, weights = jnp.asarray(rng.normal(size=(n, L))), jnp.asarray(rng.uniform(size=(n, k)))
    run = jax.jit(lambda x: apply_experts(x, weights, indices, valid, (W1, W3, W2), Unit(SITU), impl=impl)[0])
    y = run(x)
    np.testing.assert_array_equal(run(x.at[20:].set(jnp.nan)), y)
    assert np.all(y[20:] == 0)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("rows", [1, 5, 9])
def test_fewer_tokens_than_room(rows, impl):
    compare(ROUTINGS["all to the same"][:rows], np.ones(rows, bool), impl=impl)


@pytest.mark.parametrize("impl", FORMS)
def test_bfloat16(impl):
    rng = np.random.default_rng(4)
    x, weights, *experts = (
        jnp.asarray(a, jnp.bfloat16) for a in (rng.normal(size=(n, L)), rng.uniform(size=(n, k)), W1, W3, W2)
    )
    indices = jnp.asarray(ROUTINGS["random"], jnp.int32)
    wide = [a.astype(jnp.float64) for a in (x, weights, *experts)]
    y, _ = apply_experts(x, weights, indices, jnp.ones(n, bool), tuple(experts), Unit(SITU), impl=impl)
    expected = experts_reference(*wide[:2], indices, tuple(wide[2:]), Unit(SITU))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float64), expected, atol=2e-2 * float(jnp.max(jnp.abs(expected))))


def test_an_unknown_impl():
    arrays = jnp.ones((n, L)), jnp.ones((n, k)), jnp.zeros((n, k), jnp.int32), jnp.ones(n, bool)
    with pytest.raises(ValueError, match="impl: found 'dense', must be one of auto, fixed, ragged"):
        apply_experts(*arrays, (W1, W3, W2), Unit(SITU), impl="dense")


def test_what_auto_takes():
    assert fastest("cpu") == fastest("tpu", (0, 10, 2)) == "fixed"  # there the gradient of ragged_dot is slow
    assert fastest("gpu", (0, 10, 2)) == fastest("tpu", (0, 12, 0)) == "ragged"


# ---- units -----------------------------------------------------------------------------------------


def test_situ_by_hand():
    gate, up = jnp.asarray([0.0, 2.0, -4.0]), jnp.asarray([7.0, 5.0, 25.0])
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    expected = [
        0.0,
        4 * np.tanh(0.5) * sigmoid(2) * 25 * np.tanh(0.2),
        4 * np.tanh(-1) * sigmoid(-4) * 25 * np.tanh(1),
    ]
    np.testing.assert_allclose(SITU(gate, up), expected, rtol=1e-14)


def test_situ_is_bounded_by_the_product_of_its_bounds():
    grid = jnp.asarray([-1e30, -1e3, -5.0, 0.0, 5.0, 1e3, 1e30], jnp.float32)
    values = SITU(*jnp.meshgrid(grid, grid))
    assert float(jnp.max(jnp.abs(values))) == 100.0
    assert float(SITU(grid[-1:], grid[:1])[0]) == -100.0
    assert float(Activation("situ", 2.0, 3.0)(grid[-1:], grid[-1:])[0]) == 6.0


def test_silu_by_hand():
    found = SILU(jnp.asarray([1.0, -2.0, 0.0]), jnp.asarray([3.0, 0.5, 9.0]))
    np.testing.assert_allclose(found, [3 / (1 + np.exp(-1)), -1 / (1 + np.exp(2)), 0], rtol=1e-14)


def test_units_work_in_float32():
    gate, up = (jnp.asarray(np.random.default_rng(3 + i).normal(size=64) * 9, jnp.bfloat16) for i in range(2))
    for act in (SITU, SILU):
        found = act(gate, up)
        assert found.dtype == jnp.bfloat16
        exact = act(gate.astype(jnp.float64), up.astype(jnp.float64))
        np.testing.assert_allclose(found.astype(jnp.float64), exact, rtol=2**-8)  # one rounding, at the end


@pytest.mark.parametrize("impl", FORMS)
def test_experts_by_hand(impl):
    # One token, L = F = 2, two experts; SiLU(0) = 0 leaves one hidden unit.
    x = jnp.asarray([[1.0, 2.0]])
    w1 = jnp.asarray([[[2.0, -1.0], [0.0, 1.0]], [[1.0, 0.0], [2.0, -1.0]]])  # gates (0, 2), (1, 0)
    w3 = jnp.asarray([[[9.0, 9.0], [1.0, 1.0]], [[-1.0, 0.0], [9.0, 9.0]]])  # ups (27, 3), (-1, 27)
    w2 = jnp.asarray([[[5.0, 1.0], [7.0, -1.0]], [[2.0, 5.0], [3.0, 7.0]]])
    silu = lambda g: g / (1 + np.exp(-g))  # noqa: E731
    first, second = silu(2) * 3, -silu(1)
    weights, indices = jnp.asarray([[0.25, 4.0]]), jnp.asarray([[1, 0]], jnp.int32)
    y, _ = apply_experts(x, weights, indices, jnp.ones(1, bool), (w1, w3, w2), Unit(SILU), impl=impl)
    expected = [[4 * first + 0.25 * 2 * second, -4 * first + 0.25 * 3 * second]]
    np.testing.assert_allclose(y, expected, rtol=1e-14)


@pytest.mark.parametrize("impl", FORMS)
def test_what_meets_w2_is_quantised(impl):
    x = jnp.asarray(np.random.default_rng(5).normal(size=(4, L)))
    identity = jnp.broadcast_to(jnp.eye(L, F)[None], (E, L, F))  # the first L hidden units come out
    hidden = SITU(jnp.einsum("nl,fl->nf", x, W1[3]), jnp.einsum("nl,fl->nf", x, W3[3]))
    once = jnp.ones((4, 1)), jnp.full((4, 1), 3, jnp.int32), jnp.ones(4, bool)
    y, _ = apply_experts(x, *once, (W1, W3, identity), Unit(SITU, mxfp8=True), impl=impl)
    np.testing.assert_array_equal(y, mx.fake_quant(hidden, "mxfp8")[:, :L])


def test_blocks_of_any_size(monkeypatch):
    """Experts with less than a block, exactly one, and several; the last block of one reaches into the next one's rows."""
    valid = np.arange(n) > 2
    both.cache_clear()
    for size in (8, 16, 24):
        monkeypatch.setattr(grouped, "BLOCKS", (size, size))
        compare(ROUTINGS["one for all"], valid, impl="fixed")
        both.cache_clear()
