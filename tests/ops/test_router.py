"""Routing and Quantile Balancing: by hand, against a plain restatement, and against exact values."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.router import (
    BINS,
    _balanced_load,
    expert_load,
    quantile_bias,
    quantile_bias_from_histogram,
    quantile_histogram,
    route,
    router_scores,
)

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "ops" / "quantile_balancing.npz")
CASES = sorted({name.split(".")[0] for name in GOLDEN.files})


def golden(case):
    mine = (name for name in GOLDEN.files if name.startswith(case + "."))
    return {name.split(".")[1]: jnp.asarray(GOLDEN[name]) for name in mine}


def draw(seed, n, E):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(size=(n, E))), jnp.asarray(rng.normal(size=E) / 5)


# ---- routing ---------------------------------------------------------------------------------------


def test_the_bias_selects_and_the_scores_weigh():
    scores = jnp.asarray([[0.5, 0.25, 0.75, 0.125]])
    routing = route(scores, jnp.asarray([0.0, 0.625, 0.0, 0.0]), 2)
    np.testing.assert_array_equal(routing.indices, [[1, 2]])  # biased 0.875 and 0.75
    np.testing.assert_allclose(routing.weights, [[0.25, 0.75]], rtol=1e-15)  # already sum to one
    np.testing.assert_array_equal(routing.cutoff, [0.5])


@pytest.mark.parametrize(
    "settings, weights",
    [
        ({}, [0.75 / 1.25, 0.5 / 1.25]),
        ({"scaling": 2.5}, [1.5, 1.0]),
        ({"renormalize": False}, [0.75, 0.5]),
        ({"renormalize": False, "scaling": 4.0}, [3.0, 2.0]),
    ],
)
def test_weights(settings, weights):
    routing = route(jnp.asarray([[0.5, 0.25, 0.75, 0.125]]), jnp.zeros(4), 2, **settings)
    np.testing.assert_allclose(routing.weights, [weights], rtol=1e-15)


def test_a_single_expert_keeps_its_score():
    routing = route(jnp.asarray([[0.5, 0.25]]), jnp.zeros(2), 1, scaling=3.0)
    np.testing.assert_array_equal(routing.weights, [[1.5]])


def test_groups_by_hand():
    # Groups (0,1), (2,3), (4,5): merits 1.0, 0.875 and 1.25; the best single score is in the group left out.
    scores = jnp.asarray([[0.5, 0.5, 0.875, 0.0, 0.75, 0.5]])
    routing = route(scores, jnp.zeros(6), 3, num_groups=3, topk_group=2, renormalize=False)
    assert sorted(routing.indices[0].tolist()) == [0, 1, 4]
    np.testing.assert_array_equal(routing.cutoff, [0.5])


SCORES = {"sigmoid": lambda z: 1 / (1 + np.exp(-z)), "softmax": lambda z: np.exp(z) / np.exp(z).sum()}


@pytest.mark.parametrize("function", SCORES)
@pytest.mark.parametrize(
    "groups, kept, k",
    [(1, 1, 3), (4, 2, 3), (3, 1, 3), (6, 6, 3), (4, 1, 3), (6, 2, 4), (12, 12, 3), (3, 3, 12), (1, 1, 12), (6, 1, 1)],
)
def test_against_a_restatement(function, groups, kept, k):
    """Of as many experts as are considered (4 groups of 3, one kept, k = 3) and of one a group, too."""
    E = 12
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(40, E)), rng.normal(size=E) / 5
    scores = router_scores(jnp.asarray(logits), function)
    routing = route(scores, jnp.asarray(bias), k, num_groups=groups, topk_group=kept, scaling=1.5)
    for row in range(40):
        s = SCORES[function](logits[row])
        np.testing.assert_allclose(scores[row], s, rtol=1e-14)
        biased = s + bias
        if kept < groups:
            parts = biased.reshape(groups, -1)
            merit = np.sort(parts, axis=1)[:, -2:].sum(axis=1)
            biased = np.where((np.argsort(-merit).argsort() < kept)[:, None], parts, -np.inf).reshape(-1)
        order = np.argsort(-biased)
        np.testing.assert_array_equal(routing.indices[row], order[:k])
        divisor = s[order[:k]].sum() if k > 1 else 1
        np.testing.assert_allclose(routing.weights[row], 1.5 * s[order[:k]] / divisor, rtol=1e-14)
        np.testing.assert_allclose(routing.cutoff[row], [*biased[order], -np.inf][k], rtol=1e-13)


@pytest.mark.parametrize("groups, kept, k", [(1, 1, 12), (4, 1, 3)])
def test_a_histogram_without_a_cutoff_is_still_counts(groups, kept, k):
    """Inference may compute one and read none: what no expert was compared with lies in the first bin."""
    scores, bias = draw(8, 10, 12)
    cutoff = route(scores, bias, k, num_groups=groups, topk_group=kept).cutoff
    histogram = quantile_histogram(scores, cutoff, bias, jnp.ones(10, bool))
    np.testing.assert_array_equal(histogram, np.where(np.arange(BINS) == 0, 10, 0) * np.ones((12, 1)))


def test_gradients_flow_through_the_weights_alone():
    scores, bias = draw(1, 5, 6)
    probe = jnp.asarray(np.random.default_rng(2).normal(size=(5, 2)))
    loss = lambda s, b: jnp.sum(probe * route(s, b, 2).weights) + jnp.sum(route(s, b, 2).cutoff)  # noqa: E731
    to_scores, to_bias = jax.grad(loss, argnums=(0, 1))(scores, bias)
    assert np.all(to_bias == 0)
    indices = route(scores, bias, 2).indices
    chosen = np.any(np.asarray(indices)[:, :, None] == np.arange(6), axis=1)
    assert np.all((np.asarray(to_scores) != 0) == chosen)
    # d(s0/(s0+s1)) = (s1, -s0) / (s0+s1)^2
    s0, s1 = np.take_along_axis(np.asarray(scores), np.asarray(indices), axis=1).T
    expected = (probe[:, 0] - probe[:, 1]) * s1 / (s0 + s1) ** 2
    found = np.take_along_axis(np.asarray(to_scores), np.asarray(indices), axis=1)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def test_load():
    indices = jnp.asarray([[0, 2], [2, 3], [2, 0]], jnp.int32)
    load = expert_load(indices, 5, jnp.asarray([True, True, False]))
    np.testing.assert_array_equal(load, [1, 0, 2, 1, 0])


# ---- Quantile Balancing ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_golden(case):
    x = golden(case)
    k, E = int(x["k"]), x["bias"].size
    valid = jnp.ones(len(x["scores"]), bool)
    step = jax.jit(partial(route, k=k))
    routing = step(x["scores"], x["bias"])
    np.testing.assert_allclose(routing.cutoff, x["cutoff"], rtol=1e-15)
    np.testing.assert_array_equal(np.sort(routing.indices), np.sort(x["topk"]))
    np.testing.assert_array_equal(expert_load(routing.indices, E, valid), x["load_before"])

    exact = quantile_bias(x["scores"], routing.cutoff, k)
    np.testing.assert_allclose(exact, x["exact"], rtol=0, atol=1e-12)
    histogram = quantile_histogram(x["scores"], routing.cutoff, x["bias"], valid)
    bias = quantile_bias_from_histogram(histogram, x["bias"], k)
    np.testing.assert_allclose(bias, x["histogram_1000"], rtol=0, atol=1e-12)

    np.testing.assert_array_equal(expert_load(step(x["scores"], exact).indices, E, valid), x["load_after"])
    bias = x["bias"]
    for load in x["iterated_load"]:
        routing = step(x["scores"], bias)
        np.testing.assert_array_equal(expert_load(routing.indices, E, valid), load)
        bias = quantile_bias(x["scores"], routing.cutoff, k)


def test_exact_by_hand():
    # q = 4 * 1 / 2 = 2: minus the third largest margin of each expert, then centred.
    scores = jnp.asarray([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2], [0.4, 0.6]])
    cutoff = jnp.asarray([0.1, 0.3, 0.2, 0.4])
    # Margins 0.8, 0.5, 0.5, 0.0 and 0, 0, 0, 0.2: third largest 0.5 and 0.
    np.testing.assert_allclose(quantile_bias(scores, cutoff, 1), [-0.25, 0.25], rtol=1e-14)


def test_histogram_by_hand():
    # Bins of [-1, 1], 0.002 wide. q = ceil(3 * 1 / 2) = 2.
    scores = jnp.asarray([[0.9, 0.1], [0.8, 0.3], [0.7, 0.2]])
    bias, cutoff = jnp.zeros(2), jnp.asarray([0.1001, 0.3001, 0.2001])
    histogram = quantile_histogram(scores, cutoff, bias, jnp.ones(3, bool))
    assert histogram.shape == (2, BINS) and histogram.dtype == jnp.int32
    # cutoff - scores: -0.7999, -0.4999, -0.4999 -> bins 100, 250, 250; 0.0001 three times -> bin 500.
    assert {(int(e), int(b)): int(histogram[e, b]) for e, b in np.argwhere(histogram)} == {
        (0, 100): 1,
        (0, 250): 2,
        (1, 500): 3,
    }
    # Two are reached half way into bin 250, and two thirds into bin 500.
    expected = np.asarray([-1 + 0.002 * 250.5, -1 + 0.002 * (500 + 2 / 3)])
    found = quantile_bias_from_histogram(histogram, bias, 1)
    np.testing.assert_allclose(found, expected - expected.mean(), rtol=1e-12)


def test_histograms_add_over_micro_batches():
    scores, bias = draw(3, 48, 8)
    cutoff, valid = route(scores, bias, 2).cutoff, jnp.asarray(np.arange(48) % 5 > 0)
    whole = quantile_histogram(scores, cutoff, bias, valid)
    parts = [slice(i, i + 16) for i in (0, 16, 32)]
    parts = [quantile_histogram(scores[part], cutoff[part], bias, valid[part]) for part in parts]
    np.testing.assert_array_equal(sum(parts), whole)
    assert np.all(np.sum(whole, axis=1) == int(valid.sum()))


@pytest.mark.parametrize("tokens", [1, 2, 5, 20])
def test_padding_is_as_if_not_there(tokens):
    scores, bias = draw(4, 24, 6)
    cutoff = route(scores, bias, 4).cutoff
    valid = jnp.asarray(np.random.default_rng(5).permutation(24) < tokens)
    kept = np.flatnonzero(valid)
    expected = quantile_bias(scores[kept], cutoff[kept], 4)
    assert np.all(np.isfinite(expected))
    np.testing.assert_array_equal(quantile_bias(scores, cutoff, 4, valid), expected)
    histogram = quantile_histogram(scores, cutoff, bias, valid)
    rest = quantile_histogram(scores[kept], cutoff[kept], bias, jnp.ones(tokens, bool))
    np.testing.assert_array_equal(histogram, rest)


def test_without_tokens_the_bias_stays():
    scores, bias = draw(6, 4, 6)
    bias = bias.astype(jnp.float32)
    histogram = quantile_histogram(scores, scores[:, 0], bias, jnp.zeros(4, bool))
    assert not histogram.any()
    found = quantile_bias_from_histogram(histogram, bias, 2)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, bias)


def test_balancing_balances():
    scores, _ = draw(7, 600, 8)
    scores, bias = scores * jnp.linspace(0.2, 1, 8)[None], jnp.zeros(8)
    loads = []
    for _ in range(8):
        routing = route(scores, bias, 2)
        loads.append(int(expert_load(routing.indices, 8, jnp.ones(600, bool)).max()))
        histogram = quantile_histogram(scores, routing.cutoff, bias, jnp.ones(600, bool))
        bias = quantile_bias_from_histogram(histogram, bias, 2)
    assert loads[0] > 280 and loads[-1] < 1.05 * 150


# ---- at scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, E", [(16, 896), (1, 2), (4, 16), (895, 896), (8, 8)])
def test_the_balanced_load_is_exact(k, E):
    """Against Python's integers, without any of 64 bits."""
    near = [2**31 // k, 2**27, 2**31 - 1, 2**31 - E, 10**9 + 7]
    tokens = sorted({n + d for n in (1, E, *near) for d in (-1, 0, 1, 1024) if 0 <= n + d < 2**31})
    with jax.enable_x64(False):
        found = jax.jit(jax.vmap(lambda n: _balanced_load(n, k, E)))(jnp.asarray(tokens, jnp.int32))
        assert found.dtype == jnp.int32
    assert found.tolist() == [-(-n * k // E) for n in tokens]


@pytest.mark.parametrize("tokens", [2**20, 2**27, 2**27 + 1024, 2**31 - 2])
def test_a_step_of_very_many_tokens(tokens):
    """Half of the experts have all of theirs in bin 400 and half in bin 600: their biases are 0.4 apart."""
    E, k = 896, 16
    histogram = np.zeros((E, BINS), np.int32)
    histogram[: E // 2, 400] = histogram[E // 2 :, 600] = tokens
    with jax.enable_x64(False):
        bias = jax.jit(partial(quantile_bias_from_histogram, k=k))(jnp.asarray(histogram), jnp.zeros(E, jnp.float32))
    np.testing.assert_allclose(bias, np.repeat([-0.2, 0.2], E // 2), rtol=0, atol=1e-6)


def test_histograms_of_devices_and_micro_batches_add_up_to_very_many_tokens():
    parts = np.random.default_rng(8).multinomial(2**27 - 1, np.ones(50) / 50, size=(16, 6)).astype(np.int32)
    histograms = np.zeros((16, 6, BINS), np.int32)
    histograms[..., 300:350] = parts  # 16 parts of 6 experts
    with jax.enable_x64(False):
        total = jax.jit(lambda x: jax.lax.scan(lambda total, part: (total + part, None), x[0], x[1:])[0])(histograms)
        bias = quantile_bias_from_histogram(total, jnp.zeros(6, jnp.float32), 4)
    whole = histograms.astype(object).sum(axis=0)
    assert np.array_equal(total, whole) and whole.sum(axis=1).tolist() == [16 * (2**27 - 1)] * 6
    q, expected = -(-16 * (2**27 - 1) * 4 // 6), []
    for counts in whole:
        reached = np.cumsum(counts)
        place = int(np.argmax(reached >= q))
        expected.append(-1 + 0.002 * (place + (q - (reached[place] - counts[place])) / counts[place]))
    np.testing.assert_allclose(bias, np.asarray(expected) - np.mean(expected), rtol=0, atol=1e-6)
