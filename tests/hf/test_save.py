"""Export: the released bytes, whole or not at all."""

import dataclasses
import errno
import filecmp
import json
import os
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file

from k3jax.config import ModelConfig
from k3jax.hf import CheckpointError, load_hf, save_hf

INDEX = "model.safetensors.index.json"
Q_PROJ = ("params", "segment_3", "layer_0", "self_attn", "q_proj")
BIAS = ("router", "segment_3", "layer_0", "block_sparse_moe", "e_score_correction_bias")
EXPERTS = ("params", "segment_3", "layer_0", "block_sparse_moe", "experts")  # of layers 4, 5 and 6


@pytest.fixture
def k3(copy_golden):
    """Configuration and packed variables of the small Kimi K3."""
    folder = copy_golden("k3_tiny").folder
    return ModelConfig.from_hf(folder), load_hf(folder, experts="packed")


def changed(variables, path, value):
    """Variables with one leaf set, or removed where value is None."""
    flat = flatten_dict(variables) | {path: value}
    return unflatten_dict({path: leaf for path, leaf in flat.items() if leaf is not None})


def read(folder, name):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    return load_file(folder / weight_map[name])[name]


@pytest.mark.parametrize(
    "model, experts, dtype, scale_rule",
    [
        ("k3_tiny", "packed", jnp.float32, "even"),
        ("k3_tiny", "dequantized", jnp.float32, "even"),
        ("k3_tiny", "dequantized", jnp.float32, "floor"),
        ("k3_tiny", "dequantized", jnp.bfloat16, "even"),
        ("k3_tiny", "dequantized", jnp.float64, "even"),
        ("kimi_linear_tiny", "dequantized", jnp.float32, "even"),
        ("kimi_linear_tiny", "dequantized", jnp.float64, "even"),
    ],
)
def test_export_of_an_import_gives_the_same_files(copy_golden, tmp_path, model, experts, dtype, scale_rule):
    copy = copy_golden(model)
    cfg = ModelConfig.from_hf(copy.folder)
    variables = load_hf(copy.folder, param_dtype=dtype, experts=experts)
    save_hf(tmp_path / "out", cfg, variables, weight_map=copy.weight_map, scale_rule=scale_rule)
    files = sorted(file.name for file in copy.folder.glob("model*"))
    assert len(files) == 3
    assert filecmp.cmpfiles(copy.folder, tmp_path / "out", files, shallow=False) == (files, [], [])
    assert ModelConfig.from_hf(tmp_path / "out") == cfg


def test_leaves_may_lie_on_many_devices(copy_golden, tmp_path):
    copy = copy_golden("k3_tiny")
    variables = load_hf(copy.folder)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "expert"))
    flat = flatten_dict(variables)
    spread = {path: jax.device_put(leaf, spec) if "experts" in path else leaf for path, leaf in flat.items()}
    with jax.set_mesh(mesh):
        save_hf(
            tmp_path / "out",
            ModelConfig.from_hf(copy.folder),
            unflatten_dict(spread),
            weight_map=copy.weight_map,
        )
    files = [file.name for file in copy.folder.glob("model*")]
    assert filecmp.cmpfiles(copy.folder, tmp_path / "out", files, shallow=False) == (files, [], [])


def test_own_shards_keep_layers_together(k3, tmp_path):
    cfg, variables = k3
    save_hf(tmp_path / "out", cfg, variables, max_shard_size=300_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    weight_map = index["weight_map"]
    assert list(weight_map) == sorted(weight_map) and index["metadata"]["total_size"] == 1_296_800
    shards = sorted(set(weight_map.values()))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    layers = defaultdict(set)
    for name, shard in weight_map.items():
        layers[re.search(r"layers\.(\d+)|$", name)[1]].add(shard)
    assert all(len(files) == 1 for files in layers.values()) and len(layers) == 10
    sizes = [sum(a.nbytes for a in load_file(tmp_path / "out" / shard).values()) for shard in shards]
    # Two MoE layers fill a shard; the dense layer shares the first with what belongs to no layer.
    assert max(sizes) <= 300_000 and sum(sizes) == 1_296_800 and len(sizes) == 5
    with safe_open(tmp_path / "out" / shards[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # shards as readable as the rest
    again = load_hf(tmp_path / "out", experts="packed")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, variables))


def test_a_layer_larger_than_a_shard_is_split(k3, tmp_path):
    cfg, variables = k3
    save_hf(tmp_path / "out", cfg, variables, max_shard_size=20_000)
    large = []
    for shard in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(shard)
        if sum(a.nbytes for a in tensors.values()) > 20_000:
            large += tensors
    assert large == ["mm_projector.proj.0.weight"]  # 32,768 bytes, alone


def test_an_empty_folder_may_be_there(k3, tmp_path):
    (tmp_path / "out").mkdir()
    save_hf(tmp_path / "out", *k3)
    assert (tmp_path / "out" / INDEX).exists()


def test_values_are_rounded_to_nearest_even(k3, tmp_path):
    cfg, variables = k3
    ulp = 2.0**-7
    values = np.asarray(variables["params"]["norm"]).copy()
    values[:5] = [1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.6 * ulp, -1 - ulp / 2, 2.0**-133]
    save_hf(tmp_path / "out", cfg, changed(variables, ("params", "norm"), jnp.asarray(values)))
    stored = read(tmp_path / "out", "language_model.model.norm.weight")
    assert stored.dtype == ml_dtypes.bfloat16
    assert stored[:5].astype(float).tolist() == [1, 1 + 2 * ulp, 1 + ulp, -1, 2.0**-133]


@pytest.mark.parametrize(
    "rule, scale, byte",
    # 7 is 6 (saturated) at scale 1, 4 (3.5, to even) at scale 2; -1 is -1, -0.5; the low nibble is column 0
    [("floor", 127, 0xA7), ("even", 128, 0x96)],
)
def test_experts_are_quantised_by_the_rule(copy_golden, tmp_path, rule, scale, byte):
    folder = copy_golden("k3_tiny").folder
    variables = load_hf(folder)
    w1 = np.asarray(flatten_dict(variables)[*EXPERTS, "w1"]).copy()
    w1[1, 3, 5] = 0
    w1[1, 3, 5, :2] = [7, -1]
    edited = changed(variables, (*EXPERTS, "w1"), jnp.asarray(w1))
    save_hf(tmp_path / "out", ModelConfig.from_hf(folder), edited, scale_rule=rule)
    name = "language_model.model.layers.5.block_sparse_moe.experts.3.w1.weight"
    assert read(tmp_path / "out", f"{name}_scale")[5].tolist() == [scale]
    assert read(tmp_path / "out", f"{name}_packed")[5].tolist() == [byte] + 15 * [0]


# ---- bad input -----------------------------------------------------------------------------------


def refused(tmp_path, message, *arguments, **keywords):
    """Asserts that save_hf raises one line and leaves the parent folder as it was."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=message) as caught:
        save_hf(tmp_path / "out", *arguments, **keywords)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_there_is_kept(k3, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("data")
    refused(tmp_path, "out: already exists; choose a new or empty folder", *k3)
    assert (tmp_path / "out" / "precious").read_text() == "data"
    with pytest.raises(CheckpointError, match="precious: already exists"):
        save_hf(tmp_path / "out" / "precious", *k3)


def test_a_full_disk(k3, tmp_path, monkeypatch):
    write = os.pwrite
    written = []

    def fill_up(descriptor, data, begin):
        if len(written) == 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(begin)
        return write(descriptor, data, begin)

    monkeypatch.setattr(os, "pwrite", fill_up)
    message = r"out: writing failed \(No space left on device\); 1296800 bytes of disk are needed; nothing was kept"
    refused(tmp_path, message, *k3, max_shard_size=400_000)
    assert len(written) == 100


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.4e38])  # the last rounds to infinity
def test_a_weight_that_is_not_finite(k3, tmp_path, value):
    cfg, variables = k3
    leaf = flatten_dict(variables)[Q_PROJ].at[1, 0, 0, :2].set(value)
    name = "language_model.model.layers.5.self_attn.q_proj.weight"
    message = f"{name}: 2 of 3072 values are NaN or infinite as BF16; see leaf {'/'.join(Q_PROJ)}"
    refused(tmp_path, message, cfg, changed(variables, Q_PROJ, leaf))


def test_an_expert_that_is_not_finite(copy_golden, tmp_path):
    folder = copy_golden("k3_tiny").folder
    cfg, variables = ModelConfig.from_hf(folder), load_hf(folder)
    leaf = flatten_dict(variables)[*EXPERTS, "w2"].at[2, 7, 0, 0].set(np.inf)
    name = "layers.6.block_sparse_moe.experts.7.w2.weight_packed: 1 of 2048 values are NaN or infinite"
    refused(tmp_path, name, cfg, changed(variables, (*EXPERTS, "w2"), leaf))


def test_a_packed_scale_that_is_nan(k3, tmp_path):
    cfg, variables = k3
    leaf = flatten_dict(variables)[*EXPERTS, "w2_scale"].at[0, 11, 0, 0].set(0xFF)
    name = "layers.4.block_sparse_moe.experts.11.w2.weight_scale: 1 of 64 values are NaN or infinite as U8"
    refused(tmp_path, name, cfg, changed(variables, (*EXPERTS, "w2_scale"), leaf))


@pytest.mark.parametrize(
    "path, value, message",
    [
        (Q_PROJ, None, r"1 problem: params/segment_3/.*/q_proj: missing; expected shape \[3, 3, 16, 64\]"),
        (Q_PROJ, np.zeros((3, 48, 64)), r"q_proj: found shape \[3, 48, 64\], expected \[3, 3, 16, 64\]"),
        (Q_PROJ, np.zeros((3, 3, 16, 64), np.int32), "q_proj: found type int32, expected floating"),
        (("params", "bias"), np.zeros(3), "1 problem: params/bias: not a leaf of this model"),
        ((*EXPERTS, "w1_scale"), None, "w1_scale: missing"),
        ((*EXPERTS, "w1"), np.zeros((3, 12, 64, 32)), "experts/w1: not a leaf of this model"),
        ((*EXPERTS, "w1_scale"), np.zeros((3, 12, 64, 1), np.int8), "found type int8, expected uint8"),
        (BIAS, None, "router/.*/e_score_correction_bias: missing"),
        (("params", "mm_projector", "post_norm"), None, "params/mm_projector/post_norm: missing"),
        (("params", "vision_tower", "blocks", "wo"), np.zeros((2, 32, 48)), r"wo: found shape \[2, 32, 48\], expected"),
    ],
)
def test_a_wrong_tree(k3, tmp_path, path, value, message):
    cfg, variables = k3
    refused(tmp_path, f"variables: .*{message}.*; nothing was written", cfg, changed(variables, path, value))


def test_a_vision_model_without_its_vision_tensors(k3, tmp_path):
    cfg, variables = k3
    params = {name: tree for name, tree in variables["params"].items() if name not in ("vision_tower", "mm_projector")}
    text = variables | {"params": params}
    refused(tmp_path, "vision_tower: missing, but cfg.vision is set", cfg, text)
    save_hf(tmp_path / "out", dataclasses.replace(cfg, vision=None), text)


def test_packed_experts_for_a_model_that_has_none(k3, tmp_path):
    cfg, variables = k3
    refused(tmp_path, "w1_packed: not a leaf", dataclasses.replace(cfg, quantized_experts=False), variables)


@pytest.mark.parametrize(
    "name, shard, message",
    [
        ("lm_head.bias", "model.safetensors", "lm_head.bias: not a tensor of this model"),
        ("language_model.lm_head.weight", None, "language_model.lm_head.weight: missing"),
        (
            "language_model.lm_head.weight",
            "../a.safetensors",
            "../a.safetensors: not the name of a .safetensors file",
        ),
        ("language_model.lm_head.weight", "config.json", "config.json: not the name of a .safetensors file"),
    ],
)
def test_a_wrong_weight_map(copy_golden, k3, tmp_path, name, shard, message):
    weight_map = json.loads((tmp_path / "k3_tiny" / INDEX).read_text())["weight_map"] | {name: shard}
    weight_map = {name: shard for name, shard in weight_map.items() if shard}
    refused(tmp_path, f"weight_map: 1 problem: {message}; nothing was written", *k3, weight_map=weight_map)


def test_a_shard_size_of_nothing(k3, tmp_path):
    with pytest.raises(ValueError, match="max_shard_size: found 0, must be a positive number of bytes"):
        save_hf(tmp_path / "out", *k3, max_shard_size=0)
