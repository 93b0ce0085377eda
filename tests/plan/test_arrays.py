"""Bytes of what a step is given: against the released tensors, the facts, and the product's own shardings."""

import dataclasses
import json
import math
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest

from k3jax import K3, ModelConfig, init_cache, make_mesh
from k3jax.cache import cache_shardings
from k3jax.nn.model import init_variables
from k3jax.plan import analytic, arrays
from k3jax.plan.setting import Serve, Strategy, Train
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.settings import load_model
from k3jax.nn.model import model_shardings
from k3jax.sharding import spec
from k3jax.train import step as training

ROOT = Path(__file__).parents[2]
SHAPES = ROOT.parent / "shared" / "k3" / "tensor_shapes.json"
KIMI_K3 = load_model(ROOT / "configs" / "kimi_k3.py")
KIMI_LINEAR = load_model(ROOT / "configs" / "kimi_linear_48b.py")
BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear", "tied, none shared", "no experts"])
def small(request, tiny):
    """The tiny model, and one with Kimi-Linear's parts: no query rank, no gates of full rank, experts on the width; one
    with less than released models have, and one with dense layers alone."""
    if request.param == "tied, none shared":
        return dataclasses.replace(tiny, tie_word_embeddings=True, num_shared_experts=0)
    if request.param == "no experts":
        return dataclasses.replace(tiny, first_k_dense_replace=2)
    if request.param == "kimi_k3":
        vision = ModelConfig.from_hf(ROOT / "tests" / "data" / "k3_tiny").vision
        vision = dataclasses.replace(vision, text_hidden_size=tiny.hidden_size, media_placeholder_token_id=1)
        return dataclasses.replace(
            tiny, routed_expert_hidden_size=32, latent_moe_use_norm=True, q_lora_rank=16, vision=vision
        )
    parts = {"mla_use_output_gate": False, "use_full_rank_gate": False, "gate_lower_bound": None}
    return dataclasses.replace(tiny, attn_res_block_size=None, hidden_act="silu", **parts)


def test_released_bytes_are_the_released_tensors():
    found = arrays.released_bytes(KIMI_K3)
    assert sum(found.values()) == 1_560_860_324_864
    assert sum(arrays.released_bytes(KIMI_K3, vision=False).values()) == sum(found.values()) - found["vision"]


@pytest.mark.skipif(not SHAPES.exists(), reason="the released shapes are not here")
def test_text_bytes_are_those_of_the_shapes():
    tensors = json.loads(SHAPES.read_text())["tensors"]
    text = [x for x in tensors if x["name"].startswith("language_model.")]
    total = sum(x["count"] * math.prod(x["shape"]) * BYTES[x["dtype"]] for x in text)
    assert sum(arrays.released_bytes(KIMI_K3, vision=False).values()) == total == 1_559_965_606_912


def test_serving_holds_what_is_released_but_for_padding():
    one = vars(MeshConfig())
    held = arrays.weight_bytes(KIMI_K3, Serve(), one)
    padding = 69 * 32 * 4  # A_log has 96 of 128 values
    assert sum(held.values()) == sum(arrays.released_bytes(KIMI_K3).values()) - padding


def test_cache_bytes_are_the_facts():
    assert arrays.kda_state_bytes(KIMI_K3, 1) == 434_110_464
    assert arrays.mla_cache_bytes(KIMI_K3, 1, 1) == 27_648
    assert arrays.mla_cache_bytes(KIMI_K3, 1, 1_048_576) == 28_991_029_248
    split = arrays.cache_bytes(KIMI_K3, Serve(batch=64, context=4096), vars(MeshConfig(expert=8, tensor=4)))
    tails = 69 * 8 * 3 * 3 * 24 * 128 * 2
    assert split["KDA state"] == 434_110_464 * 8 / 4 + tails
    assert split["MLA cache"] == 8 * 4096 * (27_648 + 4)  # and which tokens are there


def test_cache_bytes_are_those_of_the_cache(small):
    cache = jax.eval_shape(lambda: init_cache(small, 4, 64, jax.numpy.bfloat16))
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    workload = Serve(batch=4, context=64)
    assert sum(arrays.cache_bytes(small, workload, vars(MeshConfig())).values()) == total - 4  # its length


def test_cache_bytes_on_a_mesh_that_does_not_divide_the_rows(small):
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    with jax.set_mesh(mesh):
        cache = jax.eval_shape(lambda: init_cache(small, 5, 64, jax.numpy.bfloat16))
    shards = zip(jax.tree.leaves(cache), jax.tree.leaves(cache_shardings(cache, mesh)), strict=True)
    total = sum(math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in shards)
    found = arrays.cache_bytes(small, Serve(batch=5, context=64), dict(mesh.shape))
    assert sum(found.values()) == total - 4


@pytest.mark.parametrize("experts", ["dequantized", "packed"])
def test_axes_and_shapes_are_those_the_modules_declare(small, experts):
    model = K3(small, experts=experts, param_dtype=jax.numpy.bfloat16)
    boxed = jax.eval_shape(lambda: init_variables(model, jax.random.key(0)))
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    declared = {}
    for path, leaf in leaves:
        names = tuple(None if name == "layers" else name for name in getattr(leaf, "names", ()))
        value = getattr(leaf, "value", leaf)
        declared[tuple(key.key for key in path)] = (value.shape, names or (None,) * value.ndim, value.dtype.itemsize)
    ours = {
        x.path: (x.shape, (*x.axes, *(None,) * (len(x.shape) - len(x.axes))), x.itemsize)
        for x in arrays.parameters(small, experts, 2)
    }
    assert ours == declared


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"data": 2, "expert": 4}, {"context": 2, "fsdp": 4}]
)
def test_arguments_of_training_are_those_of_the_step(small, sizes):
    config = RunConfig(small, DataConfig(seq_len=16, batch_size=8), TrainConfig(), MeshConfig(**sizes))
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        state, _ = training.abstract_state(config, mesh)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    batch = 4 * 4 * np.prod(jax.sharding.NamedSharding(mesh, spec(("batch", None), (8, 16), mesh)).shard_shape((8, 16)))
    found = analytic.arguments(small, Train(8, 16), Strategy(config.mesh))
    assert sum(found.values()) == held + batch - 12  # three counts of steps


@pytest.mark.parametrize("experts", ["dequantized", "packed"])
def test_weights_of_serving_are_those_of_the_model(small, experts):
    sizes = {"fsdp": 2, "expert": 2, "tensor": 2}
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        shardings = model_shardings(small, mesh, experts)
        shapes = jax.eval_shape(
            lambda: nn.unbox(
                init_variables(K3(small, experts=experts, param_dtype=jax.numpy.bfloat16), jax.random.key(0))
            )
        )
    sizes_of = lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize  # noqa: E731
    held = sum(jax.tree.leaves(jax.tree.map(sizes_of, shapes, shardings)))
    assert sum(arrays.weight_bytes(small, Serve(experts=experts), vars(MeshConfig(**sizes))).values()) == held


def test_kimi_linear_has_its_parameters():
    assert sum(math.prod(x.shape) for x in arrays.parameters(KIMI_LINEAR, "dequantized", 4)) == 49_122_681_728
