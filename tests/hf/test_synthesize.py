"""Checkpoints made up at random."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.hf import load_hf, pieces, report
from k3jax.hf.files import INDEX, open_checkpoint
from k3jax.hf.synthesize import synthesize


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
def test_it_reads_like_a_released_one(copy_golden, tmp_path, model):
    cfg = ModelConfig.from_hf(copy_golden(model).folder)
    synthesize(cfg, tmp_path / "random", max_shard_size=400_000)
    assert report(tmp_path / "random").problems == {}
    assert ModelConfig.from_hf(tmp_path / "random") == cfg
    variables = load_hf(tmp_path / "random", param_dtype=np.float32)
    assert all(bool(np.isfinite(np.asarray(leaf, np.float64)).all()) for leaf in jax.tree.leaves(variables))
    params = variables["params"]
    experts = params["segment_3"]["layer_0"]["block_sparse_moe"]["experts"]["w1"]
    for matrix in (params["embed_tokens"], experts):
        assert 0.7 < float(np.std(matrix)) / cfg.initializer_range < 1.4
    assert (np.asarray(params["norm"]) == 1).all()


def test_bytes_depend_on_the_seed_alone(copy_golden, tmp_path, monkeypatch):
    cfg = ModelConfig.from_hf(copy_golden("k3_tiny").folder)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 5000)
    for name, seed, size in (("a", 0, 10**9), ("b", 0, 10**9), ("c", 1, 10**9), ("d", 0, 300_000)):
        synthesize(cfg, tmp_path / name, seed=seed, max_shard_size=size)
    a, b, c, d = (
        {n: x.tensor(n).tobytes() for n in x.headers} for x in (open_checkpoint(tmp_path / n) for n in "abcd")
    )
    assert a == b == d and len(set(a.values())) > 600
    assert [name for name in a if "w1.weight_packed" in name and a[name] == c[name]] == []


def test_other_sizes_than_the_released(tmp_path):
    """As `convert synthesize --layers 2 --num-experts 4` makes of Kimi K3, narrower."""
    whole = ModelConfig.from_hf(Path(__file__).parents[1] / "data" / "kimi_k3")
    cfg = dataclasses.replace(
        whole.first_layers(2), num_experts=17, hidden_size=64, vocab_size=64, vision=None, routed_expert_hidden_size=32
    )
    synthesize(cfg, tmp_path / "random")
    weight_map = json.loads((tmp_path / "random" / INDEX).read_text())["weight_map"]
    assert "language_model.model.layers.1.block_sparse_moe.experts.16.w3.weight_scale" in weight_map
    assert not any("layers.2." in name for name in weight_map)
