"""What a step is given and returns: every array's shape, type and logical axes, and its bytes on a device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from k3jax.config import ModelConfig
from k3jax.hf.names import DTYPES, table, tree_shapes
from k3jax.plan.setting import Serve, Train, Workload
from k3jax.rules import pieces

# Logical axes of the parameters that the modules of `k3jax/nn` split, by their last name; a test compares.
AXES: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(("embed_tokens", "lm_head"), ("vocab", "embed")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("mlp", "embed")),
    "down_proj": ("embed", "mlp"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), ("heads", None, "embed")),
    **dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), ("heads", None, None)),
    "b_proj": ("heads", "embed"),
    **dict.fromkeys(("f_a_proj", "g_a_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate"), (None, "embed")),
    **dict.fromkeys(("f_b_proj", "g_b_proj"), ("heads", None, None)),
    **dict.fromkeys(("q_b_proj", "kv_b_proj"), ("heads", None, "embed")),
    "A_log": ("heads",),
    "dt_bias": ("heads", None),
    "o_proj": ("embed", "heads"),
    "routed_expert_down_proj": (None, "embed"),
    "routed_expert_up_proj": ("embed", None),
    **dict.fromkeys(("w1", "w2", "w3"), ("experts", "expert_out", None)),
    **dict.fromkeys(
        (f"w{i}_{part}" for i in (1, 2, 3) for part in ("packed", "scale")), ("experts", "expert_out", None)
    ),
    # The vision tower and its projector.
    "wqkv": (None, None, None, "embed"),
    "wo": ("embed", None, None),
    "proj": ("embed", None, None, None),
    "pos_emb": (None, None, "embed"),
    **dict.fromkeys(("fc0", "proj_0"), (None, "embed")),
    **dict.fromkeys(("fc1", "proj_2"), ("embed", None)),
}


class Array(NamedTuple):
    """A leaf of the variable tree: its path, shape, logical axes and bytes a value."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    itemsize: int


@lru_cache(maxsize=64)
def parameters(config: ModelConfig, experts: str, narrow: int) -> tuple[Array, ...]:
    """The model's variables, experts "dequantized" or "packed"; what is released in bfloat16 has `narrow` bytes.

    Example:
        >>> sum(math.prod(x.shape) for x in parameters(dataclasses.replace(cfg, vision=None), "dequantized", 4))
        2779484476000
    """
    stored = {leaf.path: leaf for leaf in table(config)}
    found = []
    for path, shape in tree_shapes(config, experts).items():
        leaf = stored.get(path)
        itemsize = narrow if leaf is None or leaf.dtype == "BF16" else DTYPES[leaf.dtype].itemsize
        axes = AXES.get(path[-1], ())
        found.append(Array(path, shape, (*(None,) * (len(shape) - len(axes)), *axes), itemsize))
    return tuple(found)


def released_bytes(config: ModelConfig, vision: bool = True) -> dict[str, int]:
    """Data bytes of the released tensors by part of the model, in the dtypes they are released in.

    Example:
        >>> sum(released_bytes(cfg).values())
        1560860324864
    """
    total: Counter[str] = Counter()
    for leaf in table(config):
        if vision or leaf.part != "vision":
            total[leaf.part] += leaf.count * leaf.tensor_bytes
    return dict(total)


class Group(NamedTuple):
    """Arrays of one kind together: those with the same axes, size of a value and place in the model.

    elements, count: of all. packed, scale: of MXFP4 experts. learnt: whether the optimizer changes them.
    """

    axes: frozenset[str]
    itemsize: int
    routed: bool
    packed: bool
    scale: bool
    learnt: bool
    elements: int

    def on(self, mesh: Mapping[str, int]) -> float:
        """Elements on a device."""
        return self.elements / math.prod(pieces(axis, mesh) for axis in self.axes)

    def values(self, mesh: Mapping[str, int]) -> float:
        """Weights on a device: two a packed byte, none a scale."""
        return 0.0 if self.scale else self.on(mesh) * (2 if self.packed else 1)


def _grouped(arrays) -> tuple[Group, ...]:
    total: Counter[tuple] = Counter()
    for x in arrays:
        name = x.path[-1]
        axes = frozenset(axis for axis in x.axes if axis)
        kind = (axes, x.itemsize, "experts" in axes, name.endswith("_packed"), name.endswith("_scale"))
        total[*kind, x.path[0] == "params"] += math.prod(x.shape)
    return tuple(Group(*kind, n) for kind, n in total.items())


@lru_cache(maxsize=64)
def _groups(config: ModelConfig, experts: str, narrow: int) -> tuple[Group, ...]:
    return _grouped(parameters(config, experts, narrow))


def variables(config: ModelConfig, workload: Workload) -> tuple[Group, ...]:
    """As the step takes them: float32 in training, bfloat16 with packed or bfloat16 experts in serving."""
    if isinstance(workload, Train):
        return _groups(config, "dequantized", 4)
    return _groups(config, workload.experts, 2)


@lru_cache(maxsize=64)
def layers(config: ModelConfig, experts: str) -> tuple[tuple[Group, ...], ...]:
    """The variables of one layer of every kind that is stacked apart."""
    found: dict[tuple[str, ...], list[Array]] = {}
    for x in parameters(config, experts, 2):
        if len(x.path) > 2 and x.path[1].startswith("segment_"):
            found.setdefault(x.path[1:3], []).append(x._replace(shape=x.shape[1:], axes=x.axes[1:]))
    return tuple(map(_grouped, found.values()))


def weight_bytes(config: ModelConfig, workload: Workload, mesh: Mapping[str, int]) -> dict[str, float]:
    """Of the variables on a device: routed experts, and everything else."""
    found = {"experts": 0.0, "dense": 0.0}
    for group in variables(config, workload):
        found["experts" if group.routed else "dense"] += group.on(mesh) * group.itemsize
    return found


def optimizer_bytes(config: ModelConfig, workload: Train, mesh: Mapping[str, int]) -> float:
    """AdamW's two float32 moments, which lie as their parameter does."""
    return 2 * sum(group.on(mesh) * 4 for group in variables(config, workload) if group.learnt)


def gradient_bytes(config: ModelConfig, workload: Train, mesh: Mapping[str, int]) -> float:
    """Float32 gradients of all parameters, which the clipping by their norm needs at once."""
    return optimizer_bytes(config, workload, mesh) / 2


def batch_bytes(workload: Workload, mesh: Mapping[str, int]) -> float:
    """Tokens, targets, segments and weights of training, tokens and mask of serving: 4 bytes each, split by row."""
    if isinstance(workload, Train):
        return 4 * 4 * workload.tokens / pieces("batch", mesh)
    return 4 * 2 * workload.rows(mesh) * workload.new


def kda_state_bytes(config: ModelConfig, rows: float, heads: float | None = None) -> float:
    """4 H K V of every KDA layer and row, in float32, whatever the context."""
    heads = config.kda_num_heads if heads is None else heads
    return len(config.kda_layers) * rows * heads * config.kda_head_dim**2 * 4


def conv_tail_bytes(config: ModelConfig, rows: float, heads: float | None = None) -> float:
    """The last inputs of three convolutions in every KDA layer, in bfloat16."""
    heads = config.kda_num_heads if heads is None else heads
    tail = 3 * (config.short_conv_kernel_size - 1) * heads * config.kda_head_dim
    return len(config.kda_layers) * rows * tail * 2


def mla_cache_bytes(config: ModelConfig, rows: float, tokens: float) -> float:
    """(L + R) values of bfloat16 a token of every MLA layer."""
    return len(config.full_attn_layers) * rows * tokens * (config.kv_lora_rank + config.qk_rope_head_dim) * 2


def cache_bytes(config: ModelConfig, workload: Serve, mesh: Mapping[str, int]) -> dict[str, float]:
    """On a device: states and tails are split over batch and heads, latents, which all heads share, over the batch."""
    rows = workload.rows(mesh)
    heads = config.kda_num_heads / pieces("heads", mesh)
    return {
        "KDA state": kda_state_bytes(config, rows, heads) + conv_tail_bytes(config, rows, heads),
        "MLA cache": mla_cache_bytes(config, rows, workload.context) + 4 * rows * workload.context,
    }
