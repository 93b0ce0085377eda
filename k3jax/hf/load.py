"""Import of a released checkpoint into the variable tree."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax.config import ModelConfig
from k3jax.hf.files import Checkpoint, CheckpointError, check, describe, open_checkpoint
from k3jax.hf.names import DTYPES, NAN_SCALE, Leaf, table
from k3jax.ops import mx


def load_hf(
    checkpoint_dir: str | Path,
    cfg: ModelConfig | None = None,
    param_dtype=jnp.float32,
    experts: Literal["dequantized", "packed"] = "dequantized",
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """The variables of a released checkpoint, for models that fit in memory: the tree `K3(cfg).init` gives.

    Weights become `param_dtype` (float32, bfloat16 or float64) and are never rounded: tensors stored as
    float32 stay so under bfloat16. Routed experts stored as MXFP4 are
    dequantised, which is exact in each of these types, or with `experts="packed"` kept as uint8: `*_packed`
    [repeats, E, out, in/2] and `*_scale` [repeats, E, out, in/32]. `cfg` defaults to the folder's
    `config.json`. With a `mesh`, leaves are placed as `k3jax.sharding.model_shardings` says.

    Names, shapes, types and shards are checked before any data is read. Raises `CheckpointError` naming what
    is missing, extra, misshaped, mistyped, cut short or outside the folder, a scale code 0xFF (NaN), and a
    padding value of `A_log` that is not zero. Holds one leaf more than the result while it works.

    Example:
        >>> variables = load_hf("Kimi-Linear-48B", param_dtype=jnp.bfloat16)
        >>> variables["params"]["embed_tokens"].shape
        (163840, 2304)
    """
    if experts not in ("dequantized", "packed"):
        raise ValueError(f"experts: found {experts!r}, must be 'dequantized' or 'packed'")
    dtype = jnp.dtype(param_dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float64):
        raise ValueError(f"param_dtype: found {dtype}, must be float32, bfloat16 or float64")
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:
        raise ValueError("param_dtype: float64 needs jax_enable_x64")
    cfg = cfg or ModelConfig.from_hf(checkpoint_dir)
    if experts == "packed" and not cfg.quantized_experts:
        raise ValueError("experts: 'packed' needs MXFP4 experts and these are BF16; use 'dequantized'")

    checkpoint = open_checkpoint(checkpoint_dir)
    problems = check(cfg, checkpoint)
    if problems:
        raise CheckpointError(f"{checkpoint.path}: {describe(problems)}")

    shardings, replicated = {}, None
    if mesh is not None:
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        from k3jax.sharding import model_shardings

        shardings = flatten_dict(model_shardings(cfg, mesh, experts=experts))
    leaves = {leaf.path: leaf for leaf in table(cfg)}
    flat = {}
    for leaf in leaves.values():
        path = leaf.path
        if experts == "dequantized" and leaf.is_scale:
            continue  # read with its codes
        if experts == "dequantized" and leaf.is_packed:
            path = (*path[:-1], path[-1].removesuffix("_packed"))
            value = _dequantized(checkpoint, leaf, leaves[*path[:-1], f"{path[-1]}_scale"], dtype)
        else:
            value = np.empty((leaf.repeats, leaf.experts or 1, *leaf.shape), _tree_dtype(leaf, dtype))
            for r in range(leaf.repeats):
                _read(checkpoint, leaf, r, value[r])
            value = value.reshape(leaf.tree_shape)
        flat[path] = jax.device_put(value, shardings.get(path, replicated))
    return unflatten_dict(flat)


def _tree_dtype(leaf: Leaf, param_dtype: np.dtype) -> np.dtype:
    if leaf.dtype == "U8":
        return DTYPES[leaf.dtype]
    return param_dtype if leaf.dtype == "BF16" else np.promote_types(np.float32, param_dtype)


def _read(checkpoint: Checkpoint, leaf: Leaf, repeat: int, out: np.ndarray) -> None:
    """The tensors of one layer, into out [E or 1, *leaf.shape]."""
    for e, name in enumerate(leaf.names(repeat)):
        flat = checkpoint.read(name).reshape(-1)
        values, tail = flat[: out[e].size], flat[out[e].size :]
        if tail.any():
            found = np.count_nonzero(tail)
            raise CheckpointError(f"{name}: {found} of its {tail.size} padding values are not zero")
        if leaf.is_scale and (values == NAN_SCALE).any():
            found = np.count_nonzero(values == NAN_SCALE)
            raise CheckpointError(f"{name}: {found} of its {values.size} scale codes are 0xFF (NaN)")
        out[e] = values.reshape(leaf.shape)


def _dequantized(checkpoint: Checkpoint, packed: Leaf, scale: Leaf, dtype: np.dtype) -> np.ndarray:
    """Layer by layer, so that no more than one layer's codes are in memory beside the result."""
    *outer, inner = packed.tree_shape
    out = np.empty((*outer, 2 * inner), dtype)
    codes, scales = np.empty(packed.tree_shape[1:], np.uint8), np.empty(scale.tree_shape[1:], np.uint8)
    for r in range(packed.repeats):
        _read(checkpoint, packed, r, codes)
        _read(checkpoint, scale, r, scales)
        out[r] = _dequantize(codes, scales, dtype)
    return out


@partial(jax.jit, static_argnums=2)
def _dequantize(packed, scale, dtype):
    return mx.dequantize(mx.unpack(packed), scale, dtype)
