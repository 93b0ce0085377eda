"""The one table that says which mesh axes an array's named axes are split over. Nothing here imports JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")

# Logical axis -> mesh axes. Parameters: dense weights on (fsdp, tensor), experts on (expert, tensor) and fsdp.
# Activations: "batch" and "seq" for what flows between sublayers, "time" and "heads" inside a token mixer.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context", "tensor"),
    "time": ("context",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "experts": ("expert", "tensor"),
    "expert_out": ("fsdp",),
    "layers": (),
}


def pieces(name: str | None, mesh: Mapping[str, int]) -> int:
    """Parts a logical axis is split into on a mesh of these sizes; 1 for None.

    Example:
        >>> pieces("experts", {"data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 2})
        8
    """
    return math.prod(mesh[axis] for axis in RULES[name]) if name else 1


def multiple(size: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `size`."""
    return -(-size // of) * of
