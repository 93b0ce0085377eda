"""Tower, projector and merge against values of the released reference code, and what must not change them."""

import dataclasses
from functools import cache
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.nn.layers import Policy
from k3jax.nn.model import init_variables
from k3jax.nn.vision import tower_eps
from k3jax.ops import vit
from k3jax.vision import prepare

FOLDER = Path(__file__).parents[1] / "data" / "k3_tiny"
CFG = k3jax.ModelConfig.from_hf(FOLDER)
GOLDEN = np.load(FOLDER / "golden.npz")
TOLERANCE = {"float64": 1e-9, "float32": 2e-4}
INPUTS = {"pixel_values": GOLDEN["mm.pixel_values"], "grid_thws": GOLDEN["mm.grid_thws"]}
TOKENS = GOLDEN["mm.input_ids"]
# The tower before one dense layer of latent attention, where the rest of the text model says nothing.
SMALL = dataclasses.replace(CFG, num_hidden_layers=1, kda_layers=(), full_attn_layers=(1,))


def jitted(cfg, dtype):
    """apply(variables, tokens, mask, images, cache) that keeps what tower and projector give."""
    model = k3jax.K3(cfg, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    options = {
        "capture_intermediates": lambda module, _: module.name in ("vision_tower", "mm_projector"),
        "mutable": ["intermediates"],
    }
    return jax.jit(lambda v, t, mask, images, cache: model.apply(v, t, mask, None, cache, images, **options))


@cache
def golden(dtype):
    return k3jax.load_hf(FOLDER, param_dtype=jnp.dtype(dtype)), jitted(CFG, dtype)


@cache
def small():
    model = k3jax.K3(SMALL, jnp.float64, jnp.float64)
    variables = nn.unbox(jax.jit(lambda: init_variables(model, jax.random.key(0)))())
    return model, jax.tree.map(lambda x: x * 5, variables), jitted(SMALL, "float64")


def relative(found, expected):
    expected = np.asarray(expected, np.float64)
    return float(np.max(np.abs(np.asarray(found, np.float64) - expected)) / np.max(np.abs(expected)))


def packed(tokens=TOKENS, devices=1, **inputs):
    tokens, mask, _, images = prepare(CFG, tokens, **(INPUTS | inputs), devices=devices)
    return jnp.asarray(tokens), jnp.ones(tokens.shape, jnp.int32) if mask is None else jnp.asarray(mask), images


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_released_values(dtype):
    variables, apply = golden(dtype)
    out, state = apply(variables, *packed(), None)
    seen = {name: state["intermediates"][name]["__call__"][0][0, :24] for name in ("vision_tower", "mm_projector")}
    errors = {
        "tower": relative(seen["vision_tower"], GOLDEN["mm.vision_tower"]),
        "projector": relative(seen["mm_projector"], GOLDEN["mm.projected"]),
        "logits": relative(out.logits, GOLDEN["mm.logits"]),
    }
    assert out.logits.shape == (1, 31, 128) and max(errors.values()) <= TOLERANCE[dtype], errors


def test_text_follows_images_through_the_cache():
    variables, apply = golden("float64")
    tokens, mask, images = packed()
    cache = k3jax.init_cache(CFG, 1, 31, jnp.float64)
    out, _ = apply(variables, tokens[:, :30], mask[:, :30], images, cache)
    assert relative(out.logits, GOLDEN["mm.logits"][:, :30]) <= TOLERANCE["float64"]
    out, _ = apply(variables, tokens[:, 30:], mask[:, 30:], None, out.cache)
    assert relative(out.logits, GOLDEN["mm.logits"][:, 30:]) <= TOLERANCE["float64"]


@cache
def expected():
    _, variables, apply = small()
    return np.asarray(apply(variables, *packed(), None)[0].logits)


def test_released_inputs_outside_of_jit():
    model, variables, _ = small()
    out = model.apply(variables, jnp.asarray(TOKENS), **INPUTS)
    assert out.logits.shape == (1, 31, 128) and relative(out.logits, expected()) <= 1e-12


def test_rows_of_different_images_and_larger_buckets_change_nothing():
    """The same row beside one with other images, one of them a clip, in another order: left padding, more room."""
    _, variables, apply = small()
    grids, values = INPUTS["grid_thws"], np.split(INPUTS["pixel_values"], [24, 88])
    second = np.array([[7, 120, 9, 3, 120, 11, 11, 11, 12, 13]])
    both = {
        "pixel_values": np.concatenate([*values, values[2], values[0]]),
        "grid_thws": np.concatenate([grids, grids[[2, 0]]]),
    }
    tokens, mask, images = packed(np.concatenate([TOKENS, second]), 48, **both)
    assert tokens.shape == (2, 31) and images.ids.shape == (2, 192) and mask[1].tolist() == [0] * 15 + [1] * 16
    out, _ = apply(variables, tokens, mask, images, None)
    assert relative(out.logits[:1], expected()) <= 1e-12
    own = {"pixel_values": np.concatenate([values[2], values[0]]), "grid_thws": grids[[2, 0]]}
    alone, _ = apply(variables, *packed(second, **own), None)
    assert relative(out.logits[1:, 15:], alone.logits) <= 1e-12


def test_blocks_of_attention_change_nothing(monkeypatch):
    monkeypatch.setattr(vit, "BLOCK", 24)
    out, _ = jitted(SMALL, "float64")(small()[1], *packed(), None)
    assert relative(out.logits, expected()) <= 1e-12


def test_a_row_without_images_is_text():
    _, variables, apply = small()
    tokens = GOLDEN["input_ids"]
    none = {"pixel_values": np.zeros((0, 3, 4, 4)), "grid_thws": np.zeros((0, 3), np.int64)}
    tokens, mask, images = packed(tokens, **none)
    alone, _ = apply(variables, tokens, mask, None, None)
    beside, _ = apply(variables, tokens, mask, images, None)
    np.testing.assert_array_equal(alone.logits, beside.logits)


def test_a_row_whose_placeholders_are_not_its_image_tokens_is_not_a_number():
    _, variables, apply = small()
    tokens, mask, images = packed()
    one_less, none = jnp.where(jnp.arange(31)[None] == 1, 5, tokens), jnp.where(tokens == 120, 5, tokens)
    for wrong in (tokens.at[0, 0].set(120), one_less, none):
        out, _ = apply(variables, wrong, mask, images, None)
        assert np.isnan(out.logits[0, -1]).all()


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"pixel_values": INPUTS["pixel_values"]}, "grid_thws: found None"),
        ({"grid_thws": INPUTS["grid_thws"]}, r"pixel_values: found shape \(\), must be"),
        (INPUTS | {"grid_thws": INPUTS["grid_thws"][:2]}, "pixel_values: found shape"),
    ],
)
def test_refusals(inputs, message):
    with pytest.raises(ValueError, match=message):
        small()[0].apply(small()[1], jnp.asarray(TOKENS), **inputs)


def test_a_text_model_refuses_images():
    text = k3jax.K3(dataclasses.replace(SMALL, vision=None))
    for inputs in (INPUTS, {"pixel_values": packed()[2]}):
        with pytest.raises(ValueError, match="pixel_values: this model has no vision"):
            text.apply(small()[1], jnp.asarray(TOKENS), **inputs)


def test_epsilon_is_the_compute_dtype_s():
    found = [tower_eps(Policy(dtype)) for dtype in (jnp.float64, jnp.float32, jnp.bfloat16)]
    assert found == [2.0**-52, 2.0**-23, 2.0**-7]


def test_bfloat16_is_near_float64_with_its_epsilon(monkeypatch):
    variables = jax.tree.map(lambda x: x / 5, small()[1])  # small activations, which a large epsilon changes

    def projected(apply):
        _, state = apply(variables, *packed(), None)
        return np.asarray(state["intermediates"]["mm_projector"]["__call__"][0][0, :24], np.float64)

    own, low = projected(small()[2]), projected(jitted(SMALL, "bfloat16"))
    monkeypatch.setattr("k3jax.nn.vision.tower_eps", lambda policy: 2.0**-7)
    wide = projected(jitted(SMALL, "float64"))
    near, far = (np.linalg.norm(x - wide) / np.linalg.norm(wide) for x in (low, own))
    assert near < 0.03 < far, (near, far)
