"""The released tensors of a model: the one description that import, export and inspection derive from.

A `Leaf` stands for all tensors stacked in one leaf of the variable tree, so Kimi K3's 497,220 tensors are a
few hundred objects; their names are made on demand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from k3jax.config import MX_BLOCK, LayerKind, ModelConfig, VisionConfig

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32), "U8": np.dtype(np.uint8)}
FLOATS = ("BF16", "F32")
A_LOG_MULTIPLE = 128  # Kimi K3 pads A_log with zeros up to a multiple of this
NAN_SCALE = 0xFF  # the one block scale that is not a power of two


@dataclass(frozen=True)
class Leaf:
    """One leaf of the variable tree and the released tensors it stacks.

    `shape` is one tensor's shape in the tree, `stored` its shape in the checkpoint: the same values in the
    same order, so that import is flatten, narrow and reshape; where `stored` is larger, its tail is zero.

    Example:
        >>> leaf = next(leaf for leaf in table(cfg) if leaf.path[-1] == "w1_packed")
        >>> leaf.names(0)[5]
        'language_model.model.layers.1.block_sparse_moe.experts.5.w1.weight_packed'
    """

    path: tuple[str, ...]  # collection first
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: Literal["BF16", "F32", "U8"]  # as stored
    template: str  # released name with {layer} and {expert}
    part: str  # of the model, for reports
    layers: tuple[int, ...] = ()  # 0-based, along the first stacking axis (the tower counts its own); empty: not stacked
    experts: int = 0  # size of the second stacking axis; 0: none

    @property
    def repeats(self) -> int:
        return len(self.layers) or 1

    @property
    def tree_shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf, stacking axes first."""
        stacking = (len(self.layers), self.experts)
        return (*(size for size in stacking if size), *self.shape)

    def names(self, repeat: int) -> list[str]:
        """Released names at one index of the first stacking axis: one, or one an expert."""
        return [self.name(repeat, e) for e in range(self.experts or 1)]

    def name(self, repeat: int, expert: int) -> str:
        """Released name at one place of the stacking axes; 0 stands for an axis that it does not have."""
        return self.template.format(layer=self.layers[repeat] if self.layers else None, expert=expert)

    @property
    def count(self) -> int:
        """Number of released tensors."""
        return self.repeats * (self.experts or 1)

    @property
    def tensor_bytes(self) -> int:
        """Stored bytes of one of its tensors."""
        return math.prod(self.stored) * DTYPES[self.dtype].itemsize

    @property
    def tensor_parameters(self) -> int:
        """Model parameters one of its tensors holds: two a packed byte, none a scale or a padding value."""
        return 0 if self.is_scale else math.prod(self.shape) * (2 if self.is_packed else 1)

    @property
    def is_packed(self) -> bool:
        """Whether its bytes are pairs of E2M1 codes."""
        return self.dtype == "U8" and self.path[-1].endswith("_packed")

    @property
    def is_scale(self) -> bool:
        """Whether its bytes are E8M0 scales."""
        return self.dtype == "U8" and self.path[-1].endswith("_scale")


class _Row(NamedTuple):
    name: str  # released, after what comes before it
    shape: tuple[int, ...]
    stored: tuple[int, ...] | None = None  # None: as `shape`
    dtype: Literal["BF16", "F32", "U8"] = "BF16"
    part: str | None = None  # None: as the rows around it


def table(cfg: ModelConfig) -> list[Leaf]:
    """Every leaf of a checkpoint of this model, experts in their stored form.

    Example:
        >>> sum(leaf.count for leaf in table(cfg)), sum(leaf.count * leaf.tensor_bytes for leaf in table(cfg))
        (497220, 1560860324864)
    """
    prefix = "language_model." if cfg.model_type == "kimi_k3" else ""
    V, D = cfg.vocab_size, cfg.hidden_size
    ends = [
        _Row("model.embed_tokens.weight", (V, D), part="embeddings"),
        _Row("model.norm.weight", (D,), part="norms"),
    ]
    if not cfg.tie_word_embeddings:
        ends.append(_Row("lm_head.weight", (V, D), part="embeddings"))
    if cfg.attn_res_block_size:
        ends += _mixture(D, "model.output_attn_res")
    leaves = [_leaf(row, ("params",), prefix, skip="model.") for row in ends]

    layer = 0
    for s, (unit, repeats) in enumerate(cfg.segments):
        for j, kind in enumerate(unit):
            layers = tuple(range(layer + j, layer + j + repeats * len(unit), len(unit)))
            for row in _layer(cfg, kind):
                collection = "router" if row.name.endswith("e_score_correction_bias") else "params"
                path = (collection, f"segment_{s}", f"layer_{j}")
                stack = {"layers": layers, "experts": cfg.num_experts if "{expert}" in row.name else 0}
                leaves.append(_leaf(row, path, f"{prefix}model.layers.{{layer}}.", **stack))
        layer += repeats * len(unit)

    if cfg.vision:
        leaves += _vision(cfg.vision)
    return leaves


def tree_shapes(cfg: ModelConfig, experts: Literal["dequantized", "packed"]) -> dict[tuple, tuple[int, ...]]:
    """Path and shape of every leaf of the variable tree, routed experts as values or packed with scales."""
    shapes = {}
    for leaf in table(cfg):
        *above, name = leaf.path
        if experts == "packed" or leaf.dtype != "U8":
            shapes[leaf.path] = leaf.tree_shape
        elif leaf.is_packed:
            *outer, inner = leaf.tree_shape
            shapes[*above, name.removesuffix("_packed")] = (*outer, 2 * inner)
    return shapes


def _leaf(row: _Row, path: tuple[str, ...], prefix: str, skip: str = "", **stack) -> Leaf:
    """The released name's parts are the path, with the expert number and the word "weight" left out."""
    inside = row.name.removeprefix(skip).removesuffix(".weight")
    inside = inside.replace(".{expert}", "").replace(".weight_", "_").replace("gate.e_score", "e_score")
    stored = row.shape if row.stored is None else row.stored
    path = (*path, *inside.split("."))
    return Leaf(path, row.shape, stored, row.dtype, prefix + row.name, row.part, **stack)


def _layer(cfg: ModelConfig, kind: LayerKind) -> Iterator[_Row]:
    D = cfg.hidden_size
    yield _Row("input_layernorm.weight", (D,), part="norms")
    yield _Row("post_attention_layernorm.weight", (D,), part="norms")
    if cfg.attn_res_block_size:
        yield from _mixture(D, "self_attention_res")
        yield from _mixture(D, "mlp_res")
    for row in _kda(cfg) if kind.mixer == "kda" else _mla(cfg):
        yield row._replace(name=f"self_attn.{row.name}", part=kind.mixer.upper())
    if kind.ffn == "dense":
        for row in _glu(cfg.intermediate_size, D):
            yield row._replace(name=f"mlp.{row.name}", part="dense FFN")
    else:
        for row in _moe(cfg):
            yield row._replace(name=f"block_sparse_moe.{row.name}")


def _mixture(D: int, name: str) -> list[_Row]:
    return [
        _Row(f"{name}_norm.weight", (D,), part="AttnRes"),
        _Row(f"{name}_proj.weight", (D,), (1, D), part="AttnRes"),
    ]


def _kda(cfg: ModelConfig) -> list[_Row]:
    D, H, K, taps = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size
    a_log = (1, 1, H, 1) if cfg.model_type == "kimi_linear" else (-(-H // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,)
    if cfg.use_full_rank_gate:
        gate = [_Row("g_proj.weight", (H, K, D), (H * K, D))]
    else:
        gate = [_Row("g_a_proj.weight", (K, D)), _Row("g_b_proj.weight", (H, K, K), (H * K, K))]
    return [
        *(_Row(f"{x}_proj.weight", (H, K, D), (H * K, D)) for x in "qkv"),
        *(_Row(f"{x}_conv1d.weight", (H, K, taps), (H * K, 1, taps), "F32") for x in "qkv"),
        _Row("b_proj.weight", (H, D)),
        _Row("f_a_proj.weight", (K, D)),
        _Row("f_b_proj.weight", (H, K, K), (H * K, K)),
        _Row("A_log", (H,), a_log, "F32"),
        _Row("dt_bias", (H, K), (H * K,), "F32"),
        *gate,
        _Row("o_norm.weight", (K,), dtype="F32"),
        _Row("o_proj.weight", (D, H * K)),
    ]


def _mla(cfg: ModelConfig) -> list[_Row]:
    D, H, L = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank
    K, R, V, Lq = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.q_lora_rank
    if Lq:
        query = [
            _Row("q_a_proj.weight", (Lq, D)),
            _Row("q_a_layernorm.weight", (Lq,)),
            _Row("q_b_proj.weight", (H, K + R, Lq), (H * (K + R), Lq)),
        ]
    else:
        query = [_Row("q_proj.weight", (H, K + R, D), (H * (K + R), D))]
    return [
        *query,
        _Row("kv_a_proj_with_mqa.weight", (L + R, D)),
        _Row("kv_a_layernorm.weight", (L,)),
        _Row("kv_b_proj.weight", (H, K + V, L), (H * (K + V), L)),
        *([_Row("g_proj.weight", (H, V, D), (H * V, D))] if cfg.mla_use_output_gate else []),
        _Row("o_proj.weight", (D, H * V)),
    ]


def _glu(F: int, D: int) -> list[_Row]:
    return [
        _Row("gate_proj.weight", (F, D)),
        _Row("up_proj.weight", (F, D)),
        _Row("down_proj.weight", (D, F)),
    ]


def _moe(cfg: ModelConfig) -> Iterator[_Row]:
    D, L, F, E = cfg.hidden_size, cfg.latent_size, cfg.moe_intermediate_size, cfg.num_experts
    yield _Row("gate.weight", (E, D), part="router")
    yield _Row("gate.e_score_correction_bias", (E,), dtype="F32", part="router")
    if cfg.routed_expert_hidden_size:
        yield _Row("routed_expert_down_proj.weight", (L, D), part="expert latents")
        yield _Row("routed_expert_up_proj.weight", (D, L), part="expert latents")
    if cfg.latent_moe_use_norm:
        yield _Row("routed_expert_norm.weight", (L,), part="expert latents")
    for row in _glu(cfg.shared_intermediate_size, D) if cfg.num_shared_experts else ():
        yield row._replace(name=f"shared_experts.{row.name}", part="shared experts")
    for w, (wide, narrow) in {"w1": (F, L), "w3": (F, L), "w2": (L, F)}.items():
        name = f"experts.{{expert}}.{w}.weight"
        if cfg.quantized_experts:
            yield _Row(f"{name}_packed", (wide, narrow // 2), dtype="U8", part="routed experts")
            yield _Row(f"{name}_scale", (wide, narrow // MX_BLOCK), dtype="U8", part="routed experts")
        else:
            yield _Row(name, (wide, narrow), part="routed experts")


def _vision(cfg: VisionConfig) -> Iterator[Leaf]:
    """Rows by module; blocks are stacked as the text model's layers are."""
    D, F, P = cfg.vt_hidden_size, cfg.vt_intermediate_size, cfg.patch_size
    H, K = cfg.vt_num_attention_heads, cfg.head_dim
    grid = (cfg.init_pos_emb_height, cfg.init_pos_emb_width)
    joined, text = cfg.joined_size, cfg.text_hidden_size
    modules = {
        "vision_tower.patch_embed.": [_Row("proj.weight", (D, 3, P, P)), _Row("pos_emb.weight", (*grid, D))],
        "vision_tower.encoder.blocks.{layer}.": [
            _Row("norm0.weight", (D,)),
            _Row("norm1.weight", (D,)),
            _Row("wqkv.weight", (3, H, K, D), (3 * H * K, D)),
            _Row("wo.weight", (D, H, K), (D, H * K)),
            _Row("mlp.fc0.weight", (F, D)),
            _Row("mlp.fc1.weight", (D, F)),
        ],
        "vision_tower.encoder.": [_Row("final_layernorm.weight", (D,))],
        "mm_projector.": [
            _Row("proj.0.weight", (joined, joined)),
            _Row("proj.2.weight", (text, joined)),
            _Row("post_norm.weight", (text,)),
        ],
    }
    for prefix, rows in modules.items():
        blocks = "{layer}" in prefix
        path = ("params", prefix.split(".")[0], *(["blocks"] if blocks else []))
        stack = {"layers": tuple(range(cfg.vt_num_hidden_layers)) if blocks else ()}
        for row in rows:
            name = row.name.removesuffix(".weight").removeprefix("mlp.").replace(".", "_")
            stored = row.stored or row.shape
            yield Leaf((*path, name), row.shape, stored, row.dtype, prefix + row.name, "vision", **stack)
