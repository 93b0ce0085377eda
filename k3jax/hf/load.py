"""Import of a released checkpoint into the variable tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax.config import MX_BLOCK, ModelConfig
from k3jax.hf.files import (
    Checkpoint,
    CheckpointError,
    check,
    describe,
    open_checkpoint,
    released_names,
    stored_table,
)
from k3jax.hf.finite import not_finite
from k3jax.hf.names import DTYPES, Leaf, table
from k3jax.hf.pieces import PIECE_BYTES, Box, Pieced, boxes, piece_shape, sizes, spans
from k3jax.nn.model import model_shardings
from k3jax.ops import mx


def load_hf(
    checkpoint_dir: str | Path,
    cfg: ModelConfig | None = None,
    param_dtype=jnp.float32,
    experts: Literal["dequantized", "packed"] = "dequantized",
    mesh: jax.sharding.Mesh | None = None,
    allow_nonfinite: Sequence[str] = (),
) -> dict:
    """The variables of a released checkpoint: the tree `K3(cfg).init` gives.

    Weights become `param_dtype` (float32, bfloat16 or float64) and are never rounded: tensors stored as
    float32, or so in the released layout, are that under bfloat16. Routed experts stored as MXFP4 are
    dequantised, which is exact in each of these types, or with `experts="packed"` kept as uint8: `*_packed`
    [repeats, E, out, in/2] and `*_scale` [repeats, E, out, in/32]. `cfg` defaults to the folder's
    `config.json`.

    With a `mesh`, leaves are placed as `k3jax.nn.model.model_shardings` says: each device's shard is read from its
    own byte ranges of the files, in every process for its own devices, and no leaf is whole in memory.

    Names, shapes, types and shards are checked before any data is read. Raises `CheckpointError` naming what
    is missing, extra, misshaped, mistyped, cut short or outside the folder, a value or scale that is NaN or infinite (but
    in tensors that `allow_nonfinite` names: patterns such as "*.A_log"), and a padding value of `A_log` that is not zero. Holds one leaf, or shard of a leaf, more than the result while it works.

    Example:
        >>> variables = load_hf("Kimi-Linear-48B", param_dtype=jnp.bfloat16)
        >>> variables["params"]["embed_tokens"].shape
        (163840, 2304)
    """
    dtype = jnp.dtype(param_dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise ValueError(f"param_dtype: found {dtype}, must be float32, bfloat16 or float64")
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError("param_dtype: float64 needs jax_enable_x64")
    cfg = cfg or ModelConfig.from_hf(checkpoint_dir)
    leaves = released_arrays(cfg, open_checked(checkpoint_dir, cfg, experts), dtype, experts, allow_nonfinite)
    if mesh is None:
        whole = lambda leaf: tuple(slice(0, size) for size in leaf.shape)  # noqa: E731
        return unflatten_dict({path: jax.device_put(leaf.read(whole(leaf))) for path, leaf in leaves.items()})
    shardings = flatten_dict(model_shardings(cfg, mesh, experts=experts))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return unflatten_dict({path: _placed(leaf, shardings.get(path, replicated)) for path, leaf in leaves.items()})


def open_checked(
    checkpoint_dir: str | Path, cfg: ModelConfig, experts: str, of: ModelConfig | None = None, wanted=None
) -> Checkpoint:
    """The checkpoint of a model, when its headers are as they must be; `of` and `wanted`: see `check`, `open_checkpoint`."""
    if experts not in ("dequantized", "packed"):
        raise ValueError(f"experts: found {experts!r}, must be 'dequantized' or 'packed'")
    if experts == "packed" and not cfg.quantized_experts:
        raise ValueError("experts: 'packed' needs MXFP4 experts and these are BF16; use 'dequantized'")
    checkpoint = open_checkpoint(checkpoint_dir, wanted)
    problems = check(cfg, checkpoint, of)
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {describe(problems)}")
    return checkpoint


def released_arrays(
    cfg: ModelConfig,
    checkpoint: Checkpoint,
    param_dtype: np.dtype,
    experts: Literal["dequantized", "packed"],
    allow_nonfinite: Sequence[str] = (),
) -> dict[tuple[str, ...], Pieced]:
    """Every leaf of the variable tree, to be read from a checkpoint whose headers have been checked.

    A piece is what one read gives at the rate of the disk: at most `PIECE_BYTES` of values.
    """
    names = released_names(cfg) if allow_nonfinite else ()
    for pattern in allow_nonfinite:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"allow_nonfinite: {pattern!r} is the name of no tensor of this model, nor a pattern of any")
    stored = partial(_stored, checkpoint, tuple(allow_nonfinite))
    leaves = {leaf.path: leaf for leaf in stored_table(cfg, checkpoint)}
    released = {leaf.path: leaf.dtype for leaf in table(cfg)}
    arrays = {}
    for path, leaf in leaves.items():
        if leaf.is_packed and experts == "dequantized":
            path = (*path[:-1], path[-1].removesuffix("_packed"))
            *outer, inner = leaf.tree_shape
            shape, dtype = (*outer, 2 * inner), param_dtype
            read = partial(_dequantized, stored, leaf, leaves[*path[:-1], f"{path[-1]}_scale"], dtype)
        elif leaf.is_scale and experts == "dequantized":
            continue  # read with its codes
        else:
            shape, dtype = leaf.tree_shape, _tree_dtype({leaf.dtype, released[path]}, param_dtype)
            read = partial(_converted, stored, leaf, dtype)
        arrays[path] = Pieced(shape, dtype, piece_shape(shape, dtype.itemsize), read)
    return arrays


def _placed(leaf: Pieced, sharding: jax.sharding.Sharding) -> jax.Array:
    """The leaf on this process' devices, shard after shard; one that several of them hold is read once."""
    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        box = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(box, []).append(device)
    shards = []
    for box, devices in holders.items():
        values = leaf.read(tuple(slice(*ends) for ends in box))
        shards += jax.block_until_ready([jax.device_put(values, device) for device in devices])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _tree_dtype(types: set[str], param_dtype: np.dtype) -> np.dtype:
    """Of a leaf with these types, stored and as released."""
    if "U8" in types:
        return DTYPES["U8"]
    return np.promote_types(np.float32, param_dtype) if "F32" in types else param_dtype


Stored = Callable[[Leaf, Box], np.ndarray]


def _converted(stored: Stored, leaf: Leaf, dtype: np.dtype, box: Box) -> np.ndarray:
    """A box in `dtype`, in pieces where that is not what is stored."""
    if dtype == DTYPES[leaf.dtype]:
        return stored(leaf, box)
    return _in_pieces(box, dtype, partial(stored, leaf))


def _in_pieces(box: Box, dtype: np.dtype, read) -> np.ndarray:
    piece = piece_shape(sizes(box), dtype.itemsize)
    if piece == sizes(box):
        return read(box).astype(dtype, copy=False)
    out = np.empty(sizes(box), dtype)
    for inner in boxes(out.shape, piece):
        out[inner] = read(tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(box, inner, strict=True)))
    return out


def _stored(checkpoint: Checkpoint, allowed: tuple[str, ...], leaf: Leaf, box: Box) -> np.ndarray:
    """A box as stored. Refuses what is not finite, but in `allowed` tensors, and padding that is not zero."""
    out = np.empty(sizes(box), DTYPES[leaf.dtype])
    checkpoint.read(spans(leaf, box), out)
    if (bad := not_finite(leaf, out)) is not None:
        names = _names(leaf, box)
        bad = [name for name, part in zip(names, bad.reshape(len(names), -1), strict=True) if part.any()]
        bad = [name for name in bad if not any(fnmatchcase(name, pattern) for pattern in allowed)]
        if bad:
            raise _strange(checkpoint, leaf, bad)
    if padding := math.prod(leaf.stored) - math.prod(leaf.shape):
        tail = np.empty(padding, out.dtype)
        for name in _names(leaf, box):
            checkpoint.read([(name, leaf.tensor_bytes - tail.nbytes, tail.nbytes)], tail)
            if bad := np.count_nonzero(tail):
                raise CheckpointError(
                    f"{checkpoint.path}: {name}: {bad} of its {tail.size} padding values are not zero"
                )
    return out


def _strange(checkpoint: Checkpoint, leaf: Leaf, names: list[str]) -> CheckpointError:
    """That there is NaN or infinity in tensors, of which the first is counted whole: a box may be a part of it."""
    name, count = names[0], 0
    for begin in range(0, leaf.tensor_bytes, PIECE_BYTES):
        size = min(PIECE_BYTES, leaf.tensor_bytes - begin)
        part = np.empty(size // DTYPES[leaf.dtype].itemsize, DTYPES[leaf.dtype])
        checkpoint.read([(name, begin, size)], part)
        count += 0 if (bad := not_finite(leaf, part)) is None else np.count_nonzero(bad)
    kind = "scale codes are 0xFF (NaN)" if leaf.is_scale else "values are NaN or infinite"
    more = f", and of {len(names) - 1} more tensors that lie with it" if names[1:] else ""
    return CheckpointError(
        f"{checkpoint.path / checkpoint.weight_map[name]}: {name}: {count} of its {math.prod(leaf.stored)} {kind}{more}; "
        "allow_nonfinite takes what it names as it is"
    )


def _names(leaf: Leaf, box: Box) -> list[str]:
    """The tensors that a box has a part of."""
    return list(dict.fromkeys(name for name, _, _ in spans(leaf, box)))


def _dequantized(stored: Stored, packed: Leaf, scale: Leaf, dtype: np.dtype, box: Box) -> np.ndarray:
    """A box of values, read with the rest of the blocks that it cuts."""
    *outer, last = box
    blocks = slice(last.start // MX_BLOCK, -(-last.stop // MX_BLOCK))
    first = blocks.start * MX_BLOCK
    aligned = (*outer, slice(first, blocks.stop * MX_BLOCK))

    def read(part: Box) -> np.ndarray:
        *outer, last = part
        codes = stored(packed, (*outer, slice(last.start // 2, last.stop // 2)))
        scales = stored(scale, (*outer, slice(last.start // MX_BLOCK, last.stop // MX_BLOCK)))
        return np.asarray(_dequantize(codes, scales, dtype))

    return _in_pieces(aligned, dtype, read)[..., last.start - first : last.stop - first]


@partial(jax.jit, static_argnums=2)
def _dequantize(packed, scale, dtype):
    return (
        mx.dequantize_packed(packed, scale) if dtype == jnp.bfloat16 else mx.dequantize(mx.unpack(packed), scale, dtype)
    )
