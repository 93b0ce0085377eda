"""Arrays in pieces: boxes of an array, and the byte ranges of released tensors that a box of a leaf is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from k3jax.hf.names import DTYPES, Leaf

PIECE_BYTES = 2**26  # of what is read and written at a time

Box = tuple[slice, ...]  # a start and a stop on every axis


@dataclass(frozen=True)
class Pieced:
    """An array that is read box by box; boxes of the grid `piece` are cheap to read.

    Example:
        >>> x = np.arange(6).reshape(2, 3)
        >>> Pieced(x.shape, x.dtype, (1, 3), lambda box: x[box]).read((slice(1, 2), slice(0, 3)))
        array([[3, 4, 5]])
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    piece: tuple[int, ...]
    read: Callable[[Box], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def boxes(self) -> Iterator[Box]:
        return boxes(self.shape, self.piece)


def boxes(shape: Sequence[int], piece: Sequence[int]) -> Iterator[Box]:
    """The boxes of a regular grid, in the order of their values; the last of an axis may be smaller."""
    axes = (
        [slice(i, min(i + step, size)) for i in range(0, size, step)] for size, step in zip(shape, piece, strict=True)
    )
    return itertools.product(*axes)


def piece_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The largest piece of at most `PIECE_BYTES` that is whole on the last axes, so that its values lie together.

    Where an axis is cut, a divisor of its size is taken if one is not far below what fits: meshes split in divisors.

    Example:
        >>> piece_shape((22, 896, 3072, 1792), 1)
        (1, 8, 3072, 1792)
    """
    piece = list(shape)
    for axis, size in enumerate(shape):
        one = itemsize * math.prod(shape[axis + 1 :])
        if one * size <= PIECE_BYTES:
            break
        most = max(1, PIECE_BYTES // one)
        piece[axis] = next((n for n in range(most, most // 2, -1) if size % n == 0), most)
        if most > 1:
            break
    return tuple(piece)


def sizes(box: Box) -> tuple[int, ...]:
    """Shape of what a box holds."""
    return tuple(part.stop - part.start for part in box)


def spans(leaf: Leaf, box: Box) -> Iterator[tuple[str, int, int]]:
    """(released tensor, first byte, bytes) of a box of a leaf: the stored bytes of its values, in their order.

    Example:
        >>> next(spans(leaf, (slice(0, 1), slice(5, 6), slice(8, 16), slice(0, 16))))
        ('language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight_packed', 128, 128)
    """
    axes = list(box)
    repeats = axes.pop(0) if leaf.layers else slice(0, 1)
    experts = axes.pop(0) if leaf.experts else slice(0, 1)
    starts, length = _runs(leaf.shape, axes)
    itemsize = DTYPES[leaf.dtype].itemsize
    for r in range(repeats.start, repeats.stop):
        for e in range(experts.start, experts.stop):
            name = leaf.name(r, e)
            for start in starts:
                yield name, start * itemsize, length * itemsize


def _runs(shape: Sequence[int], box: Sequence[slice]) -> tuple[list[int], int]:
    """First elements, and the common length, of the runs in C order that a box consists of."""
    cut = len(shape)  # axes from here on are whole
    while cut and sizes(box[cut - 1 : cut]) == (shape[cut - 1],):
        cut -= 1
    if not cut:
        return [0], math.prod(shape)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(cut)]
    starts = np.array(box[cut - 1].start * strides[-1])
    for part, stride in zip(reversed(box[: cut - 1]), reversed(strides[:-1]), strict=True):
        starts = np.add.outer(np.arange(part.start, part.stop) * stride, starts)
    return starts.reshape(-1).tolist(), sizes(box[cut - 1 : cut])[0] * strides[-1]
