"""The cache's layout, size and refusals. What decoding through it gives is tested in nn/test_model.py."""

import runpy
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from k3jax import ModelConfig, init_cache
from k3jax.cache import cache_shardings, layer_cache, with_layer_cache
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
