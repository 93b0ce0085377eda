"""A checkpoint folder as it lies on disk: index, shard headers, and everything wrong with them."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import os
import re
import stat
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

import numpy as np

from k3jax import strict_json
from k3jax.config import ModelConfig
from k3jax.dialects import released_name
from k3jax.hf.names import DTYPES, FLOATS, Leaf, table
from k3jax.paths import check_kind, expand

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; what the safetensors library reads, too
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # what programs keep weights in
_BUFFER = ".rotary_emb.inv_freq"  # that a program once computed and kept; nothing here is rotated
_DTYPE = re.compile(r"(?:BOOL|(?:F|BF|U|I|C)(\d+)(?:_\w+)?)")  # such as BF16, U8, F8_E4M3


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; one line that names the file or tensor."""


class Header(NamedTuple):
    """What a shard says about one tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * bits(self.dtype) // 8


class Shard:
    """An open shard: its header is read and checked, its data is read by byte range.

    Raises `ValueError` saying what is wrong with the header, and `OSError`.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # what is no file is not waited for
        weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file")
        self.identity = (path.name, status.st_size, status.st_mtime_ns)
        self.headers, self.begins = self._read_header(status.st_size)

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fills `out` with the data that begins at byte `begin` of the file."""
        while out.nbytes:
            try:
                count = os.preadv(self._file, [out], begin)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
            if not count:
                raise CheckpointError(
                    f"{self.path}: ends {out.nbytes} bytes early; it was cut short since it was opened"
                )
            begin, out = begin + count, out[count:]

    def _read_header(self, size: int) -> tuple[dict[str, Header], dict[str, int]]:
        """Header and first byte in the file of every tensor."""
        length = int.from_bytes(os.pread(self._file, 8, 0), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"header length {length:,} in a file of {size:,} bytes")
        text = bytearray(length)
        self.read_into(8, memoryview(text))
        tensors = strict_json.loads(text)
        if not isinstance(tensors, dict):
            raise ValueError("the header is not a JSON object")
        tensors.pop("__metadata__", None)
        headers, places = {}, []
        for found, entry in tensors.items():
            name = released_name(found)
            if name in headers:
                raise ValueError(f"{name} is listed twice, under another name too")
            headers[name], begin, end = _entry(found, entry)
            places.append((begin, end, name))
        reached, before = 0, "the header"
        for begin, end, name in sorted(places):
            if begin != reached:
                how = "overlaps" if begin < reached else f"leaves {begin - reached} bytes unused after"
                raise ValueError(f"{name} {how} {before}")
            reached, before = end, name
        if 8 + length + reached != size:
            raise ValueError(f"the tensors end at byte {8 + length + reached:,} in a file of {size:,} bytes")
        return headers, {name: 8 + length + begin for begin, _, name in places}


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a folder's tensors, by their released names, and what is wrong by tensor or shard name. Data stays on disk.

    `ignored`: what lies in the same shards and is not part of the checkpoint, and why.
    """

    path: Path
    index: dict
    weight_map: dict[str, str]  # tensor -> shard
    shards: dict[str, Shard]
    headers: dict[str, Header]
    problems: dict[str, str]
    ignored: dict[str, str]

    def read(self, spans: Iterable[tuple[str, int, int]], out: np.ndarray) -> None:
        """Fills `out`, C-contiguous, with the bytes of spans (tensor, first byte, bytes)."""
        rest = memoryview(out.reshape(-1).view(np.uint8))
        for name, first, count in spans:
            shard = self.shards[self.weight_map[name]]
            shard.read_into(shard.begins[name] + first, rest[:count])
            rest = rest[count:]

    def tensor(self, name: str) -> np.ndarray:
        """One whole tensor of a type that Kimi models store, in that type."""
        header = self.headers[name]
        out = np.empty(header.shape, DTYPES[header.dtype])
        self.read([(name, 0, header.bytes)], out)
        return out

    @property
    def fingerprint(self) -> str:
        """Equal for the same headers in the same, unchanged files."""
        digest = hashlib.sha256()
        for name in sorted(self.shards):
            shard = self.shards[name]
            digest.update(repr((shard.identity, sorted(shard.begins.items()), sorted(shard.headers.items()))).encode())
        return digest.hexdigest()


def open_checkpoint(path: str | Path, wanted: Container[str] | None = None) -> Checkpoint:
    """Reads a folder's index and every shard's header; without an index, those of `model.safetensors`.

    The index alone says which tensors there are and where: others in its shards, and copies elsewhere, are `ignored`. Shards
    that hold none of the `wanted` tensors are left alone; None wants all. Raises `CheckpointError` if neither index nor
    `model.safetensors` can be read; what is wrong with shards is collected in `problems`.
    """
    path = Path(expand(path))
    index = _read_index(path)
    listed = _by_released_name(path, index["weight_map"]) if index else None
    weight_map = {name: shard for name, shard in (listed or {}).items() if wanted is None or name in wanted}
    headers: dict[str, Header] = {}
    shards: dict[str, Shard] = {}
    problems: dict[str, str] = {}
    ignored: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())) if index else [SINGLE]:
        if problem := misplaced(path, shard):
            problems[shard] = problem
            continue
        try:
            with _no_collection():
                shards[shard] = Shard(path / shard)
        except FileNotFoundError:
            problems[shard] = "the index names this shard, but there is no such file"
        except (OSError, ValueError) as error:
            problems[shard] = f"the shard is cut short or damaged ({error}); fetch it again"
        else:
            for name, header in shards[shard].headers.items():
                home = shard if listed is None else listed.get(name)
                if home == shard and not name.endswith(_BUFFER):
                    weight_map[name], headers[name] = shard, header
                elif home == shard:
                    weight_map.pop(name, None)
                    ignored[name] = f"in {shard}, a buffer that the model does not use"
                elif home is None:
                    ignored[name] = f"in {shard}, but not in the index"
                else:
                    ignored[name] = f"in {shard}, but the index says {home}"
    for name, shard in weight_map.items():
        if name not in headers and shard in shards:
            problems[name] = f"the index says {shard}, which does not hold it"
    return Checkpoint(path, index, weight_map, shards, headers, problems, ignored)


def check(cfg: ModelConfig, checkpoint: Checkpoint, of: ModelConfig | None = None) -> dict[str, str]:
    """Everything wrong with a checkpoint of this model, by tensor or shard name; from headers only.

    A prefix of a model is checked in the checkpoint `of` the whole, whose other tensors do not matter.
    """
    problems = dict(checkpoint.problems)
    headers, shard_of = checkpoint.headers, checkpoint.weight_map
    known = set()
    for leaf in stored_table(cfg, checkpoint):
        expected = Header(leaf.dtype, leaf.stored)
        for repeat in range(leaf.repeats):
            names = leaf.names(repeat)
            known.update(names)
            for name in names:
                found = headers.get(name)
                if found == expected or name in problems or shard_of.get(name) in problems:
                    continue
                if found is None:
                    problems[name] = checkpoint.ignored.get(name, f"missing; expected {expected}")
                else:
                    problems[name] = f"found {found}, expected {expected}"
    if of is not None:
        known |= released_names(of)
    for name in headers.keys() - known - problems.keys():
        if headers[name].bytes:  # else without values, as other programs keep of parts of width 0
            problems[name] = "not a tensor of this model"
    return problems


def stored_table(cfg: ModelConfig, checkpoint: Checkpoint) -> list[Leaf]:
    """The table of a model whose floats have the types that a checkpoint stores: BF16 as released, or F32, by leaf."""
    leaves = []
    for leaf in table(cfg):
        found = checkpoint.headers.get(leaf.name(0, 0))
        floats = found is not None and found.dtype in FLOATS and leaf.dtype in FLOATS
        leaves.append(replace(leaf, dtype=found.dtype) if floats else leaf)
    return leaves


def released_names(cfg: ModelConfig) -> set[str]:
    """Names of all tensors of a model."""
    return {name for leaf in table(cfg) for repeat in range(leaf.repeats) for name in leaf.names(repeat)}


def describe(problems: dict[str, str], limit: int = 10, what: str = "problem") -> str:
    """All problems, or what else is listed so, in one line; those of tensors whose names differ in numbers alone are one, and
    beyond `limit` a number."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, problem in sorted(problems.items()):
        groups.setdefault((re.sub(r"\.\d+\.", ".*.", name), problem), []).append(name)
    lines = [
        f"{names[0]}: {problem}" if len(names) == 1 else f"{pattern} ({len(names)} of them): {problem}"
        for (pattern, problem), names in groups.items()
    ]
    count = len(problems)
    more = [f"and {len(lines) - limit} more kinds"] if len(lines) > limit else []
    return f"{count} {what}{'s'[: count != 1]}: " + "; ".join(lines[:limit] + more)


def beside(checkpoint: Checkpoint) -> dict[str, str]:
    """Files of weights in the folder that the checkpoint does not consist of, and why."""
    used = set(checkpoint.index["weight_map"].values()) if checkpoint.index else {SINGLE}
    names = sorted(path.name for path in checkpoint.path.iterdir() if path.suffix in _WEIGHTS)
    why = "not named by the index" if checkpoint.index else f"beside {SINGLE}, without an index"
    return {name: why for name in names if name not in used}


def misplaced(folder: Path, shard: str) -> str | None:
    """What is wrong with where a shard lies: it must be in its folder, or in the cache of the hub that this is part of."""
    if not inside(shard):
        return "the index names a path outside the folder; shards must lie beside the index"
    if not shard.endswith(".safetensors"):
        return "not a .safetensors file; nothing else is read"
    folder = Path(os.path.realpath(folder))
    file = Path(os.path.realpath(folder / shard))
    # <repository>/snapshots/<revision>/* are links to <repository>/blobs/*
    blobs = folder.parents[1] / "blobs" if len(folder.parents) > 1 and folder.parent.name == "snapshots" else None
    if file.is_relative_to(folder) or file.parent == blobs:
        return None
    return "a link out of the folder; copy the shard into it"


def inside(shard: str) -> bool:
    """Whether a shard name stays in its folder, on any system."""
    parts = PureWindowsPath(shard)  # splits at both kinds of slash
    return bool(parts.parts) and not parts.anchor and ".." not in parts.parts


@cache
def bits(dtype: str) -> int:
    """Width of a safetensors type such as BF16, U8 or F8_E4M3; BOOL is a byte."""
    found = _DTYPE.fullmatch(dtype)
    if not found:
        raise ValueError(f"unknown type {dtype!r}")
    return int(found[1] or 8)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No search for garbage, of which a header has none: with a million new objects it takes half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _entry(name: str, entry: object) -> tuple[Header, int, int]:
    """(header, begin, end) of a tensor in a shard's header."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(isinstance(size, int) and size >= 0 for size in shape) and 0 <= begin <= end
        ):
            header = Header(dtype, tuple(shape))
        case _:
            raise ValueError(f"{name}: not a dtype, shape and data_offsets: {entry!r:.80}")
    if end - begin != header.bytes:
        raise ValueError(f"{name}: {end - begin} bytes for {header}")
    return header, begin, end


def _by_released_name(path: Path, weight_map: dict[str, str]) -> dict[str, str]:
    found = {released_name(name): shard for name, shard in weight_map.items()}
    if len(found) < len(weight_map):
        twice, _ = Counter(map(released_name, weight_map)).most_common(1)[0]
        raise CheckpointError(f"{path / INDEX}: {twice} is listed twice, under another name too")
    return found


def _read_index(path: Path) -> dict:
    """Content of the index, or {} for a folder with a single shard and no index."""
    file = path / INDEX
    check_kind(file)
    try:
        index = strict_json.loads(file.read_bytes())
    except FileNotFoundError:
        if (path / SINGLE).is_file():
            return {}
        raise CheckpointError(f"{path}: found neither {INDEX} nor {SINGLE}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{file}: 'weight_map' must map every tensor name to a shard name")
    if not isinstance(index.get("metadata", {}), dict):
        raise CheckpointError(f"{file}: 'metadata' must be a JSON object")
    return index
