"""Packing in buckets, widening of placeholders, and what is refused."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import ModelConfig
from k3jax.vision import Patches, pack, prepare, widen
from k3jax.vision.batch import bucket, patch_unit

CFG = ModelConfig.from_hf(Path(__file__).parents[1] / "data" / "k3_tiny")
VISION, PLACEHOLDER = CFG.vision, 120
RNG = np.random.default_rng(0)


def image(*grid):
    return Patches(RNG.normal(size=(int(np.prod(grid)), 3, 4, 4)), grid)


def test_buckets_are_few_and_waste_little():
    sizes = {bucket(n) for n in range(1, 70_000)}
    assert len(sizes) == 37 and all(size % 64 == 0 for size in sizes)
    for n in range(1, 70_000, 7):
        assert n <= bucket(n) <= max(1.25 * n, n + 64)
    assert [bucket(n) for n in (0, 1, 64, 65, 513, 66564)] == [64, 64, 64, 128, 640, 81920]
    assert bucket(100, 96) == 192
    # 48 devices that share a row hold whole cells of four patches each.
    assert [patch_unit(VISION, devices) for devices in (1, 8, 48)] == [64, 64, 192]


def test_pack_puts_the_patches_of_a_cell_together():
    a, b = image(1, 4, 6), image(2, 2, 4)
    packed = pack(VISION, [[a, b], []])
    assert packed.patches.shape == (2, 64, 3, 4, 4) and packed.slots.shape == (2, 16)
    np.testing.assert_array_equal(packed.ids[0], [1] * 24 + [2] * 16 + [0] * 24)
    assert not packed.ids[1].any() and (packed.slots[1] == -1).all()
    # The second cell of the first image is rows 0, 1 and columns 2, 3.
    np.testing.assert_array_equal(packed.places[0, 4:8], [[0, 0, 2], [0, 0, 3], [0, 1, 2], [0, 1, 3]])
    np.testing.assert_array_equal(packed.patches[0, 4:8], a.values[[2, 3, 8, 9]])
    np.testing.assert_array_equal(packed.slots[0], [0, 1, 2, 3, 4, 5, 6, 7, 6, 7] + [-1] * 6)
    for i in range(24):
        _, row, column = packed.places[0, i]
        np.testing.assert_array_equal(packed.patches[0, i], a.values[6 * row + column])
    for i in range(24, 40):
        frame, row, column = packed.places[0, i]
        np.testing.assert_array_equal(packed.patches[0, i], b.values[8 * frame + 4 * row + column])
    np.testing.assert_array_equal(packed.grids[0, [0, 30]], [[1, 4, 6], [2, 2, 4]])


def test_pack_keeps_to_the_room_given():
    assert pack(VISION, [[image(1, 2, 2)]], room=128).ids.shape == (1, 128)
    with pytest.raises(ValueError, match="images: found 24 patches in a row, must be at most 16"):
        pack(VISION, [[image(1, 4, 6)]], room=16)


def test_widen():
    tokens = np.array([[1, PLACEHOLDER, 2, PLACEHOLDER], [PLACEHOLDER, 3, 4, 5]])
    grids = [(1, 2, 4), (3, 2, 2), (1, 2, 2)]
    wide, mask, segments, counts = widen(VISION, tokens, grids)
    P = PLACEHOLDER
    np.testing.assert_array_equal(wide, [[1, P, P, 2, P], [0, P, 3, 4, 5]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    assert segments is None and counts.tolist() == [2, 1]
    wide, mask, _, _ = widen(VISION, tokens, grids, mask=np.array([[1, 1, 1, 1], [1, 1, 1, 0]]))
    np.testing.assert_array_equal(wide[1], [P, 3, 4, 5, 0])
    np.testing.assert_array_equal(mask[1], [1, 1, 1, 0, 0])
    _, mask, segments, _ = widen(VISION, tokens, grids, segment_ids=np.array([[1, 1, 2, 2], [1, 1, 1, 2]]))
    assert mask is None
    np.testing.assert_array_equal(segments, [[1, 1, 1, 2, 2], [1, 1, 1, 2, 0]])
    assert widen(VISION, tokens[:1], grids[:2])[1] is None  # nothing to fill up
    zero = dataclasses.replace(VISION, media_placeholder_token_id=0)
    np.testing.assert_array_equal(widen(zero, tokens % P, grids)[0], [[1, 0, 0, 2, 0], [1, 0, 3, 4, 5]])


def inputs():
    tokens = jnp.asarray([[1, PLACEHOLDER, 2, PLACEHOLDER]])
    return tokens, RNG.normal(size=(24, 3, 4, 4)), np.array([[1, 4, 4], [2, 2, 2]])


def test_prepare_shares_the_images_out():
    tokens, values, grids = inputs()
    tokens = jnp.concatenate([tokens, jnp.asarray([[1, 2, 3, PLACEHOLDER]])])
    more = RNG.normal(size=(4, 3, 4, 4))
    wide, mask, _, images = prepare(CFG, tokens, np.concatenate([values, more]), [*grids, [1, 2, 2]])
    assert wide.shape == mask.shape == (2, 7)
    np.testing.assert_array_equal(images.patches[1, :4], more)
    np.testing.assert_array_equal(images.patches[0, 16:24], values[16:])
    assert images.ids.max(axis=1).tolist() == [2, 1]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, v, g: (t[:, :2], v, g), r"found 1 image placeholders \(token 120\), must be 2, one an image"),
        (lambda t, v, g: (t.at[:, 0].set(PLACEHOLDER), v, g), "tokens: found 3 image placeholders"),
        (lambda t, v, g: (t, v[:-1], g), r"pixel_values: found shape \(23, 3, 4, 4\), must be \(24, 3, 4, 4\)"),
        (lambda t, v, g: (t, v, g[:, :2]), r"grid_thws: found int64 of shape \(2, 2\), must be integers \[images,3\]"),
        (lambda t, v, g: (t, v, g * 1.0), "grid_thws: found float64 of shape"),
        (lambda t, v, g: (t, v, None), "grid_thws: found None, must be"),
        (lambda t, v, g: (t, v, [[1, 3, 4], [2, 2, 2]]), "found 3x4 patches, must be multiples of 2x2 up to 512"),
        (lambda t, v, g: (t, v, [[1, 0, 4], [2, 2, 2]]), "grid_thws: found 0x4 patches"),
        (lambda t, v, g: (t, v, [[1, 2, 514], [2, 2, 2]]), "grid_thws: found 2x514 patches"),
        (lambda t, v, g: (t, v, [[5, 2, 2], [2, 2, 2]]), "grid_thws: found 5 frames, must be 1 to init_pos_emb_time=4"),
    ],
)
def test_prepare_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        prepare(CFG, *change(*inputs()))


def test_prepare_needs_a_model_that_sees_and_arrays_that_are_there():
    with pytest.raises(ValueError, match="pixel_values: this model has no vision"):
        prepare(dataclasses.replace(CFG, vision=None), *inputs())
    tokens, values, grids = inputs()
    with pytest.raises(ValueError, match="pixel_values: found an array traced by JAX.*k3jax.vision.prepare"):
        jax.jit(lambda t: prepare(CFG, t, values, grids)[0])(tokens)
