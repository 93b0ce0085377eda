"""Sizes as released, pixels against a slow count by hand, and every odd file handled or refused in one line."""

import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from k3jax import ModelConfig
from k3jax.vision.image import MAX_PIXELS, file_grid, preprocess, resized

DATA = Path(__file__).parents[1] / "data"
SIZES = json.loads((DATA / "kimi_k3" / "image_size_examples.json").read_text())
VISION = ModelConfig.from_hf(DATA / "kimi_k3").vision
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("case", SIZES, ids=lambda case: f"{case['w']}x{case['h']}")
def test_released_sizes(case):
    new, padded = resized(case["w"], case["h"])
    assert new == (case["new_w"], case["new_h"]) and list(padded) == case["padded"]
    assert (padded[0] - new[0], padded[1] - new[1]) == (case["pad_w"], case["pad_h"])
    t, h, w = case["grid"]
    assert (1, padded[1] // 14, padded[0] // 14) == (t, h, w) and h * w == case["patches"] == 4 * case["tokens"]


def test_there_are_nineteen():
    assert len(SIZES) == 19


def pixels(patches):
    """The padded picture uint8 [H,W,3] that patches of one frame were cut from."""
    _, h, w = patches.grid
    x = patches.values.reshape(h, w, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(h * 14, w * 14, 3)
    x = (x.astype(np.float64) / 2 + 0.5) * 255
    np.testing.assert_allclose(x, np.round(x), atol=1e-4)
    return np.round(x).astype(np.uint8)


def random(h, w, c=3):
    return RNG.integers(0, 256, (h, w, c), np.uint8)


def test_an_array_is_padded_and_cut_row_by_row():
    array = random(37, 53)
    patches = preprocess(array, VISION)
    assert patches.grid == (1, 4, 4) and patches.values.shape == (16, 3, 14, 14) and patches.values.dtype == np.float32
    found = pixels(patches)
    np.testing.assert_array_equal(found[:37, :53], array)
    assert not found[37:].any() and not found[:, 53:].any()
    # Patch 5 is row 1, column 1, channels first.
    np.testing.assert_allclose(patches.values[5, 2], array[14:28, 14:28, 2] / 255 * 2 - 1, atol=1e-6)


def test_large_ones_shrink():
    patches = preprocess(np.full((40, 8192, 3), 200, np.uint8), VISION)
    assert patches.grid == (1, 4, 512)
    assert (pixels(patches)[:35] == 200).all()


def test_transparency_lies_over_a_chessboard():
    array = random(20, 28, 4)
    array[:4, :, 3], array[4:8, :, 3] = 0, 255
    found = pixels(preprocess(array, VISION))
    for y, x in np.ndindex(20, 28):
        board = 255 if (y // 8 + x // 8) % 2 == 0 else 180
        alpha = int(array[y, x, 3])
        assert found[y, x].tolist() == [(int(c) * alpha + board * (255 - alpha)) // 255 for c in array[y, x, :3]]
    assert not found[20:].any()


def test_clips():
    frames = [random(30, 30) for _ in range(3)]
    clip = preprocess(frames, VISION)
    assert clip.grid == (3, 4, 4) and len(clip.values) == 48
    np.testing.assert_array_equal(clip.values[16:32], preprocess(frames[1], VISION).values)
    np.testing.assert_array_equal(clip.values, preprocess(np.stack(frames), VISION).values)
    with pytest.raises(ValueError, match="clip: found 5 frames, must be 1 to init_pos_emb_time=4"):
        preprocess([frames[0]] * 5, VISION)
    with pytest.raises(ValueError, match="clip: found 0 frames"):
        preprocess([], VISION)
    with pytest.raises(ValueError, match="clip: found frames of 20x30 and 30x30 pixels, must be of one size"):
        preprocess([frames[0], frames[1][:, :20]], VISION)


# ---- files -----------------------------------------------------------------------------------------


def saved(tmp_path, image, name="image.png", **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth=8, colours=2, data=b"", extra=b""):
    """A PNG whose header says so; its pixels are `data`."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def test_a_file_is_its_array(tmp_path):
    array = random(30, 40)
    path = saved(tmp_path, Image.fromarray(array))
    np.testing.assert_array_equal(preprocess(path, VISION).values, preprocess(array, VISION).values)
    np.testing.assert_array_equal(preprocess(Image.fromarray(array), VISION).values, preprocess(array, VISION).values)
    assert file_grid(path, VISION) == preprocess(str(path), VISION).grid == (1, 4, 4)


def test_gray_and_one_channel(tmp_path):
    array = random(28, 28, 1)
    expected = preprocess(np.repeat(array, 3, axis=2), VISION).values
    for image in (array, array[..., 0], saved(tmp_path, Image.fromarray(array[..., 0]))):
        np.testing.assert_array_equal(preprocess(image, VISION).values, expected)


def test_cmyk(tmp_path):
    image = Image.new("CMYK", (28, 28), (255, 0, 0, 0))
    found = pixels(preprocess(saved(tmp_path, image, "cmyk.jpg", quality=100), VISION))
    assert np.abs(found.astype(int) - [0, 255, 255]).max() <= 2
    assert (pixels(preprocess(image, VISION)) == [0, 255, 255]).all()


def test_palette_with_transparency(tmp_path):
    image = Image.new("P", (28, 28), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((9, 0), 0)
    path = saved(tmp_path, image, transparency=1)  # blue is not there
    found = pixels(preprocess(path, VISION))
    assert found[0, 9].tolist() == [255, 0, 0]
    assert found[0, 0].tolist() == [255] * 3 and found[0, 8].tolist() == [180] * 3


def test_sixteen_bits_keep_the_upper_eight(tmp_path):
    array = RNG.integers(0, 2**16, (28, 28), np.uint16)
    expected = np.repeat((array >> 8).astype(np.uint8)[..., None], 3, axis=2)
    for image in (array, Image.fromarray(array), saved(tmp_path, Image.fromarray(array))):
        np.testing.assert_array_equal(pixels(preprocess(image, VISION)), expected)
    rows = b"".join(b"\0" + struct.pack(">84H", *([0x1234, 0xABCD, 0x00FF] * 28)) for _ in range(28))
    (tmp_path / "rgb16.png").write_bytes(png(28, 28, depth=16, data=rows))
    assert (pixels(preprocess(tmp_path / "rgb16.png", VISION)) == [0x12, 0xAB, 0x00]).all()


def test_exif_orientation(tmp_path):
    array = random(14, 42)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    path = saved(tmp_path, Image.fromarray(array), exif=exif)
    assert file_grid(path, VISION) == preprocess(path, VISION).grid == (1, 4, 2)
    np.testing.assert_array_equal(pixels(preprocess(path, VISION))[:42, :14], np.rot90(array, -1))


def test_twenty_thousand_pixels_wide(tmp_path):
    path = saved(tmp_path, Image.new("RGB", (20000, 30), (10, 200, 30)))
    patches = preprocess(path, VISION)
    assert patches.grid == file_grid(path, VISION) == (1, 2, 512)
    assert (pixels(patches)[:10] == [10, 200, 30]).all()


@pytest.mark.parametrize("height", [4000, 20000])
def test_a_decompression_bomb_is_refused_from_its_header(tmp_path, height, monkeypatch):
    """Below and above where Pillow itself stops; its pixels are never there."""
    (tmp_path / "bomb.png").write_bytes(png(20000, height))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("pixels were read"))
    for read in (preprocess, file_grid):
        with pytest.raises(ValueError, match=rf"bomb.png: found .*{MAX_PIXELS:,}.*; make it smaller"):
            read(tmp_path / "bomb.png", VISION)


@pytest.mark.parametrize("name, options", [("a.png", {}), ("a.jpg", {"quality": 95}), ("a.webp", {"lossless": True})])
def test_truncated(tmp_path, name, options):
    path = saved(tmp_path, Image.fromarray(random(60, 60)), name, **options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(ValueError, match=rf"^{path}: .+") as error:
        preprocess(path, VISION)
    assert "\n" not in str(error.value)


def test_nothing_at_all(tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "zero.png").write_bytes(png(0, 0))
    for name, message in {
        "missing.png": "no such file",
        "empty.png": "not an image of a known format",
        "text.png": "not an image of a known format",
        "zero.png": "(found 0x0 pixels, must be at least 1x1|not an image of a known format)",
        ".": "is a folder, must be an image",
    }.items():
        with pytest.raises(ValueError, match=rf"^{tmp_path / name}: {message}"):
            preprocess(tmp_path / name, VISION)
    for image in (np.zeros((0, 0, 3), np.uint8), np.zeros((5, 0, 3), np.uint8), Image.new("RGB", (0, 0))):
        with pytest.raises(ValueError, match="^image: found 0x[05] pixels, must be at least 1x1"):
            preprocess(image, VISION)


def test_animated(tmp_path):
    frames = [Image.fromarray(random(28, 28)) for _ in range(3)]
    for name in ("a.gif", "a.png", "a.webp"):
        path = saved(tmp_path, frames[0], name, save_all=True, append_images=frames[1:])
        for read in (preprocess, file_grid):
            with pytest.raises(ValueError, match=rf"{path}: found 3 frames; give the frames of a clip as images"):
                read(path, VISION)
    # A camera's second picture belongs to the first.
    path = saved(tmp_path, frames[0], "a.mpo", save_all=True, append_images=frames[1:])
    assert preprocess(path, VISION).grid == (1, 2, 2)


@pytest.mark.parametrize(
    "image, message",
    [
        (np.zeros((4, 4, 2), np.uint8), r"image: found an array \[4, 4, 2\], must be \[H,W\] or"),
        (np.zeros((4, 4, 3)), "image: found an array of float64, must be uint8 or uint16"),
        (3, "image: found int, must be a path, a PIL image or an array"),
        (Image.new("F", (4, 4)), "image: found mode F, whose numbers are no colours"),
        (Image.new("I", (4, 4)), "image: found mode I, whose numbers are no colours"),
    ],
)
def test_what_is_no_image(image, message):
    with pytest.raises(ValueError, match=message):
        preprocess(image, VISION)


def test_a_compressed_text_bomb_is_one_line(tmp_path):
    (tmp_path / "a.png").write_bytes(png(28, 28, extra=chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 2**27))))
    with pytest.raises(ValueError, match="a.png: .+"):
        preprocess(tmp_path / "a.png", VISION)


def test_bytes_of_a_picture_in_memory_are_opened_by_pillow():
    file = io.BytesIO()
    Image.fromarray(random(28, 28)).save(file, "PNG")
    with pytest.raises(ValueError, match="image: found BytesIO"):
        preprocess(file, VISION)
    assert preprocess(Image.open(file), VISION).grid == (1, 2, 2)
