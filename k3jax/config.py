"""Model configuration of the Kimi K3 family: the one description everything else derives from.

Field names are those of the released `config.json`. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from k3jax import released
from k3jax.checks import check_type, is_instance
from k3jax.released import MX_BLOCK, TOKEN_IDS

# Numbers that need not be positive.
_ANY_SIGN = ("gate_lower_bound", "text_eos_token_id", *TOKEN_IDS)
_MAY_BE_ZERO = ("first_k_dense_replace", "initializer_range", "num_shared_experts")


class LayerKind(NamedTuple):
    """What one layer is made of: its token mixer and its feed-forward part."""

    mixer: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]


class Segment(NamedTuple):
    """A unit of consecutive layers that repeats; a repeated unit runs as one scanned body."""

    unit: tuple[LayerKind, ...]
    repeats: int


@lru_cache(maxsize=64)
def _segments(layers: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """`layers` cut so that the segments' units have the fewest layers in all; among those, into the fewest segments."""
    n = len(layers)
    best: dict[int, tuple[int, int, tuple[Segment, ...]]] = {n: (0, 0, ())}  # of the layers from there on
    for start in reversed(range(n)):
        cuts = []
        for size in range(1, n - start + 1):
            unit, end, repeats = layers[start : start + size], start, 0
            while layers[end : end + size] == unit:
                end, repeats = end + size, repeats + 1
                in_units, segments, rest = best[end]
                cuts.append((size + in_units, 1 + segments, (Segment(unit, repeats), *rest)))
        best[start] = min(cuts, key=lambda cut: cut[:2])
    return best[0][2]


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and its projector, in the names of the released `vision_config`."""

    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    vt_num_attention_heads: int
    vt_num_hidden_layers: int
    vt_hidden_size: int
    vt_intermediate_size: int
    qkv_hidden_size: int
    mm_hidden_size: int
    text_hidden_size: int
    merge_kernel_size: tuple[int, int] = (2, 2)
    projector_ln_eps: float = 1e-5
    media_placeholder_token_id: int = 0

    def __post_init__(self):
        for name, hint in typing.get_type_hints(VisionConfig).items():
            check_type(f"vision_config.{name}", getattr(self, name), hint)
        for name in (field.name for field in dataclasses.fields(self)):
            value = getattr(self, name)
            values = value if isinstance(value, tuple) else (value,)
            if name != "media_placeholder_token_id" and min(values) <= 0:
                raise ValueError(f"vision_config.{name}: found {value}, must be positive")
        if self.qkv_hidden_size % (4 * self.vt_num_attention_heads):
            raise ValueError(
                f"vision_config.qkv_hidden_size: found {self.qkv_hidden_size}, must be a multiple of "
                f"4 * vt_num_attention_heads={4 * self.vt_num_attention_heads}"
            )
        if self.vt_hidden_size % 2:
            raise ValueError(f"vision_config.vt_hidden_size: found {self.vt_hidden_size}, must be even")
        if self.mm_hidden_size != self.vt_hidden_size:
            raise ValueError(
                f"vision_config.mm_hidden_size: found {self.mm_hidden_size}, "
                f"must equal vt_hidden_size={self.vt_hidden_size}"
            )

    @property
    def head_dim(self) -> int:
        """Size of a query and key."""
        return self.qkv_hidden_size // self.vt_num_attention_heads

    @property
    def cell(self) -> int:
        """Patches that are joined in one token, of one frame."""
        return math.prod(self.merge_kernel_size)

    @property
    def joined_size(self) -> int:
        """Width of a cell's patches side by side, which the projector takes."""
        return self.cell * self.vt_hidden_size


@dataclass(frozen=True)
class ModelConfig:
    """A model of the family: Kimi K3 (`model_type="kimi_k3"`) or Kimi-Linear (`"kimi_linear"`).

    Sizes are counts of elements. `kda_layers` and `full_attn_layers` are 1-based, as released; everything
    else that counts layers is 0-based. `None` turns a part off: `q_lora_rank` (full-rank MLA queries),
    `routed_expert_hidden_size` (experts act on the model width), `attn_res_block_size` (plain residuals),
    `gate_lower_bound` (unbounded softplus decay), `vision` (text only).

    Raises `ValueError` naming the key, the value found and what would be right.

    Example:
        >>> cfg = ModelConfig.from_hf("checkpoint/config.json")
        >>> cfg.segments[2].repeats
        22
    """

    model_type: Literal["kimi_k3", "kimi_linear"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    # latent attention
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    # Kimi Delta Attention
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]
    kda_head_dim: int
    kda_num_heads: int
    # mixture of experts
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = False
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False
    routed_expert_hidden_size: int | None = None
    latent_moe_use_norm: bool = False
    moe_router_activation_func: Literal["sigmoid", "softmax"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    hidden_act: Literal["situ", "silu"] = "silu"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False  # lm_head is embed_tokens
    max_position_embeddings: int = 1048576
    quantized_experts: bool = False  # checkpoints hold the routed experts as packed MXFP4
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    text_eos_token_id: int | tuple[int, ...] | None = None  # of Kimi K3's text model, where that names another one
    vision: VisionConfig | None = None

    def __post_init__(self):
        for name, hint in typing.get_type_hints(ModelConfig).items():
            value = getattr(self, name)
            check_type(name, value, hint)
            if name in _ANY_SIGN or isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not (0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO)):
                right = "0 or more" if name in _MAY_BE_ZERO else "positive"
                off = " or None" if is_instance(None, hint) else ""
                raise ValueError(f"{name}: found {value}, must be {right}{off}")
        for name in ("kda_layers", "full_attn_layers"):  # sets, whatever the order they are written in
            object.__setattr__(self, name, tuple(sorted(getattr(self, name))))
        self._check_layers()
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token: found {self.num_experts_per_token}, "
                f"must be at most num_experts={self.num_experts}"
            )
        if self.num_experts % self.num_expert_group:
            raise ValueError(
                f"num_expert_group: found {self.num_expert_group}, must divide num_experts={self.num_experts}"
            )
        if not 1 <= self.topk_group <= self.num_expert_group:
            raise ValueError(
                f"topk_group: found {self.topk_group}, "
                f"must be between 1 and num_expert_group={self.num_expert_group}"
            )
        if self.num_experts == self.num_expert_group > self.topk_group:
            raise ValueError(
                f"num_expert_group: found {self.num_expert_group}, must leave two or more of "
                f"num_experts={self.num_experts} in a group, whose two best decide between groups"
            )
        if self.num_eligible_experts < self.num_experts_per_token:
            raise ValueError(
                f"topk_group: found {self.topk_group}, whose groups hold {self.num_eligible_experts} experts, "
                f"fewer than num_experts_per_token={self.num_experts_per_token}"
            )
        if self.gate_lower_bound is not None and not -math.inf < self.gate_lower_bound < 0:
            raise ValueError(f"gate_lower_bound: found {self.gate_lower_bound}, must be negative")
        latent = "routed_expert_hidden_size" if self.routed_expert_hidden_size else "hidden_size"
        for name in ("moe_intermediate_size", latent) if self.quantized_experts else ():
            if getattr(self, name) % MX_BLOCK:
                raise ValueError(
                    f"{name}: found {getattr(self, name)}, MXFP4 experts need a multiple of {MX_BLOCK}"
                )
        if self.vision is not None and self.vision.text_hidden_size != self.hidden_size:
            raise ValueError(
                f"vision_config.text_hidden_size: found {self.vision.text_hidden_size}, "
                f"must equal hidden_size={self.hidden_size}"
            )
        if self.vision is not None and not 0 <= self.vision.media_placeholder_token_id < self.vocab_size:
            raise ValueError(
                f"media_placeholder_token_id: found {self.vision.media_placeholder_token_id}, "
                f"must be a token of vocab_size={self.vocab_size}"
            )

    def _check_layers(self) -> None:
        """Each layer is listed once. A count that no list could match is not counted up to."""
        listed, n = sorted(self.kda_layers + self.full_attn_layers), self.num_hidden_layers
        if len(listed) == n and listed == list(range(1, n + 1)):
            return
        counts = Counter(listed)
        missing = itertools.islice((i for i in range(1, n + 1) if i not in counts), 10)
        wrong = sorted({*missing, *(i for i, count in counts.items() if not 1 <= i <= n or count > 1)})
        raise ValueError(
            f"kda_layers and full_attn_layers: layers {wrong[:10]} are missing, extra or listed twice; "
            f"together they must name each of 1..num_hidden_layers={n} once"
        )

    # ---- derived ---------------------------------------------------------------------------------------

    @property
    def num_eligible_experts(self) -> int:
        """Experts that a token chooses its own among: those of the groups that stay."""
        return self.topk_group * (self.num_experts // self.num_expert_group)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(kind.ffn == "moe" for kind in self.layers)

    @property
    def latent_size(self) -> int:
        """Width the routed experts act on."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the shared experts, which are one feed-forward network."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def num_attn_res_blocks(self) -> int:
        """Block vectors stored by the end of the stack (the running sum not counted)."""
        return -(-self.num_hidden_layers // self.attn_res_block_size) if self.attn_res_block_size else 0

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, in order."""
        mla = set(self.full_attn_layers)
        return tuple(
            LayerKind(
                "mla" if i + 1 in mla else "kda",
                "moe" if i >= self.first_k_dense_replace and i % self.moe_layer_freq == 0 else "dense",
            )
            for i in range(self.num_hidden_layers)
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a generation: those of `eos_token_id` and `text_eos_token_id`, one, several or none."""
        named = (self.eos_token_id, self.text_eos_token_id)
        each = (ids if isinstance(ids, tuple) else () if ids is None else (ids,) for ids in named)
        return frozenset(itertools.chain(*each))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The stack as units and repeats, with as few layers in units as can be: a compiler works on each of them.

        Kimi K3 gives its first layer, two KDA layers, the unit (MLA, KDA, KDA, KDA) 22 times, and two MLA layers.
        """
        return _segments(self.layers)

    def layer_address(self, i: int) -> tuple[int, int, int]:
        """(segment, repeat, place in unit) of 0-based layer i: where its parameters are stacked."""
        first = 0
        for s, (unit, repeats) in enumerate(self.segments):
            if i < first + repeats * len(unit):
                return s, (i - first) // len(unit), (i - first) % len(unit)
            first += repeats * len(unit)
        raise ValueError(f"layer {i}: the model has num_hidden_layers={self.num_hidden_layers}")

    def first_layers(self, n: int) -> ModelConfig:
        """The model cut off after its first n layers."""
        if not 1 <= n <= self.num_hidden_layers:
            raise ValueError(f"layers: found {n}, must be from 1 to num_hidden_layers={self.num_hidden_layers}")
        return dataclasses.replace(
            self,
            num_hidden_layers=n,
            kda_layers=tuple(i for i in self.kda_layers if i <= n),
            full_attn_layers=tuple(i for i in self.full_attn_layers if i <= n),
        )

    def mixer_parameters(self, mixer: str) -> int:
        """Parameters of one KDA or MLA layer's token mixer."""
        D, H = self.hidden_size, self.num_attention_heads
        if mixer == "mla":
            K, R, V, L = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.kv_lora_rank
            q = D * H * (K + R)
            if self.q_lora_rank:
                q = D * self.q_lora_rank + self.q_lora_rank + self.q_lora_rank * H * (K + R)
            gate = D * H * V if self.mla_use_output_gate else 0
            return q + D * (L + R) + L + L * H * (K + V) + gate + H * V * D
        H, K = self.kda_num_heads, self.kda_head_dim
        gate = D * H * K if self.use_full_rank_gate else D * K + K * H * K
        convolutions = 3 * H * K * self.short_conv_kernel_size
        return 4 * D * H * K + convolutions + D * H + D * K + K * H * K + H + H * K + gate + K

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.latent_size * self.moe_intermediate_size

    def _ffn_parameters(self, ffn: str, experts: int) -> int:
        D = self.hidden_size
        if ffn == "dense":
            return 3 * D * self.intermediate_size
        latent = 2 * D * self.latent_size if self.routed_expert_hidden_size else 0
        norm = self.latent_size if self.latent_moe_use_norm else 0
        router = D * self.num_experts + self.num_experts
        shared = 3 * D * self.shared_intermediate_size
        return router + latent + norm + shared + experts * self.expert_parameters

    def layer_parameters(self, kind: LayerKind, experts: int | None = None) -> int:
        """Parameters of one layer with `experts` routed experts (all of them by default)."""
        attn_res = 4 * self.hidden_size if self.attn_res_block_size else 0
        ffn = self._ffn_parameters(kind.ffn, self.num_experts if experts is None else experts)
        return self.mixer_parameters(kind.mixer) + ffn + 2 * self.hidden_size + attn_res

    @property
    def num_parameters(self) -> int:
        """Text parameters, both embeddings included; a shared one once."""
        embeddings = 1 if self.tie_word_embeddings else 2
        ends = (embeddings * self.vocab_size + 1 + (2 if self.attn_res_block_size else 0)) * self.hidden_size
        return ends + sum(self.layer_parameters(kind) for kind in self.layers)

    @property
    def num_active_parameters(self) -> int:
        """Text parameters one token uses, the input embedding not counted (a shared one is, as the head).

        As published: Kimi-Linear's figure counts the final norm, Kimi K3's no vector behind the last layer.
        """
        ends = (self.vocab_size + (0 if self.attn_res_block_size else 1)) * self.hidden_size
        return ends + sum(self.layer_parameters(kind, self.num_experts_per_token) for kind in self.layers)

    # ---- released format -------------------------------------------------------------------------------

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelConfig:
        """Reads a released `config.json`: a path to it, to its folder, or its content.

        Raises `ValueError` for a file that cannot be read, a missing or unknown key, a value of another type,
        and a setting this model does not implement.
        """
        raw = source if isinstance(source, Mapping) else released.read_file(source)
        return cls(**released.values(raw, cls, VisionConfig))

    def to_hf(self) -> dict[str, Any]:
        """The released `config.json` this configuration stands for; `from_hf` inverts it."""
        return released.written(self)
