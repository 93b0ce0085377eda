"""A checkpoint folder as it lies on disk: index, shard headers, and everything wrong with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from k3jax.config import ModelConfig
from k3jax.hf.names import table

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; one line that names the file or tensor."""


class Header(NamedTuple):
    """What a shard says about one tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Checkpoint:
    """Headers of a folder's tensors, and what is wrong by tensor or shard name. Data stays on disk."""

    path: Path
    index: dict
    weight_map: dict[str, str]  # tensor -> shard
    shards: dict[str, safe_open]
    headers: dict[str, Header]
    problems: dict[str, str]

    def read(self, name: str) -> np.ndarray:
        """One tensor, as stored."""
        return self.shards[self.weight_map[name]].get_tensor(name)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a folder's index and every shard's header; without an index, those of `model.safetensors`.

    Raises `CheckpointError` if neither can be read; what is wrong with shards is collected in `problems`.
    """
    path = Path(path)
    index = _read_index(path)
    weight_map = dict(index["weight_map"]) if index else {}
    shards: dict[str, safe_open] = {}
    headers: dict[str, Header] = {}
    problems: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())) if index else [SINGLE]:
        if not inside(shard):
            problems[shard] = "the index names a path outside the folder; shards must lie beside the index"
            continue
        try:
            file = safe_open(path / shard, framework="numpy")
        except FileNotFoundError:
            problems[shard] = "the index names this shard, but there is no such file"
        except (OSError, SafetensorError) as error:
            problems[shard] = f"the shard is cut short or damaged ({error}); fetch it again"
        else:
            shards[shard] = file
            names = file.keys()
            for name in names:
                if weight_map.setdefault(name, shard) == shard:
                    tensor = file.get_slice(name)
                    headers[name] = Header(tensor.get_dtype(), tuple(tensor.get_shape()))
    if index:
        for name in headers.keys() - index["weight_map"].keys():
            problems[name] = f"in {weight_map[name]}, but not in the index"
        for name, shard in index["weight_map"].items():
            if name not in headers and shard in shards:
                problems[name] = f"the index says {shard}, which does not hold it"
    return Checkpoint(path, index, weight_map, shards, headers, problems)


def check(cfg: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Everything wrong with a checkpoint of this model, by tensor or shard name; from headers only."""
    problems = dict(checkpoint.problems)
    headers, shard_of = checkpoint.headers, checkpoint.weight_map
    known = set()
    for leaf in table(cfg):
        expected = Header(leaf.dtype, leaf.stored)
        for repeat in range(leaf.repeats):
            names = leaf.names(repeat)
            known.update(names)
            for name in names:
                found = headers.get(name)
                if found == expected or name in problems or shard_of.get(name) in problems:
                    continue
                if found is None:
                    problems[name] = f"missing; expected {expected}"
                else:
                    problems[name] = f"found {found}, expected {expected}"
    for name in headers.keys() - known - problems.keys():
        problems[name] = "not a tensor of this model"
    return problems


def describe(problems: dict[str, str], limit: int = 5) -> str:
    """One line: the first problems and how many there are."""
    lines = [f"{name}: {problem}" for name, problem in sorted(problems.items())]
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return f"{len(lines)} problem{'s'[: len(lines) != 1]}: " + "; ".join(lines[:limit] + more)


def inside(shard: str) -> bool:
    """Whether a shard name stays in its folder, on any system."""
    parts = PureWindowsPath(shard)  # splits at both kinds of slash
    return bool(parts.parts) and not parts.anchor and ".." not in parts.parts


def _read_index(path: Path) -> dict:
    """Content of the index, or {} for a folder with a single shard and no index."""
    file = path / INDEX
    try:
        index = json.loads(file.read_text())
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
