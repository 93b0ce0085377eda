"""Gradient accumulation on a mesh: no row of the batch moves, and the sum over parts is that of the whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import k3jax
from k3jax.plan.hlo import collectives
from k3jax.config import VisionConfig
from k3jax.run_config import RunConfig, TrainConfig
from k3jax.train import step as training
from k3jax.vision import Patches, pack

VISION = VisionConfig(4, 6, 5, 4, 3, 1, 32, 64, 48, 32, 32, media_placeholder_token_id=255)
B, T, PARTS = 32, 8, 4


def batch():
    """Four rows a device, every other with an image; weights that differ from part to part."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(250, size=(B, T)).astype(np.int32)
    tokens[::2, 1:3] = VISION.media_placeholder_token_id
    rows = [[Patches(rng.normal(size=(8, 3, 4, 4)), (1, 2, 4))] if b % 2 == 0 else [] for b in range(B)]
    weights = rng.uniform(size=(B, T)) * (1 + np.arange(B)[:, None] % 5)
    ids = np.ones((B, T), np.int32)
    images = pack(VISION, rows, room=16)
    return {"tokens": tokens, "targets": tokens, "segment_ids": ids, "weights": weights, "images": images}


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 4, "tensor": 2}])
def test_rows_stay_where_they_are(sizes):
    mesh, whole = k3jax.make_mesh(**sizes), batch()
    with jax.set_mesh(mesh):
        part = training.shard_batch(whole, mesh)
        split = jax.jit(training.micro_batches, static_argnums=1)
        assert not collectives(split.lower(part, PARTS).compile().as_text())
        found = split(part, PARTS)
    for x, expected in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        axes = tuple(axis for axis in ("data", "fsdp", "expert") if sizes.get(axis, 1) > 1)
        assert x.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, axes)), x.ndim)
        for p in range(PARTS):
            np.testing.assert_array_equal(x[p], expected[p::PARTS])


def test_the_step_on_eight_devices(tiny, monkeypatch):
    """Data-parallel, only sums cross devices: of gradients, statistics and the loss. They are those of one part."""
    cfg = dataclasses.replace(tiny, kda_layers=(), full_attn_layers=(1, 2))  # KDA would take half of the compiling
    model = k3jax.K3(cfg, jnp.float64, jnp.float64)
    text = {name: x for name, x in batch().items() if name != "images"}
    monkeypatch.setattr(training, "make_model", lambda config: model)
    mesh, results = k3jax.make_mesh(data=8), []
    for parts in (1, PARTS):
        train = TrainConfig(steps=10, learning_rate=1e-4, warmup_fraction=0.0, clip_norm=1e9, grad_accum=parts)
        config = RunConfig(model.cfg, train=train)
        with jax.set_mesh(mesh):
            abstract, shardings = training.abstract_state(config, mesh)
            rng = np.random.default_rng(1)
            draw = lambda x: np.asarray(0.2 * rng.normal(size=x.shape), x.dtype)  # noqa: B023, E731
            state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
            state = state.replace(params=jax.tree.map(draw, abstract.params), router=jax.tree.map(draw, abstract.router))
            state, rows = jax.device_put(state, shardings), training.shard_batch(text, mesh)
            step = training.make_train_step(config, shardings).lower(state, rows).compile()
            assert {x.kind for x in collectives(step.as_text())} == {"all-reduce"}, parts
            new, metrics = step(state, rows)
            results.append(jax.device_get(({"mu": new.opt_state, "router": new.router}, metrics)))
    whole, summed = results
    for a, b in zip(jax.tree.leaves(summed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(np.abs(b).max(), 1e-3))
