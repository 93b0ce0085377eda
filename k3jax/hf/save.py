"""Export of the variable tree as a checkpoint of the released layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from k3jax.config import ModelConfig
from k3jax.hf.files import CheckpointError, describe
from k3jax.hf.finite import not_finite
from k3jax.hf.layouts import Form
from k3jax.hf.names import DTYPES, Leaf, table, tree_shapes
from k3jax.hf.pieces import PIECE_BYTES, Box, Pieced, piece_shape, sizes, spans
from k3jax.hf.shards import ShardWriter, split
from k3jax.hf.stream import MEMORY, Job, run
from k3jax.lock import locked
from k3jax.ops import mx
from k3jax.paths import expand

SHARD_BYTES = 5 * 10**9


def save_hf(
    checkpoint_dir: str | Path,
    cfg: ModelConfig,
    variables: dict,
    max_shard_size: int = SHARD_BYTES,
    weight_map: dict[str, str] | None = None,
    scale_rule: Literal["even", "floor"] = "even",
    layout: Literal["released", "transformers"] = "released",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    experts: Literal["packed", "bf16"] = "packed",
) -> None:
    """Writes variables as released: safetensors shards, their index, `config.json`; `load_hf` inverts it.

    Weights are rounded to BF16, to nearest even (float64 by way of float32), or kept in float32 with that `dtype`; those of
    the float32 tensors to float32. If `cfg.quantized_experts`, routed experts are quantised to MXFP4 with `scale_rule`, or
    written through where `variables` holds them packed; with `experts="bf16"` as the values that these stand for, of a model
    that says it is not quantised. The `layout` "transformers" is that which its `AutoModelForCausalLM` loads. Shards hold at
    most `max_shard_size` bytes of data (a larger tensor is alone in its own), and one holds all tensors of a layer where
    they fit; `weight_map` fixes another split by naming each tensor's shard.

    Files get their names when all are whole, the index last; until then they end in `.unfinished`. Raises
    `CheckpointError` if the folder exists and is not empty, if a leaf of `variables` is missing, extra or misshaped, if
    a weight is NaN or infinite, and if the disk is full, and `ValueError` for a model that the layout has no words for.

    Example:
        >>> save_hf("export", cfg, {"params": state.params, "router": state.router})
    """
    leaves = {path: _in_memory(leaf) for path, leaf in flatten_dict(variables).items()}
    form = Form(layout, dtype, experts)
    write_released(checkpoint_dir, cfg, leaves, max_shard_size, weight_map, scale_rule, form)


def write_released(
    checkpoint_dir: str | Path,
    cfg: ModelConfig,
    leaves: Mapping[tuple[str, ...], Pieced],
    max_shard_size: int = SHARD_BYTES,
    weight_map: dict[str, str] | None = None,
    scale_rule: Literal["even", "floor"] = "even",
    form: Form = Form(),
    identity: str | None = None,
    memory: int = MEMORY,
    beside: Sequence[Path] = (),
) -> None:
    """`save_hf` of leaves that are read in pieces, of which no more than `memory` bytes are held; `beside`: files to copy.

    With an `identity` of the source, what was written before an error or a kill is kept, and the same call goes on.
    """
    destination = Path(expand(checkpoint_dir)).absolute()
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size: found {max_shard_size}, must be a positive number of bytes")
    form.check()
    config, stored = form.config(cfg), form.table(cfg)
    _refuse(_tree_problems(cfg, leaves), "variables")
    if cfg.quantized_experts and form.experts == "bf16":
        leaves = _unpacked(cfg, leaves, stored, scale_rule)
    if weight_map is None:
        weight_map = split(stored, max_shard_size)
    _refuse(_weight_map_problems(stored, weight_map), "weight_map")
    if identity is not None:
        identity = " ".join((identity, str(max_shard_size), scale_rule, *form))
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination}: already exists; choose a new or empty folder")
    with locked(destination):
        _write(ShardWriter(destination, config, stored, weight_map, identity, beside), stored, leaves, scale_rule, memory)


def _write(
    writer: ShardWriter, stored: list[Leaf], leaves: Mapping[tuple[str, ...], Pieced], scale_rule: str, memory: int
) -> None:
    try:
        writer.begin()
        jobs = _jobs(stored, leaves, writer, scale_rule)
        run(jobs, "export", lambda job: writer.record(job.key), writer.finished.__contains__, memory)
        writer.commit()
    except BaseException as error:
        kept = "the same command goes on from what was written"
        if not writer.resumable:
            writer.abandon()
            kept = "nothing was kept"
        else:
            writer.close()
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{writer.destination}: writing failed ({error.strerror or error}); {writer.total} bytes of disk are needed; {kept}"
            ) from error
        raise


def _in_memory(leaf) -> Pieced:
    """A leaf of any kind of array. One on devices comes to the host by entries of its first axis."""
    shape, dtype = tuple(np.shape(leaf)), np.dtype(getattr(leaf, "dtype", object))
    if isinstance(leaf, jax.Array):
        if len(shape) < 3 or leaf.nbytes <= PIECE_BYTES:  # not stacked, or small
            return Pieced(shape, dtype, shape, lambda box: np.asarray(leaf)[box])
        return Pieced(shape, dtype, (1, *shape[1:]), lambda box: np.asarray(leaf[box[0].start])[None][:, *box[1:]])
    return Pieced(shape, dtype, piece_shape(shape, dtype.itemsize), lambda box: leaf[box])


def _refuse(problems: dict[str, str], what: str) -> None:
    if problems:
        raise CheckpointError(f"{what}: {describe(problems)}; nothing was written")


def _tree_problems(cfg: ModelConfig, flat: Mapping[tuple[str, ...], Pieced]) -> dict[str, str]:
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
        elif found.shape != shape:
            problems["/".join(path)] = f"found shape {list(found.shape)}, expected {list(shape)}"
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


def _jobs(
    stored: list[Leaf], leaves: Mapping[tuple[str, ...], Pieced], writer: ShardWriter, scale_rule: str
) -> Iterator[Job]:
    """Reads, converts and writes every piece of every leaf."""
    for leaf in stored:
        targets, path = [leaf], leaf.path
        if path not in leaves:  # to be quantised: x_packed and x_scale both come from x
            if leaf.is_scale:
                continue
            path = (*path[:-1], path[-1].removesuffix("_packed"))
            targets.append(next(other for other in stored if other.path == (*path[:-1], f"{path[-1]}_scale")))
        source = leaves[path]
        for number, box in enumerate(source.boxes()):
            size = source.dtype.itemsize * int(np.prod(sizes(box)))
            yield Job(f"{leaf.name(0, 0)} {number}", size, partial(_convert, source, box, targets, writer, scale_rule))


def _convert(source: Pieced, box: Box, targets: list[Leaf], writer: ShardWriter, scale_rule: str) -> None:
    block = source.read(box)
    if len(targets) == 1:
        (leaf,) = targets
        with np.errstate(over="ignore"):  # what leaves the range of the stored type is reported
            stored = np.ascontiguousarray(block.astype(DTYPES[leaf.dtype], copy=False))
        _check_finite(leaf, box, stored)
        parts = [(leaf, box, stored)]
    else:
        _check_finite(targets[0], box, block)
        *outer, last = box
        boxes = [(*outer, slice(last.start // n, last.stop // n)) for n in (2, mx.BLOCK)]
        with jax.enable_x64(block.dtype == np.float64):  # of each thread its own
            quantized = _quantize(block, scale_rule)
        parts = zip(targets, boxes, map(np.asarray, quantized), strict=True)
    writer.write(_cut(parts))


def _unpacked(
    cfg: ModelConfig, leaves: Mapping[tuple[str, ...], Pieced], stored: list[Leaf], scale_rule: str
) -> dict[tuple[str, ...], Pieced]:
    """The leaves of a quantised model with each routed expert as the values that its MXFP4 stands for, which bfloat16 holds."""
    unpacked = dict(leaves)
    by_path = {leaf.path: leaf for leaf in stored}
    for leaf in table(cfg):
        if not leaf.is_packed:
            continue
        path = (*leaf.path[:-1], leaf.path[-1].removesuffix("_packed"))
        if leaf.path in leaves:
            codes, scales = (unpacked.pop((*path[:-1], f"{path[-1]}_{part}")) for part in ("packed", "scale"))
            rows, read = codes.piece[:-1], partial(_values, codes, scales)
        else:
            rows, read = leaves[path].piece[:-1], partial(_rounded, leaves[path], by_path[path], scale_rule)
        shape = by_path[path].tree_shape
        unpacked[path] = Pieced(shape, DTYPES["BF16"], (*rows, shape[-1]), read)  # rows hold whole blocks
    return unpacked


def _values(codes: Pieced, scales: Pieced, box: Box) -> np.ndarray:
    parts = (array.read((*box[:-1], slice(0, array.shape[-1]))) for array in (codes, scales))
    return np.asarray(_dequantize(*parts))


def _rounded(source: Pieced, leaf: Leaf, scale_rule: str, box: Box) -> np.ndarray:
    block = source.read(box)
    _check_finite(leaf, box, block)
    with jax.enable_x64(block.dtype == np.float64):
        return np.asarray(_dequantize(*_quantize(block, scale_rule)))


def _cut(parts: Iterable[tuple[Leaf, Box, np.ndarray]]) -> Iterator[tuple[str, int, memoryview]]:
    """Boxes of stored values as bytes of tensors."""
    for leaf, box, values in parts:
        rest = memoryview(values.reshape(-1).view(np.uint8))
        for name, first, count in spans(leaf, box):
            yield name, first, rest[:count]
            rest = rest[count:]


def _check_finite(leaf: Leaf, box: Box, block: np.ndarray) -> None:
    bad = not_finite(leaf, block)
    if bad is None:
        return
    outer = box[: len(leaf.tree_shape) - len(leaf.shape)]
    counts = bad.reshape(*sizes(outer), -1).sum(axis=-1)
    first = np.unravel_index(np.argmax(counts > 0), counts.shape)
    place = [part.start + int(i) for part, i in zip(outer, first, strict=True)]
    name = leaf.name(place[0] if leaf.layers else 0, place[-1] if leaf.experts else 0)
    raise CheckpointError(
        f"{name}: {counts[first]} of {bad.size // counts.size} values are NaN or infinite as {leaf.dtype}; "
        f"see leaf {'/'.join(leaf.path)}"
    )


@partial(jax.jit, static_argnums=1)
def _quantize(x, scale_rule):
    codes, scale = mx.quantize(x, "mxfp4", scale_rule)
    return mx.pack(codes), scale


_dequantize = jax.jit(mx.dequantize_packed)
