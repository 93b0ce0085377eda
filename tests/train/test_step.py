"""The training step: accumulation, weighting, balancing, donation, and the real model under it."""

import dataclasses
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import k3jax
from k3jax.nn.moe import RouterStats
from k3jax.ops.loss import token_losses
from k3jax.ops.router import expert_load, quantile_bias_from_histogram, quantile_histogram, route
from k3jax.run_config import RunConfig, TrainConfig
from k3jax.train import step as training
from k3jax.train.step import TrainState, balanced, make_train_step, worst_load

# One dense KDA and one MoE MLA layer.
MODEL = dataclasses.replace(
    k3jax.ModelConfig.from_hf(Path(__file__).parents[1] / "data" / "k3_tiny"),
    num_hidden_layers=2,
    kda_layers=(1,),
    full_attn_layers=(2,),
    vision=None,
)
E, K = MODEL.num_experts, MODEL.num_experts_per_token
TRAIN = TrainConfig(steps=10, learning_rate=0.25, warmup_fraction=0.0, final_learning_rate=1.0, qat=False)


# ---- the step alone, around a loss that can be done by hand ----------------------------------------


def linear_loss(model, params, router, batch, total):
    """sum weights * tokens * w / total, whose gradient is the weighted mean of the tokens."""
    loss = jnp.sum(batch["weights"] * batch["tokens"]) * params["w_proj"] / total
    scores = batch["scores"].reshape(-1, E)
    bias, valid = router["moe"]["e_score_correction_bias"][0], batch["weights"].reshape(-1) > 0
    routing = route(scores, bias, K)
    stats = RouterStats(
        expert_load(routing.indices, E, valid)[None],
        quantile_histogram(scores, routing.cutoff, bias, valid)[None],
        jnp.full(1, 7, jnp.int32),
    )
    return loss, {"moe": stats}


def hand_state(train):
    params = {"w_proj": jnp.asarray(4.0)}
    bias = jnp.asarray(np.random.default_rng(0).normal(size=(1, E)) / 10)
    router = {"moe": {"e_score_correction_bias": bias}}
    return TrainState(jnp.zeros((), jnp.int32), params, router, training.make_optimizer(train).init(params))


def hand_batch():
    rng = np.random.default_rng(1)
    return {
        "tokens": jnp.asarray(rng.normal(size=(6, 5))),
        "weights": jnp.asarray(rng.integers(3, size=(6, 5)), jnp.float64),
        "scores": jnp.asarray(rng.uniform(size=(6, 5, E))),
    }


@pytest.mark.parametrize("accum", [1, 2, 6])
@pytest.mark.parametrize("balancing", [True, False])
def test_by_hand(monkeypatch, accum, balancing):
    monkeypatch.setattr(training, "batch_loss", linear_loss)
    train = dataclasses.replace(
        TRAIN,
        grad_accum=accum,
        quantile_balancing=balancing,
        clip_norm=0.01,
        weight_decay=0.1,
        capacity_drop=balancing,
    )
    state, batch = hand_state(train), hand_batch()
    bias = np.asarray(state.router["moe"]["e_score_correction_bias"])
    new, metrics = make_train_step(RunConfig(MODEL, train=train), None)(state, batch)

    gradient = float(np.sum(batch["weights"] * batch["tokens"]) / np.sum(batch["weights"]))
    assert abs(gradient) > 0.01
    assert float(metrics["loss"]) == pytest.approx(4 * gradient, rel=1e-13)
    assert float(metrics["grad_norm"]) == pytest.approx(abs(gradient), rel=1e-13)  # before clipping
    assert int(metrics["tokens"]) == np.sum(np.asarray(batch["weights"]) > 0)
    assert metrics.get("dropped") == (7 * accum if balancing else None)
    assert int(new.step) == 1
    mu = optax.tree.get(new.opt_state, "mu")["w_proj"]
    assert float(mu) == pytest.approx(0.1 * 0.01 * np.sign(gradient), rel=1e-6)  # after clipping
    # Adam's first step has the size of the rate; then decay by rate * 0.1.
    assert float(new.params["w_proj"]) == pytest.approx(4 - 0.25 * (np.sign(gradient) + 0.1 * 4), rel=1e-4)

    # Balancing sees all tokens that count, at once.
    _, stats = linear_loss(None, {"w_proj": 0.0}, hand_state(train).router, batch, 1.0)
    load = np.asarray(stats["moe"].load)
    assert load.sum() == int(metrics["tokens"]) * K
    assert float(metrics["expert_load"]) == pytest.approx(load.max() / load.mean(), rel=1e-6)
    expected = bias
    if balancing:
        expected = quantile_bias_from_histogram(stats["moe"].histogram[0], jnp.asarray(bias[0]), K)[None]
        assert np.abs(expected - bias).max() > 0.01
    np.testing.assert_allclose(new.router["moe"]["e_score_correction_bias"], expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("accum", [1, 2])
def test_a_batch_without_a_learnt_token_changes_nothing(monkeypatch, accum):
    monkeypatch.setattr(training, "batch_loss", linear_loss)
    train = dataclasses.replace(TRAIN, grad_accum=accum, weight_decay=0.1)
    step, batch = make_train_step(RunConfig(MODEL, train=train), None), hand_batch()
    before, _ = step(hand_state(train), batch)
    kept = jax.device_get(before)
    after, metrics = step(before, batch | {"weights": jnp.zeros_like(batch["weights"])})
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0 and int(metrics["tokens"]) == 0
    assert int(after.step) == int(kept.step) + 1
    chex.assert_trees_all_equal(jax.device_get(after).replace(step=kept.step), kept)
    later, _ = step(after, batch)  # and the next batch teaches as it would have
    straight, _ = step(step(hand_state(train), batch)[0], batch)
    chex.assert_trees_all_equal(later.replace(step=straight.step), straight)


def test_the_state_is_donated(monkeypatch):
    monkeypatch.setattr(training, "batch_loss", linear_loss)
    state = hand_state(TRAIN)
    step = make_train_step(RunConfig(MODEL, train=TRAIN), None)
    new, _ = step(state, hand_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.router, state.opt_state)))
    newer, _ = step(new, hand_batch())
    assert int(newer.step) == 2


def test_balancing_of_every_repeat():
    rng = np.random.default_rng(2)
    bias = jnp.asarray(rng.normal(size=(3, E)) / 10)
    scores = jnp.asarray(rng.uniform(size=(3, 40, E)))
    valid = jnp.ones(40, bool)
    pairs = zip(scores, bias, strict=True)
    histograms = [quantile_histogram(s, route(s, b, K).cutoff, b, valid) for s, b in pairs]
    stats = {"a": {"b": RouterStats(jnp.ones((3, E), jnp.int32), jnp.stack(histograms), jnp.zeros(3, jnp.int32))}}
    found = balanced({"a": {"b": {"e_score_correction_bias": bias}}}, stats, K)
    for r in range(3):
        expected = quantile_bias_from_histogram(histograms[r], bias[r], K)
        np.testing.assert_allclose(found["a"]["b"]["e_score_correction_bias"][r], expected, rtol=1e-13)


def test_worst_load():
    histogram = jnp.zeros((2, 4, 1000), jnp.int32)
    loads = {"a": [[1, 1, 1, 1], [0, 0, 5, 3]], "b": [[9, 1, 1, 1], [0, 0, 0, 0]]}
    none = jnp.zeros(2, jnp.int32)
    stats = {name: RouterStats(jnp.asarray(load, jnp.int32), histogram, none) for name, load in loads.items()}
    assert float(worst_load(stats)) == 3.0  # 9 of a mean of 3; a layer without tokens has no worst


# ---- the real model under it -----------------------------------------------------------------------


def packed_batch():
    rng = np.random.default_rng(3)
    tokens = rng.integers(MODEL.vocab_size, size=(4, 9))
    ids = np.sort(rng.integers(1, 3, size=(4, 9)), axis=1)
    ids[1, 6:] = 0
    weights = (ids[:, :-1] == ids[:, 1:]) & (ids[:, 1:] > 0)
    return {
        "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
        "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
        "segment_ids": jnp.asarray(ids[:, :-1], jnp.int32),
        "weights": jnp.asarray(weights, jnp.float64),
    }


@pytest.fixture(scope="module")
def real():
    """In float64, so that only rounding to 1e-16 can differ."""
    model = k3jax.K3(MODEL, jnp.float64, jnp.float64)

    @cache
    def run(accum):
        config = RunConfig(MODEL, train=dataclasses.replace(TRAIN, grad_accum=accum, clip_norm=1e9))
        mesh = k3jax.make_mesh()
        with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
            patch.setattr(training, "make_model", lambda config: model)
            abstract, shardings = training.abstract_state(config, mesh)
            rng = np.random.default_rng(4)
            state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
            draw = lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
            params, router = jax.tree.map(draw, abstract.params), jax.tree.map(draw, abstract.router)
            state = jax.device_put(state.replace(params=params, router=router), shardings)
            variables = jax.device_get(state.variables)
            return variables, *jax.device_get(make_train_step(config, shardings)(state, packed_batch()))

    return model, run


def test_accumulation_changes_nothing_but_rounding(real):
    _, whole, metrics = real[1](1)
    _, parts, other = real[1](4)
    assert other["tokens"] == metrics["tokens"] and other["expert_load"] == metrics["expert_load"]
    assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-13)
    for name in ("mu", "nu"):  # of unclipped gradients
        found, expected = (optax.tree.get(state.opt_state, name) for state in (parts, whole))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
    for a, b in zip(jax.tree.leaves(parts.router), jax.tree.leaves(whole.router), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_the_model_under_the_step(real):
    model, run = real
    variables, new, metrics = run(1)
    batch = packed_batch()

    def loss(router):
        out = model.apply({**variables, "router": router}, batch["tokens"], segment_ids=batch["segment_ids"])
        losses = token_losses(out.logits, batch["targets"])
        return jnp.sum(batch["weights"] * losses) / jnp.sum(batch["weights"]), out.router

    (value, stats), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["router"])
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-12)
    assert not np.any(jax.tree.leaves(gradient)[0])  # the bias is not learnt
    (stats,) = jax.tree.leaves(stats, is_leaf=lambda x: isinstance(x, RouterStats))
    (old,), (bias,) = jax.tree.leaves(variables["router"]), jax.tree.leaves(new.router)
    expected = quantile_bias_from_histogram(stats.histogram[0], jnp.asarray(old[0]), K)
    np.testing.assert_allclose(bias[0], expected, rtol=0, atol=1e-13)
    assert np.abs(bias - old).max() > 0.01
    assert stats.load.sum() == K * np.sum(np.asarray(batch["segment_ids"]) > 0)


@pytest.mark.parametrize("images", [False, True])
def test_only_images_change_what_they_pass_through(monkeypatch, images):
    """Weight decay alone would wear down a tower that a run on text never uses."""
    monkeypatch.setattr(training, "batch_loss", linear_loss)
    train = dataclasses.replace(TRAIN, weight_decay=0.1)
    seeing = {"vision_tower": {"wo": jnp.asarray(3.0)}, "mm_projector": {"proj_0": jnp.asarray(2.0)}}
    params = {"w_proj": jnp.asarray(4.0)} | seeing
    state = hand_state(train)
    state = state.replace(params=params, opt_state=training.make_optimizer(train).init(params))
    batch = hand_batch() | ({"images": jnp.zeros((6, 1))} if images else {})
    new, _ = make_train_step(RunConfig(MODEL, train=train), None)(state, batch)
    assert float(new.params["w_proj"]) != 4
    kept = [float(new.params["vision_tower"]["wo"]) == 3, float(new.params["mm_projector"]["proj_0"]) == 2]
    assert kept == [not images] * 2


def test_a_model_of_dense_layers_with_one_embedding_trains():
    """No router, no experts and no head: as a prefix of a model has it, or a small one."""
    parts = {"num_hidden_layers": 1, "kda_layers": (), "full_attn_layers": (1,)}
    cfg = dataclasses.replace(MODEL, first_k_dense_replace=1, tie_word_embeddings=True, **parts)
    config = RunConfig(cfg, train=dataclasses.replace(TRAIN, qat=True, capacity_drop=True, weight_decay=0.1))
    config.validate()
    mesh = k3jax.make_mesh()
    with jax.set_mesh(mesh):
        state, shardings = training.init_state(config, mesh)
        assert state.router == {} and "lm_head" not in state.params
        before = jax.device_get(state.params["embed_tokens"])
        new, metrics = make_train_step(config, shardings)(state, packed_batch())
    assert float(metrics["expert_load"]) == 1 and int(metrics["dropped"]) == 0 and new.router == {}
    changed = np.any(np.asarray(new.params["embed_tokens"]) != before, axis=1)
    assert changed.all()  # as the head's rows are, with tokens that are not in the batch
