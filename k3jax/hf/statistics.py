"""Statistics of one tensor, read in pieces: of values, or of the codes and scales of packed ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from k3jax.config import ModelConfig
from k3jax.dialects import released_name
from k3jax.hf.files import CheckpointError, open_checkpoint
from k3jax.hf.names import DTYPES, NAN_SCALE
from k3jax.hf.pieces import Pieced, piece_shape, sizes

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BAR = 40  # characters of the longest


def tensor_report(path: str | Path, name: str) -> str:
    """Statistics of one tensor of a released checkpoint; of a packed one, or its scale, those of both.

    Raises `CheckpointError` if there is no such tensor, or if it is of a type that Kimi models do not store.

    Example:
        >>> print(tensor_report("checkpoint", "language_model.model.norm.weight").splitlines()[-1])
        zeros       0 of 7,168, not finite 0
    """
    ModelConfig.from_hf(path)  # says what is wrong with a folder that is no checkpoint
    name = released_name(name)
    both = {name}
    for one, other in (("_packed", "_scale"), ("_scale", "_packed")):
        if name.endswith(f".weight{one}"):
            both.add(name.removesuffix(one) + other)
    checkpoint = open_checkpoint(path, both)
    if name not in checkpoint.headers:
        damaged = checkpoint.problems.get(
            checkpoint.weight_map.get(name, name), "no such tensor; `inspect` without --tensor lists parts"
        )
        raise CheckpointError(f"{path}: {name}: {damaged}")
    lines = []
    for part in sorted(both & checkpoint.headers.keys()):
        header = checkpoint.headers[part]
        if header.dtype not in DTYPES:
            raise CheckpointError(f"{path}: {part}: found {header}, must be one of {', '.join(DTYPES)}")
        dtype = DTYPES[header.dtype]

        def read(box, part=part, header=header, dtype=dtype):
            out = np.empty(sizes(box), dtype)
            first = box[0].start * dtype.itemsize * math.prod(header.shape[1:]) if box else 0
            checkpoint.read([(part, first, out.nbytes)], out)
            return out

        limit = (max(1, piece_shape(header.shape, dtype.itemsize)[0]), *header.shape[1:]) if header.shape else ()
        lines += [
            f"tensor      {part}",
            f"stored      {header} in {checkpoint.weight_map[part]}, {header.bytes:,} bytes",
        ]
        lines += describe(Pieced(header.shape, dtype, limit, read), part)
    return "\n".join(lines)


def describe(array: Pieced, name: str) -> list[str]:
    """Lines about an array: a histogram for bytes whose name says that they are codes or scales, else moments."""
    if array.dtype == np.uint8:
        counts = np.zeros(256, np.int64)
        for box in array.boxes():
            counts += np.bincount(array.read(box).reshape(-1), minlength=256)
        return _scales(counts) if name.endswith("_scale") else _codes(counts)
    return _moments(array)


def _moments(array: Pieced) -> list[str]:
    """Lines about numbers; sums are float64, moments those of what is finite."""
    count = zeros = strange = 0
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    for box in array.boxes():
        block = array.read(box).astype(np.float64).reshape(-1)
        finite = block[np.isfinite(block)]
        count, strange = count + block.size, strange + block.size - finite.size
        zeros += int(np.count_nonzero(finite == 0))
        if finite.size:
            low, high = min(low, finite.min()), max(high, finite.max())
            total, squares = total + finite.sum(), squares + np.square(finite).sum()
    good = count - strange
    mean = total / good if good else math.nan
    deviation = math.sqrt(max(squares / good - mean**2, 0.0)) if good else math.nan
    return [
        f"range       {low:.6g} to {high:.6g}",
        f"mean        {mean:.6g}, standard deviation {deviation:.6g}",
        f"zeros       {zeros:,} of {count:,}, not finite {strange:,}",
    ]


def _codes(counts: np.ndarray) -> list[str]:
    """Lines about bytes of two E2M1 codes: how often each magnitude occurs, and how many are negative."""
    codes = np.zeros(16, np.int64)
    for byte, count in enumerate(counts):
        codes[byte & 15] += count
        codes[byte >> 4] += count
    magnitudes = codes[:8] + codes[8:]
    rows = [(f"{value:g}", int(count)) for value, count in zip(E2M1, magnitudes, strict=True)]
    return [
        f"values      {codes.sum():,} of E2M1, {codes[8:].sum() / max(codes.sum(), 1):.1%} with a minus sign",
        *_bars(rows),
    ]


def _scales(counts: np.ndarray) -> list[str]:
    """Lines about E8M0 bytes: how often each power of two occurs."""
    used = np.flatnonzero(counts)
    rows = [("NaN" if code == NAN_SCALE else f"2^{code - 127}", int(counts[code])) for code in used]
    return [f"scales      {counts.sum():,} of E8M0", *_bars(rows)]


def _bars(rows: list[tuple[str, int]]) -> list[str]:
    total, most = sum(count for _, count in rows) or 1, max((count for _, count in rows), default=1) or 1
    return [
        f"{name:>10}  {count:>16,} {count / total:>6.1%}  {'#' * round(_BAR * count / most)}".rstrip()
        for name, count in rows
    ]
