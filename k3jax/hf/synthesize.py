"""Checkpoints of the released layout made up at random, of any size, for tests, demonstrations and measurements."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from k3jax.config import MX_BLOCK, ModelConfig
from k3jax.hf.names import DTYPES, Leaf, table
from k3jax.hf.pieces import Box, Pieced, piece_shape, sizes
from k3jax.hf.save import SHARD_BYTES, write_released
from k3jax.hf.stream import MEMORY


def synthesize(
    cfg: ModelConfig, destination: str | Path, seed: int = 0, max_shard_size: int = SHARD_BYTES, memory: int = MEMORY
) -> None:
    """Writes a model with random weights, in a stream: `load_hf`, import and other programs read it like a released one.

    The bytes depend on `cfg` and `seed` alone. Matrices are normal with `cfg.initializer_range`, packed experts uniform
    codes of about that size, norms one, and what a new model has as zero is zero. After an error or a kill, the same call
    goes on from what was written.

    Example:
        >>> synthesize(ModelConfig.from_hf("Kimi-Linear-48B/config.json").first_layers(4), "random")
    """
    leaves = {}
    for number, leaf in enumerate(table(cfg)):
        dtype = DTYPES[leaf.dtype]
        read = partial(_piece, leaf, (seed, number), cfg.initializer_range)
        leaves[leaf.path] = Pieced(leaf.tree_shape, dtype, piece_shape(leaf.tree_shape, dtype.itemsize), read)
    identity = json.dumps(["random", seed, cfg.to_hf()])
    write_released(destination, cfg, leaves, max_shard_size, identity=identity, memory=memory)


def _piece(leaf: Leaf, seed: tuple[int, ...], std: float, box: Box) -> np.ndarray:
    random = np.random.default_rng([*seed, *(part.start for part in box)])
    shape, name = sizes(box), leaf.path[-1]
    if leaf.is_packed:
        codes = random.integers(0, 256, shape, np.uint8)
        codes[..., :: MX_BLOCK // 2] |= 0x06  # a block's largest is 4 or 6, as in what a quantiser gives
        return codes
    if leaf.is_scale:
        middle = 127 + round(np.log2(std / 4))  # 4 is about the deviation of uniform codes under three scales
        return random.integers(middle - 1, middle + 2, shape, np.uint8)
    if "norm" in name:
        return np.ones(shape, DTYPES[leaf.dtype])
    if name in ("A_log", "e_score_correction_bias") or name.endswith("_res_proj"):
        return np.zeros(shape, DTYPES[leaf.dtype])
    return (random.standard_normal(shape, np.float32) * np.float32(std)).astype(DTYPES[leaf.dtype])
