"""The models of configs/ learn in bfloat16, on packed rows and, where they see, on images."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.settings import load_config
from k3jax.train import step as training
from k3jax.vision import Patches, pack

CONFIGS = Path(__file__).parents[2] / "configs"


def rows(config):
    """Two documents a row and padding at its end, every token learnt but a document's last; a picture in every other row."""
    rng, cfg = np.random.default_rng(0), config.model
    B, T = config.data.batch_size, config.data.seq_len
    tokens = rng.integers(min(cfg.vocab_size, 250), size=(B, T + 1)).astype(np.int32)
    ids = np.repeat([[1, 2, 0]], [T // 2, T + 1 - T // 2 - 2, 2], axis=1).repeat(B, axis=0).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids[:, :-1]}
    learnt = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    if cfg.vision:
        tokens[::2, 1:7] = cfg.vision.media_placeholder_token_id
        learnt &= batch["targets"] != cfg.vision.media_placeholder_token_id
        p = cfg.vision.patch_size
        picture = [Patches(rng.normal(size=(24, 3, p, p)).astype(np.float32), (1, 4, 6))]
        batch["images"] = pack(cfg.vision, [picture if b % 2 == 0 else [] for b in range(B)])
    return batch | {"weights": learnt.astype(np.float32)}


slow = pytest.mark.slow  # compiling takes them minutes


@pytest.mark.parametrize(
    "name, T", [("shapes", 24), pytest.param("quickstart", 64, marks=slow), pytest.param("midsize", 16, marks=slow)]
)
def test_it_trains(name, T):
    config = load_config(CONFIGS / f"{name}.py")
    train = dataclasses.replace(config.train, dtype="bfloat16", steps=4, learning_rate=3e-3, warmup_fraction=0.0)
    config = dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, seq_len=T))
    config.validate()
    mesh, losses = k3jax.make_mesh(**dataclasses.asdict(config.mesh)), []
    with jax.enable_x64(False), jax.set_mesh(mesh):
        state, shardings = training.init_state(config, mesh)
        batch = training.shard_batch(rows(config), mesh)
        step = training.make_train_step(config, shardings)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            assert np.isfinite(float(metrics["grad_norm"]))
    assert np.all(np.isfinite(losses)) and losses[2] < losses[1] < losses[0]
    for leaf in jax.tree.leaves((state.params, state.router)):
        assert leaf.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(leaf)))
