"""Export of the variable tree as a checkpoint of the released layout."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from k3jax.config import ModelConfig
from k3jax.hf.files import INDEX, CheckpointError, describe
from k3jax.hf.names import DTYPES, NAN_SCALE, Leaf, table, tree_shapes
from k3jax.ops import mx


def save_hf(
    checkpoint_dir: str | Path,
    cfg: ModelConfig,
    variables: dict,
    max_shard_size: int = 5 * 10**9,
    weight_map: dict[str, str] | None = None,
    scale_rule: Literal["even", "floor"] = "even",
) -> None:
    """Writes variables as released: safetensors shards, their index, `config.json`; `load_hf` inverts it.

    Weights are rounded to BF16, to nearest even (float64 by way of float32); those of the float32 tensors to
    float32. If `cfg.quantized_experts`, routed experts are quantised to MXFP4 with `scale_rule`, or written
    through where `variables` holds them packed. Shards hold at most `max_shard_size` bytes of data (a larger
    tensor is alone in its own), and one holds all tensors of a layer where they fit; `weight_map` fixes
    another split by naming each tensor's shard.

    The folder appears whole or not at all. Raises `CheckpointError` if it exists and is not empty, if a leaf
    of `variables` is missing, extra or misshaped, if a weight is NaN or infinite, and if the disk is full.

    Example:
        >>> save_hf("export", cfg, {"params": state.params, "router": state.router})
    """
    destination = Path(checkpoint_dir).absolute()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise CheckpointError(f"{destination}: already exists; choose a new or empty folder")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size: found {max_shard_size}, must be a positive number of bytes")
    flat = flatten_dict(variables)
    leaves = table(cfg)
    _refuse(_tree_problems(cfg, flat), "variables")
    if weight_map is None:
        weight_map = _split(leaves, max_shard_size)
    _refuse(_weight_map_problems(leaves, weight_map), "weight_map")
    total = sum(leaf.count * leaf.tensor_bytes for leaf in leaves)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}

    unfinished = destination.with_name(f".{destination.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        for shard, tensors in _shards(leaves, flat, weight_map, scale_rule):
            save_file(tensors, unfinished / shard, metadata={"format": "pt"})
            # The library makes shards readable by their owner alone; they get what the folder got.
            (unfinished / shard).chmod(unfinished.stat().st_mode & 0o666)
        (unfinished / INDEX).write_text(json.dumps(index, indent=1))
        (unfinished / "config.json").write_text(json.dumps(cfg.to_hf(), indent=1))
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        os.rename(unfinished, destination)
        _sync(destination.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{destination}: writing failed ({error}); {total} bytes of disk are needed; nothing was kept"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refuse(problems: dict[str, str], what: str) -> None:
    if problems:
        raise CheckpointError(f"{what}: {describe(problems)}; nothing was written")


def _tree_problems(cfg: ModelConfig, flat: dict) -> dict[str, str]:
    if cfg.vision and ("params", "vision_tower", "proj") not in flat:
        return {"vision_tower": "missing, but cfg.vision is set; keep what load_hf gave, or set cfg.vision to None"}
    packed = any(path[-1].endswith("_packed") for path in flat)
    expected = tree_shapes(cfg, "packed" if packed else "dequantized")
    problems = {}
    for path, shape in expected.items():
        found = flat.get(path)
        wants = np.uint8 if path[-1].endswith(("_packed", "_scale")) else jnp.floating
        if found is None:
            problems["/".join(path)] = f"missing; expected shape {list(shape)}"
        elif getattr(found, "shape", None) != shape:
            problems["/".join(path)] = f"found shape {list(np.shape(found))}, expected {list(shape)}"
        elif not jnp.issubdtype(found.dtype, wants):
            problems["/".join(path)] = f"found type {found.dtype}, expected {wants.__name__}"
    for path in flat.keys() - expected.keys():
        problems["/".join(path)] = "not a leaf of this model"
    return problems


def _weight_map_problems(leaves: list[Leaf], weight_map: dict[str, str]) -> dict[str, str]:
    names = {name for leaf in leaves for r in range(leaf.repeats) for name in leaf.names(r)}
    problems = dict.fromkeys(names - weight_map.keys(), "missing")
    problems |= dict.fromkeys(weight_map.keys() - names, "not a tensor of this model")
    for shard in set(weight_map.values()):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            problems[shard] = "not the name of a .safetensors file"
    return problems


def _split(leaves: list[Leaf], limit: int) -> dict[str, str]:
    """Layers in order, each begun in a new shard where the open one has no room for all of it."""
    groups = defaultdict(list)  # what belongs to no layer comes first
    for leaf in leaves:
        for r in range(leaf.repeats):
            layer = leaf.layers[r] if leaf.layers and leaf.part != "vision" else -1
            groups[layer] += [(name, leaf.tensor_bytes) for name in leaf.names(r)]
    shards, room = [[]], limit
    for _, group in sorted(groups.items()):
        needed = sum(size for _, size in group)
        for name, size in group:
            if max(size, needed) > room and shards[-1]:
                shards.append([])
                room = limit
            needed = 0  # once begun, a layer goes on in the same shard
            shards[-1].append(name)
            room -= size
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return {name: file for file, names in zip(files, shards, strict=True) for name in names}


def _shards(leaves: list[Leaf], flat: dict, weight_map: dict, scale_rule: str) -> Iterator[tuple[str, dict]]:
    """Each shard's name and tensors, ready to be written."""
    shards = defaultdict(lambda: defaultdict(list))
    for leaf in leaves:
        for r in range(leaf.repeats):
            for e, name in enumerate(leaf.names(r)):
                shards[weight_map[name]][leaf, r].append((e, name))
    for shard, pieces in shards.items():
        tensors = {}
        for (leaf, r), members in pieces.items():
            block = _stored(leaf, r, flat, scale_rule)
            tensors |= {name: block[e] for e, name in members}
        yield shard, tensors


def _stored(leaf: Leaf, repeat: int, flat: dict, scale_rule: str) -> np.ndarray:
    """One layer's tensors of a leaf as stored: [E or 1, *leaf.stored]."""
    copies = leaf.experts or 1
    path = leaf.path
    if path not in flat:  # to be quantised: x_packed and x_scale both come from x
        path = (*path[:-1], path[-1].rpartition("_")[0])
    block = np.asarray(flat[path][repeat] if leaf.layers else flat[path])
    if path != leaf.path:
        finite = np.isfinite(block)
        block = np.asarray((_codes if leaf.is_packed else _scales)(block, scale_rule))
    else:
        with np.errstate(over="ignore"):  # what leaves the range of the stored type is reported below
            block = block.astype(DTYPES[leaf.dtype], copy=False)
        finite = block != NAN_SCALE if leaf.is_scale else np.isfinite(block)
    bad = np.count_nonzero(~finite.reshape(copies, -1), axis=1)
    if bad.any():
        e = int(np.argmax(bad))
        raise CheckpointError(
            f"{leaf.names(repeat)[e]}: {bad[e]} of {finite.size // copies} values are NaN or infinite as "
            f"{leaf.dtype}; see leaf {'/'.join(path)}, nothing was kept"
        )
    block = block.reshape(copies, -1)
    padding = math.prod(leaf.stored) - block.shape[1]
    if padding:
        block = np.pad(block, ((0, 0), (0, padding)))
    return block.reshape(copies, *leaf.stored)


@partial(jax.jit, static_argnums=1)
def _codes(x, scale_rule):
    return mx.pack(mx.quantize(x, "mxfp4", scale_rule)[0])


@partial(jax.jit, static_argnums=1)
def _scales(x, scale_rule):
    return mx.quantize(x, "mxfp4", scale_rule)[1]


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
