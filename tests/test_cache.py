"""The cache's layout, size and refusals. What decoding through it gives is tested in nn/test_model.py."""

import dataclasses
import runpy
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3, ModelConfig, init_cache
from k3jax.cache import cache_shardings, check_cache, layer_cache, with_layer_cache, with_rows, written
from k3jax.nn.model import init_variables
from k3jax.serve.generate import make_advance
from k3jax.sharding import make_mesh

ROOT = Path(__file__).parents[1]


def test_layout():
    cfg = ModelConfig.from_hf(ROOT / "tests" / "data" / "k3_tiny")  # dense KKKM | KKKM | M
    cache = init_cache(cfg, batch=2, max_len=5, dtype=jnp.bfloat16)
    assert cache.max_len == 5 and int(cache.length) == 0 and not cache.present.any()
    kda = {name: (2, 3, 3, 16) for name in ("q_conv1d", "k_conv1d", "v_conv1d")} | {"state": (2, 3, 16, 16)}
    mla = {"latent": (2, 5, 32), "k_rope": (2, 5, 8)}
    kinds = [kda if kind.mixer == "kda" else mla for kind in cfg.layers]
    for i, kind in enumerate(kinds):
        s, r, j = cfg.layer_address(i)
        arrays = cache.layers[f"segment_{s}"][f"layer_{j}"]
        assert {name: x[r].shape for name, x in arrays.items()} == kind
        for name, x in arrays.items():
            assert x.dtype == (jnp.float32 if name == "state" else jnp.bfloat16), name
    assert not any(x.any() for x in jax.tree.leaves(cache))


def test_state_is_as_wide_as_the_numbers():
    cfg = ModelConfig.from_hf(ROOT / "tests" / "data" / "k3_tiny")
    layer = init_cache(cfg, 1, 1, jnp.float64).layers["segment_0"]["layer_0"]
    assert {x.dtype for x in layer.values()} == {jnp.dtype(jnp.float64)}


def test_kimi_k3_in_bytes():
    cfg = runpy.run_path(str(ROOT / "configs" / "kimi_k3.py"))["model"]
    length = 1 << 20
    cache = jax.eval_shape(partial(init_cache, cfg, 1, length, jnp.bfloat16))
    sizes = {"state": 0, "latent": 0, "k_rope": 0}
    for path, x in jax.tree_util.tree_leaves_with_path(cache.layers):
        name = path[-1].key
        sizes[name] = sizes.get(name, 0) + x.size * x.dtype.itemsize
    assert sizes["state"] == 434_110_464
    assert sizes["latent"] + sizes["k_rope"] == 27_648 * length
    assert sizes["q_conv1d"] == sizes["v_conv1d"] == 69 * 3 * 96 * 128 * 2


@pytest.mark.parametrize("batch, max_len", [(0, 4), (2, 0), (-1, 4)])
def test_sizes_must_be_positive(batch, max_len):
    cfg = ModelConfig.from_hf(ROOT / "tests" / "data" / "k3_tiny")
    with pytest.raises(ValueError, match=f"batch, max_len: found {batch}, {max_len}; both must be positive"):
        init_cache(cfg, batch, max_len)


def test_a_cache_lies_on_a_mesh_by_rows_and_heads(tiny):
    mesh = make_mesh(expert=2, tensor=2)
    shapes = jax.eval_shape(partial(init_cache, tiny, 4, 8))
    cache = jax.device_put(init_cache(tiny, 4, 8), cache_shardings(shapes, mesh))
    kda, mla = cache.layers["segment_0"]["layer_0"], cache.layers["segment_0"]["layer_1"]
    part = lambda x: x.sharding.shard_shape(x.shape)  # noqa: E731
    assert part(kda["state"]) == (1, 2, 1, 16, 16) and part(kda["q_conv1d"]) == (1, 2, 3, 1, 16)
    assert part(mla["latent"]) == (1, 2, 8, 16) and part(mla["k_rope"]) == (1, 2, 8, 8)
    assert part(cache.present) == (2, 8) and part(cache.length) == ()


def test_a_layer_is_taken_out_and_put_back():
    stacks = {"a": jnp.arange(6.0).reshape(3, 2)}
    layer = layer_cache(stacks, jnp.int32(1))
    assert layer["a"].tolist() == [2, 3]
    assert with_layer_cache(stacks, jnp.int32(2), layer)["a"].tolist() == [[0, 1], [2, 3], [2, 3]]


def test_under_a_mesh_it_is_made_in_its_place_with_rows_for_every_device(tiny):
    mesh = make_mesh(expert=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        cache = init_cache(tiny, 5, 8)
        shapes = jax.eval_shape(partial(init_cache, tiny, 5, 8))
    assert cache.batch == 5 and cache.rows == 8 and jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, shapes)
    for x, sharding in zip(jax.tree.leaves(cache), jax.tree.leaves(cache_shardings(shapes, mesh)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim) or x.ndim == 0
    assert init_cache(tiny, 5, 8).rows == 5


def test_rows_are_added_and_cut(tiny):
    cache = jax.tree.map(lambda x: x + 1, init_cache(tiny, 3, 4))
    larger = with_rows(cache, 4)
    assert larger.rows == 4 and larger.batch == 3 and not larger.present[3].any()
    assert all(not x[:, 3].any() and x[:, :3].all() for x in jax.tree.leaves(larger.layers))
    jax.tree.map(np.testing.assert_array_equal, with_rows(larger, 3), cache)


@pytest.mark.parametrize("fill", range(8))
def test_what_is_beyond_the_room_is_not_written(fill):
    cached, new = np.arange(10).reshape(2, 5), -np.arange(1, 7).reshape(2, 3)
    expected = cached.copy()
    fits = max(5 - fill, 0)
    expected[:, fill : fill + 3] = new[:, :fits]
    zero = jnp.zeros((), jnp.int32)
    found = jax.jit(lambda *x: written(*x[:2], (zero, x[2]), 1))(jnp.asarray(cached), jnp.asarray(new), jnp.int32(fill))
    np.testing.assert_array_equal(found, expected)


def test_decoding_copies_no_cache(tiny):
    """One row on four devices, as `generate` decodes it: what a step needs beside the donated cache is a part of it."""
    net, length = K3(tiny), 1 << 15
    variables = jax.eval_shape(lambda: nn.unbox(init_variables(net, jax.random.key(0))))
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    with jax.set_mesh(make_mesh(expert=4)):
        cache = jax.eval_shape(partial(init_cache, tiny, 1, length))
        place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        shardings = cache_shardings(cache, jax.sharding.get_mesh())
        advance = make_advance(net, 0.0, cache_shardings=shardings)
        step = advance.lower(variables, one, one, jax.tree.map(place, cache, shardings), jax.random.key(0)).compile()
    memory = step.memory_analysis()
    latents = 4 * length * (tiny.kv_lora_rank + tiny.qk_rope_head_dim)  # a device has one row
    assert memory.alias_size_in_bytes > latents > 4 * memory.temp_size_in_bytes > 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch": 2}, "cache: found batch 3, must be 2 like tokens"),
        ({"new": 9}, "cache: found max_len 8, must hold at least the 9 new tokens"),
        ({"length": 6, "new": 3}, "cache: found length 6 of max_len 8, must leave room for the 3 new tokens"),
        ({"length": 11}, "cache: found length 11 of max_len 8, must leave room for the 1 new tokens"),
        (
            {"cfg": {"kda_head_dim": 8}},
            r"cache: found shape \(1, 3, 2, 16, 16\) for segment_0/layer_0/state, must be \(1, 3, 2, 8, 8\) as",
        ),
        ({"cfg": {"kda_layers": (1, 2), "full_attn_layers": ()}}, "cache: found nothing for segment_0/layer_1/state"),
        ({"dtype": {"state": jnp.bfloat16}}, "found dtype bfloat16 for segment_0/layer_0/state, must be float32 or wider"),
        ({"dtype": {"latent": jnp.int32}}, "found dtype int32 for segment_0/layer_1/latent, must be a floating one"),
    ],
)
def test_a_cache_that_does_not_fit(tiny, change, message):
    cache, dtypes = init_cache(tiny, 3, 8), change.get("dtype", {})
    cache = cache.replace(length=jnp.int32(change.get("length", 0)))
    narrowed = lambda path, x: x.astype(dtypes.get(path[-1].key, x.dtype))  # noqa: E731
    cache = cache.replace(layers=jax.tree_util.tree_map_with_path(narrowed, cache.layers))
    cfg = dataclasses.replace(tiny, **change.get("cfg", {}))
    with pytest.raises(ValueError, match=message) as error:
        check_cache(cfg, cache, change.get("batch", 3), change.get("new", 1))
    assert "\n" not in str(error.value)


def test_a_cache_holds_floats():
    with pytest.raises(ValueError, match="dtype: found int32, must be a floating one"):
        init_cache(ModelConfig.from_hf(ROOT / "tests" / "data" / "k3_tiny"), 1, 4, jnp.int32)
