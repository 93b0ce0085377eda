"""Routed experts: dispatch against every expert on every token, whatever the routing, and the gated units."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mx
from k3jax.ops.experts import Activation, apply_experts, expert_ffn, experts_reference

n, k, E, L, F = 40, 3, 16, 32, 64  # 16 rows an expert in one round, so up to three rounds
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
def both(mxfp8_inputs):
    """Jitted (output, gradients) of the dispatch and of the reference."""

    def dispatch(x, weights, w1, w3, w2, indices, valid):
        ffn = partial(expert_ffn, w1=w1, w3=w3, w2=w2, act=SITU, mxfp8_inputs=mxfp8_inputs)
        return apply_experts(x, weights, indices, valid, ffn, E)

    def reference(x, weights, w1, w3, w2, indices, valid):
        y = experts_reference(x, weights, indices, w1, w3, w2, SITU, mxfp8_inputs)
        return jnp.where(valid[:, None], y, 0)

    def with_gradients(form, cotangent, indices, valid, *arrays):
        y, vjp = jax.vjp(lambda *a: form(*a, indices, valid), *arrays)
        return y, *vjp(cotangent)

    return tuple(jax.jit(partial(with_gradients, form)) for form in (dispatch, reference))


def compare(indices, valid, mxfp8_inputs):
    rng = np.random.default_rng(1)
    rows = len(indices)
    x, cotangent = (jnp.asarray(rng.normal(size=(rows, L))) for _ in range(2))
    weights = jnp.asarray(rng.uniform(size=(rows, k)))
    dispatch, reference = both(mxfp8_inputs)
    inputs = (cotangent, jnp.asarray(indices, jnp.int32), jnp.asarray(valid), x, weights, W1, W3, W2)
    found, expected = dispatch(*inputs), reference(*inputs)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * np.abs(b).max())  # float64, another order
    return found


@pytest.mark.parametrize("mxfp8_inputs", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_token_meets_its_experts(routing, mxfp8_inputs):
    indices = ROUTINGS[routing]
    assert all(len(set(row)) == k for row in indices.tolist())
    y, *_, to_w2 = compare(indices, np.ones(n, bool), mxfp8_inputs)
    assert np.all(np.any(y != 0, axis=1))
    used = np.isin(np.arange(E), indices)
    assert np.all(np.any(to_w2 != 0, axis=(1, 2)) == used)  # idle experts get no gradient


def test_tokens_that_are_not_there():
    valid = np.arange(n) % 3 > 0
    y, to_x, to_weights, *_ = compare(ROUTINGS["all to the same"], valid, False)
    for array in (y, to_x, to_weights):
        assert np.all(array[~valid] == 0) and np.all(np.any(array[valid] != 0, axis=1))


def test_tokens_that_are_not_there_take_no_room():
    # What they hold does not matter, not even to the rounding of the others.
    rng = np.random.default_rng(2)
    valid, indices = np.arange(n) < 20, jnp.asarray(ROUTINGS["all to the same"], jnp.int32)
    x, weights = jnp.asarray(rng.normal(size=(n, L))), jnp.asarray(rng.uniform(size=(n, k)))
    ffn = partial(expert_ffn, w1=W1, w3=W3, w2=W2, act=SITU)
    run = jax.jit(lambda x: apply_experts(x, weights, indices, jnp.asarray(valid), ffn, E))
    y = run(x)
    np.testing.assert_array_equal(run(x.at[20:].set(jnp.nan)), y)
    assert np.all(y[20:] == 0)


@pytest.mark.parametrize("rows", [1, 5, 9])
def test_fewer_tokens_than_room(rows):
    compare(ROUTINGS["all to the same"][:rows], np.ones(rows, bool), False)


def test_rounds_cost_nothing_when_nobody_needs_them():
    # A host callback counts the rounds that run.
    calls = []

    def ffn(rows):
        jax.debug.callback(lambda: calls.append(1))
        return rows

    x, weights, valid = jnp.ones((n, L)), jnp.ones((n, k)), jnp.ones(n, bool)
    run = jax.jit(lambda indices: apply_experts(x, weights, indices, valid, ffn, E))
    spread = (np.arange(n)[:, None] + 5 * np.arange(k)) % E
    some = np.where(np.arange(n)[:, None] < 18, ROUTINGS["all to the same"], spread)
    for routing, rounds in ((ROUTINGS["all to the same"], 3), (some, 2), (spread, 1)):
        calls.clear()
        y = run(jnp.asarray(routing, jnp.int32))
        jax.effects_barrier()
        assert len(calls) == rounds
        np.testing.assert_array_equal(y, np.full((n, L), k))  # identity experts, weights one


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


def test_expert_ffn_by_hand():
    # One row, L = F = 2, two experts; SiLU(0) = 0 leaves one hidden unit.
    x = jnp.asarray([[[1.0, 2.0]], [[1.0, 2.0]]])
    w1 = jnp.asarray([[[2.0, -1.0], [0.0, 1.0]], [[1.0, 0.0], [2.0, -1.0]]])  # gates (0, 2), (1, 0)
    w3 = jnp.asarray([[[9.0, 9.0], [1.0, 1.0]], [[-1.0, 0.0], [9.0, 9.0]]])  # ups (27, 3), (-1, 27)
    w2 = jnp.asarray([[[5.0, 1.0], [7.0, -1.0]], [[2.0, 5.0], [3.0, 7.0]]])
    silu = lambda g: g / (1 + np.exp(-g))  # noqa: E731
    first, second = silu(2) * 3, -silu(1)
    expected = [[[first, -first]], [[2 * second, 3 * second]]]
    np.testing.assert_allclose(expert_ffn(x, w1, w3, w2, SILU), expected, rtol=1e-14)


def test_what_meets_w2_is_quantised():
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(E, 4, L)))
    identity = jnp.broadcast_to(jnp.eye(L, F)[None], (E, L, F))  # the first L hidden units come out
    hidden = SITU(jnp.einsum("ecl,efl->ecf", x, W1), jnp.einsum("ecl,efl->ecf", x, W3))
    found = expert_ffn(x, W1, W3, identity, SITU, mxfp8_inputs=True)
    np.testing.assert_array_equal(found, mx.fake_quant(hidden, "mxfp8")[..., :L])
