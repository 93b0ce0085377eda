"""What a checkpoint holds, from its headers alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from k3jax.config import MX_BLOCK, ModelConfig
from k3jax.hf.files import check, describe, open_checkpoint
from k3jax.hf.names import table


@dataclass
class _Part:
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    types: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        types = ", ".join(sorted(self.types))
        return f"{self.tensors:>9,}{self.parameters:>20,}{self.bytes:>20,}  {types}".rstrip()


def report(path: str | Path) -> str:
    """A text table of a released checkpoint: family, layers, parameters and bytes by part, problems.

    Reads headers only, so it takes seconds at any size. Raises `ValueError` if the folder has no readable
    config or index; anything else that is wrong becomes the last line.

    Example:
        >>> print(report("checkpoint").splitlines()[-1])
        problems    none
    """
    cfg = ModelConfig.from_hf(path)
    checkpoint = open_checkpoint(path)
    problems = check(cfg, checkpoint)
    leaves = table(cfg)
    leaf_of = {name: leaf for leaf in leaves for r in range(leaf.repeats) for name in leaf.names(r)}

    sizes = {name: math.prod(h.shape) * _bits(h.dtype) // 8 for name, h in checkpoint.headers.items()}
    total = sum(sizes.values())
    parts = {leaf.part: _Part() for leaf in leaves}
    for name, header in checkpoint.headers.items():
        leaf = leaf_of.get(name)
        part = parts[leaf.part] if leaf else parts.setdefault("not of this model", _Part())
        part.tensors += 1
        part.parameters += leaf.tensor_parameters if leaf else 0
        part.bytes += sizes[name]
        part.types.add(header.dtype)
    whole = _Part(len(sizes), sum(part.parameters for part in parts.values()), total)

    size = f"{cfg.num_parameters:,} text parameters, {cfg.num_active_parameters:,} active a token"
    moe = f"{cfg.num_experts_per_token} of {cfg.num_experts} routed, {cfg.num_shared_experts} shared"
    stored = f"MXFP4, one scale for {MX_BLOCK} values" if cfg.quantized_experts else "not quantised"
    claimed = checkpoint.index.get("metadata", {}).get("total_size", total)
    notes = [f"says total_size {claimed:,}, the shards hold {total:,}"] if claimed != total else []
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:5]
    return "\n".join(
        [
            f"checkpoint  {path}: {len(checkpoint.shards)} shards",
            f"family      {cfg.model_type}, {size}",
            f"layers      {cfg.num_hidden_layers}: {_schedule(cfg)}",
            f"experts     {moe}; {stored}",
            "",
            f"{'part':<18}{'tensors':>9}{'parameters':>20}{'bytes':>20}  types",
            *(f"{name:<18}{part}" for name, part in (parts | {"all": whole}).items()),
            "",
            "largest tensors",
            *(f"{sizes[name]:>18,}  {name} {list(checkpoint.headers[name].shape)}" for name in largest),
            "",
            *(f"index       {note}" for note in notes),
            f"problems    {describe(problems) if problems else 'none'}",
        ]
    )


def _schedule(cfg: ModelConfig) -> str:
    """Such as `(KDA dense, 2 KDA, MLA) + 22 x (3 KDA, MLA) + (MLA)`: layers are MoE unless called dense."""
    segments = []
    for unit, repeats in cfg.segments:
        runs = []
        for kind, layers in groupby(unit):
            count = len(list(layers))
            name = kind.mixer.upper() + (" dense" if kind.ffn == "dense" else "")
            runs.append(f"{count} {name}" if count > 1 else name)
        segments.append((f"{repeats} x " if repeats > 1 else "") + f"({', '.join(runs)})")
    return " + ".join(segments)


def _bits(dtype: str) -> int:
    """Width of a safetensors type such as BF16, U8 or F8_E4M3; BOOL is a byte."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
