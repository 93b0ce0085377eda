"""One image or clip, as a file or an array, to normalised patches as released. Nothing here imports JAX."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from k3jax.config import VisionConfig
from k3jax.paths import check_kind, expand

MAX_GRID = 512  # patches along a side, the reach of the rotary embedding
MAX_PATCHES = 65536  # of an image, about: more is shrunk to it
MAX_PIXELS = 2**26  # of a file, decoded 256 MiB at most; its header is read first
SQUARE = 8  # pixels of the chessboard's squares behind transparent images
LIGHT, DARK = 255, 180


class Patches(NamedTuple):
    """`values` float32 [t*h*w,3,p,p], frame by frame in row-major order; `grid` (t, h, w): frames, rows, columns."""

    values: np.ndarray
    grid: tuple[int, int, int]


def resized(width: int, height: int, patch: int = 14, merge: tuple[int, int] = (2, 2)):
    """((width, height) after shrinking, (width, height) after padding) in pixels, of an image before preprocessing.

    Shrunk until about `MAX_PATCHES` patches remain and `MAX_GRID` along a side, never enlarged; padded to whole cells.

    Example:
        >>> resized(8192, 6144)
        ((4142, 3107), (4144, 3108))
    """
    longest = MAX_GRID * patch
    area = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(MAX_PATCHES / area), longest / width, longest / height)
    new = tuple(min(max(1, int(side * scale)), longest) for side in (width, height))
    units = patch * merge[1], patch * merge[0]
    return new, tuple(-(-side // unit) * unit for side, unit in zip(new, units))


def preprocess(image, cfg: VisionConfig) -> Patches:
    """The patches of an image, or of a clip of up to `init_pos_emb_time` frames of one size.

    Bicubic resize to `resized`, transparent parts over a chessboard, padding with 0 to the right and below,
    (x/255 - 1/2) / (1/2). An EXIF orientation is applied first; 16-bit channels keep their upper 8 bits.

    Args:
        image: path, `PIL.Image.Image`, or array [H,W], [H,W,1], [H,W,3], [H,W,4] of uint8 or uint16. A clip is a list
            or tuple of those, or an array [F,H,W,C].

    Raises:
        ValueError: naming the file: not readable, cut short, animated, without or with too many pixels, of a kind that
            has no colours, or frames of different sizes or too many.

    Example:
        >>> preprocess("cat.png", cfg.vision).grid      # 640 x 480 pixels
        (1, 36, 46)
    """
    clip = isinstance(image, (list, tuple)) or (isinstance(image, np.ndarray) and image.ndim == 4)
    frames = list(image) if clip else [image]
    if not 1 <= len(frames) <= cfg.init_pos_emb_time:
        raise ValueError(f"clip: found {len(frames)} frames, must be 1 to init_pos_emb_time={cfg.init_pos_emb_time}")
    opened = [_open(frame) for frame in frames]
    sizes = {frame.size for frame in opened}
    if len(sizes) > 1:
        found = " and ".join(f"{w}x{h}" for w, h in sorted(sizes))
        raise ValueError(f"clip: found frames of {found} pixels, must be of one size")
    patch = cfg.patch_size
    new, (width, height) = resized(*opened[0].size, patch, cfg.merge_kernel_size)
    values = np.concatenate([_cut(_pixels(frame, new, (width, height)), patch) for frame in opened])
    return Patches(values, (len(frames), height // patch, width // patch))


def file_size(path: str | os.PathLike) -> tuple[int, int]:
    """(width, height) in pixels as it is seen, from the file's header alone."""
    with _opened(path) as image:
        return image.size[:: -1 if image.getexif().get(ExifTags.Base.Orientation, 1) in _LYING else 1]


def checked_size(path: str | os.PathLike) -> tuple[int, int]:
    """`file_size` of an image whose pixels can be read, too."""
    return _open(path).size


def file_grid(path: str | os.PathLike, cfg: VisionConfig) -> tuple[int, int, int]:
    """`preprocess(path, cfg).grid`, from the file's header alone."""
    width, height = resized(*file_size(path), cfg.patch_size, cfg.merge_kernel_size)[1]
    return 1, height // cfg.patch_size, width // cfg.patch_size


_LYING = (5, 6, 7, 8)  # EXIF orientations that exchange width and height


@contextlib.contextmanager
def _opened(path):
    """The image of a file whose header is right; what goes wrong in reading it becomes one line that names the file."""
    path = expand(path)
    check_kind(path)
    try:
        with warnings.catch_warnings():
            # Pillow warns of its own limit, which is above ours.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
        with image:
            _check_size(*image.size)
            # A camera's MPO is a JPEG whose further images belong to the first.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise ValueError(f"found {image.n_frames} frames; give the frames of a clip as images of their own")
            yield image
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder, must be an image") from None
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image of a known format") from None
    except Image.DecompressionBombError:
        raise ValueError(f"{path}: found more than {MAX_PIXELS:,} pixels; make it smaller") from None
    except Exception as error:  # decoders of damaged files raise whatever they stumble over
        raise ValueError(f"{path}: {error}") from error


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ValueError(f"found {width}x{height} pixels, must be at least 1x1")
    if width * height > MAX_PIXELS:
        raise ValueError(f"found {width}x{height} pixels, must be at most {MAX_PIXELS:,}; make it smaller")


def _open(image) -> Image.Image:
    """An image of mode RGB, or RGBA where parts of it may be transparent."""
    if isinstance(image, (str, os.PathLike)):
        with _opened(image) as file:
            return _coloured(ImageOps.exif_transpose(file))
    if isinstance(image, np.ndarray):
        return _from_array(image)
    if isinstance(image, Image.Image):
        try:
            _check_size(*image.size)
            return _coloured(image)
        except (ValueError, OSError) as error:
            raise ValueError(f"image: {error}") from error
    raise ValueError(f"image: found {type(image).__name__}, must be a path, a PIL image or an array")


def _coloured(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"found mode {image.mode}, whose numbers are no colours; convert it to 8 or 16 bits")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _from_array(array: np.ndarray) -> Image.Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise ValueError(f"image: found an array {list(array.shape)}, must be [H,W] or [H,W,C] with C = 1, 3 or 4")
    if array.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"image: found an array of {array.dtype}, must be uint8 or uint16")
    try:
        _check_size(array.shape[1], array.shape[0])
    except ValueError as error:
        raise ValueError(f"image: {error}") from None
    array = (array >> 8).astype(np.uint8) if array.dtype == np.uint16 else array
    return _coloured(Image.fromarray(array[..., 0] if array.ndim == 3 and channels == 1 else array))


def _pixels(image: Image.Image, new: tuple[int, int], padded: tuple[int, int]) -> np.ndarray:
    """uint8 [H,W,3] of the padded size."""
    pixels = np.asarray(image.resize(new, Image.Resampling.BICUBIC))
    if pixels.shape[2] == 4:
        y, x = np.indices(pixels.shape[:2]) // SQUARE
        board = np.where((x + y) % 2 == 0, LIGHT, DARK)[..., None]
        alpha = pixels[..., 3:].astype(np.int64)
        pixels = ((pixels[..., :3] * alpha + board * (255 - alpha)) // 255).astype(np.uint8)
    return np.pad(pixels, ((0, padded[1] - new[1]), (0, padded[0] - new[0]), (0, 0)))


def _cut(pixels: np.ndarray, patch: int) -> np.ndarray:
    """[H,W,3] -> normalised patches [H/p*W/p,3,p,p], row by row."""
    H, W, _ = pixels.shape
    patches = pixels.reshape(H // patch, patch, W // patch, patch, 3).transpose(0, 2, 4, 1, 3)
    return (patches.reshape(-1, 3, patch, patch).astype(np.float32) / 255 - 0.5) / 0.5
