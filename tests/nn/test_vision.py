"""Tower, projector and merge against values of the released reference code, and what must not change them."""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.nn.layers import Policy
from k3jax.nn.vision import tower_eps
from k3jax.ops import vit
from k3jax.vision import prepare

FOLDER = Path(__file__).parents[1] / "data" / "k3_tiny"
GOLDEN = np.load(FOLDER / "golden.npz")
TOLERANCE = {"float64": 1e-9, "float32": 2e-4}
INPUTS = {"pixel_values": GOLDEN["mm.pixel_values"], "grid_thws": GOLDEN["mm.grid_thws"]}
TOKENS = GOLDEN["mm.input_ids"]


@cache
def load(dtype):
    """(cfg, variables, jitted apply that keeps what tower and projector give)."""
    cfg = k3jax.ModelConfig.from_hf(FOLDER)
    variables = k3jax.load_hf(FOLDER, param_dtype=jnp.dtype(dtype))
    model = k3jax.K3(cfg, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    seen = lambda module, _: module.name in ("vision_tower", "mm_projector")  # noqa: E731
    apply = jax.jit(lambda v, t, mask, images, cache: model.apply(
        v, t, mask, cache=cache, pixel_values=images, capture_intermediates=seen, mutable=["intermediates"]
    ))
    return model, variables, apply


def relative(found, golden):
    return float(np.max(np.abs(np.asarray(found, np.float64) - golden)) / np.max(np.abs(golden)))


def packed(cfg, tokens=TOKENS, devices=1, **inputs):
    tokens, mask, _, images = prepare(cfg, tokens, **(INPUTS | inputs), devices=devices)
    return jnp.asarray(tokens), jnp.ones(tokens.shape, jnp.int32) if mask is None else jnp.asarray(mask), images


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_released_values(dtype):
    model, variables, apply = load(dtype)
    tokens, mask, images = packed(model.cfg)
    out, state = apply(variables, tokens, mask, images, None)
    seen = {name: state["intermediates"][name]["__call__"][0][0, :24] for name in ("vision_tower", "mm_projector")}
    errors = {
        "tower": relative(seen["vision_tower"], GOLDEN["mm.vision_tower"]),
        "projector": relative(seen["mm_projector"], GOLDEN["mm.projected"]),
        "logits": relative(out.logits, GOLDEN["mm.logits"]),
    }
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def test_released_inputs_outside_of_jit():
    model, variables, _ = load("float64")
    out = model.apply(variables, jnp.asarray(TOKENS), **INPUTS)
    assert out.logits.shape == (1, 31, 128)
    assert relative(out.logits, GOLDEN["mm.logits"]) <= TOLERANCE["float64"]


def test_rows_of_different_images_and_larger_buckets_change_nothing():
    """The same row beside one with other images, one of them a clip, in another order: left padding, more room."""
    model, variables, apply = load("float64")
    grids, values = INPUTS["grid_thws"], np.split(INPUTS["pixel_values"], [24, 88])
    second = np.array([[7, 120, 9, 3, 120, 11, 11, 11, 12, 13]])
    tokens, mask, images = packed(
        model.cfg,
        np.concatenate([TOKENS, second]),
        48,
        pixel_values=np.concatenate([*values, values[2], values[0]]),
        grid_thws=np.concatenate([grids, grids[[2, 0]]]),
    )
    assert tokens.shape == (2, 31) and images.ids.shape == (2, 192) and mask[1].tolist() == [0] * 15 + [1] * 16
    out, _ = apply(variables, tokens, mask, images, None)
    assert relative(out.logits[:1], GOLDEN["mm.logits"]) <= TOLERANCE["float64"]
    own = {"pixel_values": np.concatenate([values[2], values[0]]), "grid_thws": grids[[2, 0]]}
    alone, ones, images = packed(model.cfg, second, **own)
    expected, _ = apply(variables, alone, ones, images, None)
    assert relative(out.logits[1:, 15:], np.asarray(expected.logits)) <= 1e-12


def test_blocks_of_attention_change_nothing(monkeypatch):
    model, variables, _ = load("float64")
    monkeypatch.setattr(vit, "BLOCK", 24)
    out = jax.jit(lambda v, *x: model.apply(v, x[0], x[1], pixel_values=x[2]))(variables, *packed(model.cfg))
    assert relative(out.logits, GOLDEN["mm.logits"]) <= TOLERANCE["float64"]


def test_text_follows_images_through_the_cache():
    model, variables, apply = load("float64")
    tokens, mask, images = packed(model.cfg)
    cache = k3jax.init_cache(model.cfg, 1, 31, jnp.float64)
    out, _ = apply(variables, tokens[:, :30], mask[:, :30], images, cache)
    assert relative(out.logits, GOLDEN["mm.logits"][:, :30]) <= TOLERANCE["float64"]
    out, _ = apply(variables, tokens[:, 30:], mask[:, 30:], None, out.cache)
    assert relative(out.logits, GOLDEN["mm.logits"][:, 30:]) <= TOLERANCE["float64"]


def test_text_alone_passes_images_by():
    model, variables, apply = load("float64")
    tokens = jnp.asarray(GOLDEN["input_ids"])
    ones = jnp.ones_like(tokens)
    out, _ = apply(variables, tokens, ones, None, None)
    none = {"pixel_values": np.zeros((0, 3, 4, 4)), "grid_thws": np.zeros((0, 3), np.int64)}
    beside, _ = apply(variables, tokens, ones, packed(model.cfg, np.asarray(tokens), **none)[2], None)
    assert relative(out.logits, GOLDEN["logits"]) <= 1e-9 and relative(beside.logits, GOLDEN["logits"]) <= 1e-9


def test_a_row_whose_placeholders_are_not_its_image_tokens_is_not_a_number():
    model, variables, apply = load("float64")
    tokens, mask, images = packed(model.cfg)
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
    model, variables, _ = load("float64")
    with pytest.raises(ValueError, match=message):
        model.apply(variables, jnp.asarray(TOKENS), **inputs)


def test_a_text_model_refuses_images():
    model, variables, _ = load("float64")
    text = k3jax.K3(dataclasses.replace(model.cfg, vision=None))
    for inputs in (INPUTS, {"pixel_values": packed(model.cfg)[2]}):
        with pytest.raises(ValueError, match="pixel_values: this model has no vision"):
            text.apply(variables, jnp.asarray(TOKENS), **inputs)


def test_epsilon_is_the_compute_dtype_s():
    found = [tower_eps(Policy(dtype)) for dtype in (jnp.float64, jnp.float32, jnp.bfloat16)]
    assert found == [2.0**-52, 2.0**-23, 2.0**-7]


def test_bfloat16_is_near_float32_with_its_epsilon(monkeypatch):
    model, variables, apply = load("float32")
    inputs = (variables, *packed(model.cfg), None)
    projected = lambda found: np.asarray(found[1]["intermediates"]["mm_projector"]["__call__"][0][0, :24], np.float64)  # noqa: E731
    own = projected(apply(*inputs))
    low = projected(load.__wrapped__("bfloat16")[2](*inputs))
    monkeypatch.setattr("k3jax.nn.vision.tower_eps", lambda policy: 2.0**-7)
    expected = projected(load.__wrapped__("float32")[2](*inputs))
    assert relative(low, expected) < 0.05 < relative(own, expected)
