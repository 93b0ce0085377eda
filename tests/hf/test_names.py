"""The names table against the released listing and the golden checkpoints' indices."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from k3jax.config import ModelConfig
from k3jax.hf.names import table, tree_shapes

DATA = Path(__file__).parents[1] / "data"
MODELS = ["kimi_k3", "kimi_linear_48b", "k3_tiny", "kimi_linear_tiny"]


def tensors(cfg):
    for leaf in table(cfg):
        for repeat in range(leaf.repeats):
            for name in leaf.names(repeat):
                yield name, leaf


def test_kimi_k3_has_every_released_tensor():
    cfg = ModelConfig.from_hf(DATA / "kimi_k3")
    numbers = {"layers": "layers.{L}", "experts": "experts.{E}", "blocks": "blocks.{B}"}
    rows, seen, size = Counter(), set(), 0
    for name, leaf in tensors(cfg):
        seen.add(name)
        size += leaf.tensor_bytes
        row = re.sub(r"(layers|experts|blocks)\.\d+", lambda m: numbers[m[1]], name)
        rows[row, leaf.dtype, leaf.stored] += 1
    assert (len(seen), sum(rows.values()), size) == (497_220, 497_220, 1_560_860_324_864)
    released = json.loads((DATA / "kimi_k3" / "tensor_shapes.json").read_text())
    assert rows == {(name, dtype, tuple(shape)): count for name, (dtype, shape, count) in released.items()}
    assert len(table(cfg)) < 500  # leaves, not tensors


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
def test_names_are_those_of_a_stored_index(model):
    index = json.loads((DATA / model / "model.safetensors.index.json").read_text())
    found = list(tensors(ModelConfig.from_hf(DATA / model)))
    assert sorted(name for name, _ in found) == sorted(index["weight_map"])
    assert sum(leaf.tensor_bytes for _, leaf in found) == index["metadata"]["total_size"]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_add_up_to_the_config_s_count(model):
    cfg = ModelConfig.from_hf(DATA / model)
    text = [leaf for leaf in table(cfg) if leaf.part != "vision"]
    assert sum(leaf.count * leaf.tensor_parameters for leaf in text) == cfg.num_parameters


@pytest.mark.parametrize("model", MODELS)
def test_layers_lie_where_the_config_says(model):
    cfg = ModelConfig.from_hf(DATA / model)
    placed = set()
    for leaf in (leaf for leaf in table(cfg) if leaf.part != "vision"):
        for repeat, layer in enumerate(leaf.layers):
            segment, r, place = cfg.layer_address(layer)
            assert (leaf.path[1], leaf.path[2], repeat) == (f"segment_{segment}", f"layer_{place}", r)
            assert f".layers.{layer}." in "." + leaf.names(repeat)[0]
            placed.add(layer)
    assert placed == set(range(cfg.num_hidden_layers))


def test_hand_written_rows():
    leaves = {leaf.path: leaf for leaf in table(ModelConfig.from_hf(DATA / "k3_tiny"))}
    third = ("params", "segment_3", "layer_0")  # layers 4, 5 and 6
    leaf = leaves[*third, "block_sparse_moe", "experts", "w2_scale"]
    assert leaf.names(2)[11] == "language_model.model.layers.6.block_sparse_moe.experts.11.w2.weight_scale"
    assert leaf.tree_shape == (3, 12, 32, 2)
    assert (leaf.count, leaf.tensor_bytes, leaf.tensor_parameters) == (36, 64, 0)
    leaf = leaves[*third, "self_attn", "A_log"]
    assert leaf.names(0) == ["language_model.model.layers.4.self_attn.A_log"]
    assert (leaf.tree_shape, leaf.stored) == ((3, 3), (128,))
    leaf = leaves["router", *third[1:], "block_sparse_moe", "e_score_correction_bias"]
    assert leaf.names(1) == ["language_model.model.layers.5.block_sparse_moe.gate.e_score_correction_bias"]
    assert leaves["params", "lm_head"].names(0) == ["language_model.lm_head.weight"]
    assert leaves["params", "vision_tower", "pos_emb"].tree_shape == (8, 8, 32)
    leaf = leaves["params", "vision_tower", "blocks", "wqkv"]
    assert (leaf.tree_shape, leaf.stored) == ((2, 3, 2, 24, 32), (144, 32))
    assert leaf.names(1) == ["vision_tower.encoder.blocks.1.wqkv.weight"]
    assert leaves["params", "mm_projector", "proj_2"].names(0) == ["mm_projector.proj.2.weight"]


def test_tree_shapes_of_both_forms_of_the_experts():
    cfg = ModelConfig.from_hf(DATA / "k3_tiny")
    values, packed = tree_shapes(cfg, "dequantized"), tree_shapes(cfg, "packed")
    experts = ("params", "segment_3", "layer_0", "block_sparse_moe", "experts")
    assert {path[-1]: shape for path, shape in values.items() if path[:-1] == experts} == {
        "w1": (3, 12, 64, 32),
        "w3": (3, 12, 64, 32),
        "w2": (3, 12, 32, 64),
    }
    assert (packed[*experts, "w2_packed"], packed[*experts, "w2_scale"]) == ((3, 12, 32, 32), (3, 12, 32, 2))
    others = [{path: shapes[path] for path in shapes if "experts" not in path} for shapes in (values, packed)]
    assert others[0] == others[1]
