"""What a checkpoint of a run or an import holds, from its metadata; one leaf's values on request."""

from __future__ import annotations

from pathlib import Path

from k3jax.hf.files import CheckpointError, Header
from k3jax.hf.inspect import Report, Tensor, layout
from k3jax.hf.names import table, tree_shapes
from k3jax.hf.pieces import Box, Pieced
from k3jax.hf.statistics import describe
from k3jax.train.checkpoint import open_model

_TYPES = {"bfloat16": "BF16", "float32": "F32", "float64": "F64", "uint8": "U8", "int32": "I32", "uint32": "U32"}
_OTHERS = "optimizer, step"


def report(path: str | Path) -> Report:
    """`k3jax.hf.inspect.report` of a checkpoint that `resolve` finds at `path`; leaves have their dotted paths."""
    checkpoints, number, cfg, meta = open_model(path)
    experts = meta.get("experts", "dequantized")
    parts = {}
    for leaf in table(cfg):
        name = ".".join(leaf.path)
        parts[name] = parts[name.removesuffix("_packed") if leaf.is_packed else name] = leaf
    expected = {".".join(path): shape for path, shape in tree_shapes(cfg, experts).items()}
    tensors, found = [], checkpoints.pieced(number)
    for name, array in found.items():
        header = Header(_TYPES.get(array.dtype.name, array.dtype.name.upper()), array.shape)
        leaf = parts.get(name)
        tensors.append(
            Tensor(name, header, leaf.part if leaf else _OTHERS, leaf.count * leaf.tensor_parameters if leaf else 0)
        )
    problems = {}
    for name, shape in expected.items():
        if name not in found:
            problems[name] = f"missing; expected {list(shape)}"
        elif found[name].shape != shape:
            problems[name] = f"found {list(found[name].shape)}, expected {list(shape)}"
    title = f"checkpoint  {checkpoints.folder / str(number)}: step {number} of a run"
    if meta["kind"] == "weights":
        title = f"checkpoint  {checkpoints.folder / str(number)}: imported weights"
    stored = "MXFP4, packed" if experts == "packed" else "as numbers"
    return layout(cfg, title, stored, tensors, [], problems, checkpoints.folder.parent)


def tensor_report(path: str | Path, name: str) -> str:
    """Statistics of one leaf by its dotted path, or of the part of a leaf that is a released tensor by its name."""
    checkpoints, number, cfg, meta = open_model(path)
    found = checkpoints.pieced(number)
    array, leaf_name = found.get(name), name
    if array is None:
        for leaf in table(cfg):
            for r in range(leaf.repeats):
                if name in (names := leaf.names(r)):
                    leaf_name = ".".join(leaf.path)
                    if leaf_name in found:
                        array = _part(
                            found[leaf_name],
                            ([r] if leaf.layers else []) + ([names.index(name)] if leaf.experts else []),
                        )
    if array is None:
        raise CheckpointError(f"{path}: {name}: no such leaf, nor a released tensor that is stored as such here")
    header = f"{array.dtype.name} {list(array.shape)}"
    return "\n".join([f"tensor      {name}", f"stored      {header} in {leaf_name}", *describe(array, leaf_name)])


def _part(array: Pieced, place: list[int]) -> Pieced:
    """One entry of the first axes of an array."""
    outer = tuple(slice(i, i + 1) for i in place)

    def read(box: Box):
        return array.read((*outer, *box))[(0,) * len(place)]

    return Pieced(array.shape[len(place) :], array.dtype, array.piece[len(place) :], read)
