"""What benchmarks share: times taken in turn, tables of text, the machine and the report file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from tqdm import tqdm

Name = TypeVar("Name", bound=Hashable)
TIMED = 3  # calls of a round
progress = partial(tqdm, disable=None, leave=False)  # a line on stderr where that is a terminal


class Time(NamedTuple):
    seconds: float  # median of all rounds
    spread_seconds: float  # between the quartiles


def interleaved(calls: Mapping[Name, Callable[[], Any]], repeats: int, title: str) -> dict[Name, Time]:
    """Times calls in `repeats` rounds, so that what disturbs the machine disturbs all of them alike.

    A round makes every call once untimed and then `TIMED` times, each until its arrays are ready. The untimed one takes
    back the memory that its neighbour returned to the system, which is slow. `title` names the progress line.

    Example:
        >>> interleaved({"sum": lambda: x.sum(), "copy": lambda: x.copy()}, 9, "sums")["sum"].seconds
        0.0021
    """
    taken = {name: [] for name in calls}
    for name in progress(list(calls) * repeats, title):
        jax.block_until_ready(calls[name]())
        for _ in range(TIMED):
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            taken[name].append(time.perf_counter() - start)
    quartiles = {name: np.percentile(seconds, (25, 50, 75)).tolist() for name, seconds in taken.items()}
    return {name: Time(middle, high - low) for name, (low, middle, high) in quartiles.items()}


def machine() -> dict[str, Any]:
    """What the times belong to."""
    device = jax.devices()[0]
    names = {"jax": jax.__version__, "backend": device.platform, "device": device.device_kind}
    return names | {"devices": jax.device_count(), "cpus": os.cpu_count()}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned text, the first column to the left. A row of two is a name and a remark of any length.

    Example:
        >>> print(table([("name", "ms", "ratio"), ("a", "2", "1.0"), ("b", "out of memory")]))
        name  ms  ratio
        a      2    1.0
        b     out of memory
    """
    columns = zip(*(row for row in rows if len(row) > 2), strict=True)
    widths = [max(map(len, column)) for column in columns]
    widths[0] = max(len(row[0]) for row in rows)
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line) for line in lines)


def write_json(path: str | Path, report: Mapping[str, Any]) -> None:
    """Writes the whole file or, where that fails, none."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)
