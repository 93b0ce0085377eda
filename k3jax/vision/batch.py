"""Images of a batch as arrays of few fixed shapes, and the widening of the tokens that stand for them.

Axis letters: B rows, P patches of a row (a bucket), I images, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax
import jax
import numpy as np

from k3jax.config import ModelConfig, VisionConfig
from k3jax.sharding import filled
from k3jax.vision.image import MAX_GRID, Patches

UNIT = 64  # sizes of buckets are multiples of this


@flax.struct.dataclass
class Images:
    """The images of every row, one after the other, filled up to P patches; what `K3` takes as `pixel_values` in jit.

    The patches of a cell, which become one token, follow each other. Rows split over devices as the tokens do.

    Attributes:
        patches: [B,P,3,p,p] normalised pixels.
        ids: [B,P] int32, the number of a patch's image in its row, from 1; 0 fills up.
        places: [B,P,3] int32, frame, row and column in its image.
        grids: [B,P,3] int32, its image's frames, rows and columns.
        slots: [B,P/cell] int32, the token of its row that a cell is averaged into; -1 fills up.
    """

    patches: Any
    ids: Any
    places: Any
    grids: Any
    slots: Any


def bucket(count: int, unit: int = UNIT) -> int:
    """The smallest of unit * (1, 2, ..., 8, 10, 12, 14, 16, 20, ...) that holds `count`: four sizes an octave.

    Example:
        >>> bucket(1656), bucket(66564)
        (1792, 81920)
    """
    units = max(-(-count // unit), 1)
    step = 2 ** max((units - 1).bit_length() - 3, 0)
    return -(-units // step) * step * unit


def patch_unit(cfg: VisionConfig, devices: int) -> int:
    """The unit of buckets whose cells so many devices can share evenly."""
    return math.lcm(UNIT, cfg.cell * devices)


def tokens_of(grid: Sequence[int], cfg: VisionConfig) -> int:
    """Tokens an image of (frames, rows, columns) patches widens to: the cells of one frame."""
    return int(grid[1]) * int(grid[2]) // cfg.cell


def pack(cfg: VisionConfig, rows: Sequence[Sequence[Patches]], room: int | None = None, unit: int = UNIT) -> Images:
    """The images of each row as one `Images`.

    Args:
        room: P; by default the bucket of the row with most patches.
        unit: of the buckets, see `patch_unit`.

    Raises:
        ValueError: a grid that does not fit the model or its patches, or a row that exceeds `room`.

    Example:
        >>> images = pack(cfg.vision, [[preprocess("a.png", cfg.vision)], []])    # two rows, the second has none
    """
    kh, kw = cfg.merge_kernel_size
    counts = [sum(len(image.values) for image in row) for row in rows]
    room = bucket(max(counts, default=0), unit) if room is None else room
    if max(counts, default=0) > room:
        raise ValueError(f"images: found {max(counts)} patches in a row, must be at most {room}")
    B, p = len(rows), cfg.patch_size
    dtype = np.result_type(np.float32, *(image.values for row in rows for image in row))
    patches = np.zeros((B, room, 3, p, p), dtype)
    ids, slots = np.zeros((B, room), np.int32), np.full((B, room // cfg.cell), -1, np.int32)
    places, grids = np.zeros((B, room, 3), np.int32), np.ones((B, room, 3), np.int32)
    for b, row in enumerate(rows):
        at = token = 0
        for number, (values, grid) in enumerate(row, 1):
            _check_grid(cfg, grid)
            t, h, w = map(int, grid)
            right = (t * h * w, 3, p, p)
            if values.shape != right:
                raise ValueError(f"pixel_values: found shape {values.shape}, must be {right} for {t, h, w}")
            order = np.arange(t * h * w).reshape(t, h // kh, kh, w // kw, kw).transpose(0, 1, 3, 2, 4).reshape(-1)
            here = slice(at, at + t * h * w)
            patches[b, here] = values[order]
            ids[b, here], grids[b, here] = number, (t, h, w)
            places[b, here] = np.stack(np.unravel_index(order, (t, h, w)), axis=-1)
            cells = tokens_of((t, h, w), cfg)
            slots[b, at // cfg.cell : here.stop // cfg.cell] = token + np.arange(t * cells) % cells
            at, token = here.stop, token + cells
    return Images(patches, ids, places, grids, slots)


def enlarged(images: Images, rows: int, room: int, cfg: VisionConfig) -> Images:
    """`images` with empty rows and empty patches, up to `rows` of `room` patches."""
    sizes = {"patches": room, "ids": room, "places": room, "grids": room, "slots": room // cfg.cell}
    empty = {"grids": 1, "slots": -1}
    return Images(**{n: filled(getattr(images, n), (rows, size), empty.get(n, 0)) for n, size in sizes.items()})


def widen(cfg: VisionConfig, tokens, grids, mask=None, segment_ids=None):
    """Repeats every placeholder of tokens [B,T] as often as its image has tokens; images in reading order.

    A row that ends shorter than the longest is filled up with padding, of a token that is no placeholder: on the right
    with `segment_ids` or where its mask ends with padding, else on the left.

    Returns:
        tokens, mask, segment_ids [B,T'] (None where not given and not needed) and images of each row [B], as numpy.

    Raises:
        ValueError: not as many placeholders as images.

    Example:
        >>> widen(cfg.vision, np.array([[1, placeholder, 2]]), [(1, 4, 4)])[0].shape
        (1, 6)
    """
    tokens = np.asarray(tokens)
    is_image = tokens == cfg.media_placeholder_token_id
    if is_image.sum() != len(grids):
        raise ValueError(
            f"tokens: found {is_image.sum()} image placeholders (token {cfg.media_placeholder_token_id}), "
            f"must be {len(grids)}, one an image"
        )
    repeats = np.ones(tokens.shape, np.int64)
    repeats[is_image] = [tokens_of(grid, cfg) for grid in grids]
    lengths = repeats.sum(axis=1)
    if mask is None and segment_ids is None and len(set(lengths)) > 1:
        mask = np.ones(tokens.shape, np.int32)
    right = np.full(len(tokens), segment_ids is not None)
    if mask is not None:
        mask = np.asarray(mask)
        right |= mask[:, -1] == 0

    def wide(array, padding=0):
        if array is None:
            return None
        array = np.asarray(array)
        out = np.full((len(array), max(lengths, default=0)), padding, array.dtype)
        for b, length in enumerate(lengths):
            out[b, slice(length) if right[b] else slice(out.shape[1] - length, None)] = np.repeat(array[b], repeats[b])
        return out

    return wide(tokens, int(cfg.media_placeholder_token_id == 0)), wide(mask), wide(segment_ids), is_image.sum(axis=1)


def prepare(cfg: ModelConfig, tokens, pixel_values, grid_thws, mask=None, segment_ids=None, devices: int = 1):
    """(tokens, mask, segment_ids, `Images`) of released inputs: patches [n,3,p,p], grids [I,3], a placeholder an image.

    On the host: shapes depend on the grids and on where the placeholders are. `devices` share a row (mesh.context *
    mesh.tensor).

    Raises:
        ValueError: a model without vision, arrays traced by JAX, patches or placeholders not as many as the grids say.
    """
    vision = cfg.vision
    if vision is None:
        raise ValueError("pixel_values: this model has no vision (its configuration has no vision_config)")
    if any(isinstance(x, jax.core.Tracer) for x in (tokens, pixel_values, grid_thws, mask, segment_ids)):
        raise ValueError(
            "pixel_values: found an array traced by JAX, whose shapes cannot follow the images; call "
            "`k3jax.vision.prepare` outside of jit and give what it returns"
        )
    if grid_thws is None:
        raise ValueError("grid_thws: found None, must be [images,3] beside pixel_values")
    grids, values = np.asarray(grid_thws), np.asarray(pixel_values)
    if grids.ndim != 2 or grids.shape[1] != 3 or not np.issubdtype(grids.dtype, np.integer):
        raise ValueError(f"grid_thws: found {grids.dtype} of shape {grids.shape}, must be integers [images,3]")
    for grid in grids:
        _check_grid(vision, grid)
    p, ends = vision.patch_size, np.cumsum(np.prod(grids, axis=1))
    right = (int(ends[-1]) if len(ends) else 0, 3, p, p)
    if values.shape != right:
        raise ValueError(f"pixel_values: found shape {values.shape}, must be {right} for these grids")
    tokens, mask, segment_ids, counts = widen(vision, tokens, grids, mask, segment_ids)
    images = [Patches(part, tuple(grid)) for part, grid in zip(np.split(values, ends[:-1]), grids.tolist())]
    firsts = np.cumsum(counts) - counts
    rows = [images[first : first + count] for first, count in zip(firsts, counts)]
    return tokens, mask, segment_ids, pack(vision, rows, unit=patch_unit(vision, devices))


def _check_grid(cfg: VisionConfig, grid) -> None:
    (t, h, w), (kh, kw) = map(int, grid), cfg.merge_kernel_size
    if not 1 <= t <= cfg.init_pos_emb_time:
        raise ValueError(f"grid_thws: found {t} frames, must be 1 to init_pos_emb_time={cfg.init_pos_emb_time}")
    for side, unit in ((h, kh), (w, kw)):
        if not 0 < side <= MAX_GRID or side % unit:
            raise ValueError(f"grid_thws: found {h}x{w} patches, must be multiples of {kh}x{kw} up to {MAX_GRID}")
