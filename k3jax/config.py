"""Model configuration of the Kimi K3 family: the one description everything else derives from.

Field names are those of the released `config.json`. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from k3jax import strict_json
from k3jax.paths import check_kind, expand

MX_BLOCK = 32  # values that share one microscaling exponent
LARGEST = 2**31 - 1  # what is counted on devices is counted in int32
_SINGLE = 2.0**-149, (2 - 2.0**-23) * 2.0**127  # smallest and largest positive float32


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
            _check_type(f"vision_config.{name}", getattr(self, name), hint)
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
    vision: VisionConfig | None = None

    def __post_init__(self):
        for name, hint in typing.get_type_hints(ModelConfig).items():
            value = getattr(self, name)
            _check_type(name, value, hint)
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
        """Tokens that end a generation: `eos_token_id`, one, several or none."""
        ids = self.eos_token_id
        return frozenset(ids if isinstance(ids, tuple) else () if ids is None else (ids,))

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
        if isinstance(source, Mapping):
            raw = source
        else:
            path = Path(expand(source))
            path = path / "config.json" if path.is_dir() else path
            check_kind(path)
            try:
                raw = strict_json.loads(path.read_text(encoding="utf-8"))
            except FileNotFoundError:
                raise ValueError(f"{path}: no such file; a released config.json was expected") from None
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
            except ValueError as error:  # not JSON, or not even text
                raise ValueError(f"{path}: not valid JSON ({error})") from None
            _check_object(str(path), raw)
        model_type = raw.get("model_type")
        if model_type not in ("kimi_k3", "kimi_linear"):
            raise ValueError(f"model_type: found {model_type!r}, must be 'kimi_k3' or 'kimi_linear'")
        if model_type == "kimi_k3" and "text_config" not in raw:
            raise ValueError("text_config: missing; a kimi_k3 config holds its text model there")
        outer = dict(raw) if model_type == "kimi_k3" else {}
        text = outer.pop("text_config", raw)
        _check_object("text_config", text)
        text = dict(text)
        vision = outer.pop("vision_config", None)
        _check_known(outer, _OUTER_KEYS, "")
        if "linear_attn_config" not in text:
            raise ValueError("linear_attn_config: missing; it names the KDA layers and their sizes")
        linear = text.pop("linear_attn_config")
        _check_object("linear_attn_config", linear)
        tied = outer.get("tie_word_embeddings")
        if "tie_word_embeddings" in outer and text.setdefault("tie_word_embeddings", tied) is not tied:
            raise ValueError(
                f"tie_word_embeddings: found {tied!r}, and {text['tie_word_embeddings']!r} as "
                "text_config.tie_word_embeddings; both must say the same"
            )
        if text.get("num_shared_experts", 0) is None:
            text["num_shared_experts"] = 0
        quantization = text.pop("quantization_config", None)
        if quantization is None:
            quantization = outer.get("quantization_config")

        values: dict[str, Any] = {}
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in _ELSEWHERE:
                continue
            if field.name in text:
                value = text.pop(field.name)
                values[field.name] = _tuple_of(value) if field.name in _TOKEN_IDS else value
                _check_type(field.name, values[field.name], hints[field.name])
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{field.name}: missing from the config")
        linear_names = {"head_dim": "kda_head_dim", "num_heads": "kda_num_heads"}
        for key in _LINEAR_KEYS:
            if key in linear:
                name, value = linear_names.get(key, key), _tuple_of(linear[key])
                _check_type(f"linear_attn_config.{key}", value, hints[name])
                values[name] = value
            elif key not in _LINEAR_OPTIONAL:
                raise ValueError(f"linear_attn_config.{key}: missing from the config")
        _check_known(linear, _LINEAR_KEYS, "linear_attn_config.")
        for key, only in _FIXED.items():
            found = text.pop(key, only)
            if found != only or type(found) is not type(only):  # 1 is not True
                raise ValueError(f"{key}: found {found!r}, only {only!r} is implemented")
        heads = text.pop("num_key_value_heads", values["num_attention_heads"])
        if heads != values["num_attention_heads"] or type(heads) is not int:
            raise ValueError(
                f"num_key_value_heads: found {heads!r}, "
                f"must equal num_attention_heads={values['num_attention_heads']}"
            )
        _check_known(text, _IGNORED, "text_config." if model_type == "kimi_k3" else "")
        values |= {key: _tuple_of(outer[key]) for key in _TOKEN_IDS if key in outer}
        if quantization is not None:
            _check_object("quantization_config", quantization)
            if quantization.get("format") != "mxfp4-pack-quantized":
                raise ValueError(
                    f"quantization_config.format: found {quantization.get('format')!r}, "
                    "only 'mxfp4-pack-quantized' is implemented"
                )
        values |= {"model_type": model_type, "quantized_experts": quantization is not None}
        if vision is not None:
            values["vision"] = _vision_from_hf(vision, outer.get("media_placeholder_token_id", 0))
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The released `config.json` this configuration stands for; `from_hf` inverts it."""
        text: dict[str, Any] = {
            field.name: _list_of(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in _ELSEWHERE
        }
        linear = {
            "full_attn_layers": list(self.full_attn_layers),
            "kda_layers": list(self.kda_layers),
            "head_dim": self.kda_head_dim,
            "num_heads": self.kda_num_heads,
            "short_conv_kernel_size": self.short_conv_kernel_size,
            "use_full_rank_gate": self.use_full_rank_gate,
        }
        if self.gate_lower_bound is not None:
            linear["gate_lower_bound"] = self.gate_lower_bound
        text |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **_FIXED}
        text |= {"num_key_value_heads": self.num_attention_heads, "linear_attn_config": linear}
        if self.quantized_experts:
            text["quantization_config"] = _QUANTIZATION
        if self.model_type == "kimi_linear":
            return text
        outer: dict[str, Any] = {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": _list_of(self.eos_token_id),
            "pad_token_id": self.pad_token_id,
            "text_config": text,
        }
        if self.vision is not None:
            vision = dataclasses.asdict(self.vision)
            outer["media_placeholder_token_id"] = vision.pop("media_placeholder_token_id")
            vision["merge_kernel_size"] = list(self.vision.merge_kernel_size)
            outer["vision_config"] = vision | _VISION_FIXED
        return outer


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Numbers that need not be positive.
_ANY_SIGN = ("gate_lower_bound", *_TOKEN_IDS)
_MAY_BE_ZERO = ("first_k_dense_replace", "initializer_range", "num_shared_experts")

# Settings of linear_attn_config, and those of them a config may leave out.
_LINEAR_KEYS = (
    "kda_layers",
    "full_attn_layers",
    "head_dim",
    "num_heads",
    "short_conv_kernel_size",
    "gate_lower_bound",
    "use_full_rank_gate",
)
_LINEAR_OPTIONAL = ("gate_lower_bound", "use_full_rank_gate", "short_conv_kernel_size")

# Fields that the released format keeps outside the text config's top level.
_ELSEWHERE = {
    "model_type",
    "kda_layers",
    "full_attn_layers",
    "kda_head_dim",
    "kda_num_heads",
    "short_conv_kernel_size",
    "gate_lower_bound",
    "use_full_rank_gate",
    "quantized_experts",
    "vision",
}

# Settings with one meaning in every released model; any other value is refused.
_FIXED = {
    "mla_use_nope": True,
    "use_grouped_topk": True,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}

# Keys that say nothing about the model: generation defaults, bookkeeping of the library that wrote the file.
_IGNORED = set(
    "_name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens "
    "chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample "
    "dtype torch_dtype early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id head_dim id2label is_decoder is_encoder_decoder "
    "label2id length_penalty max_length min_length model_max_length model_type no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_scores "
    "prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate rope_scaling rope_theta sep_token_id suppress_tokens task_specific_params "
    "temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript "
    "transformers_version typical_p use_bfloat16 use_cache".split()
)
_OUTER_KEYS = {
    "model_type",
    "architectures",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "ignore_index",
    "image_placeholder",
    "media_placeholder_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "transformers_version",
    "quantization_config",
}

_VISION_FIXED = {
    "pos_emb_type": "divided_fixed",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
    "norm_type": "rmsnorm",
    "attn_bias": False,
    "patch_embed_proj_bias": False,
    "mlp_type": "mlp2",
    "linear_bias": False,
    "activation_func": "gelu_pytorch_tanh",
    "pos_emb_interpolation_mode": "bilinear",
}

_QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": MX_BLOCK,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def is_instance(value: Any, hint: Any) -> bool:
    """Whether a value is of the type a field's annotation names; integers are numbers, a bool is neither."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(is_instance(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        kinds = args[:1] * len(value) if args[-1] is Ellipsis and isinstance(value, tuple) else args
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(is_instance, value, kinds))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def describe_type(hint: Any) -> str:
    """The type a field's annotation names, as an error message says it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, args))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        count = "values" if args[-1] is Ellipsis else f"{len(args)} values"
        return f"a tuple of {count}, each {describe_type(args[0])}"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "text", types.NoneType: "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def beyond(value: Any) -> str | None:
    """What would be right of a number that its type on the devices, int32 or float32, does not hold; NaN is none."""
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"from -{LARGEST} to {LARGEST}"
    if isinstance(value, float) and value and not _SINGLE[0] <= abs(value) <= _SINGLE[1]:
        return "a finite number that float32 can hold"
    return None


def shown(value: Any, write: Callable[[Any], str] = str) -> str:
    """A value in a message, not longer than a line can take."""
    try:
        text = write(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_type(key: str, value: Any, hint: Any) -> None:
    if not is_instance(value, hint):
        raise ValueError(f"{key}: found {shown(value, repr)}, must be {describe_type(hint)}")
    for number in value if isinstance(value, tuple) else (value,):
        if right := beyond(number):
            raise ValueError(f"{key}: found {shown(number)}, must be {right}")


def _check_object(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: found {value!r:.60}, must be a JSON object")


def _check_known(found: Mapping[str, Any], known, prefix: str) -> None:
    for key in found:
        if key not in known:
            raise ValueError(
                f"{prefix}{key}: unknown config key (value {found[key]!r}); remove it or correct its name"
            )


def _tuple_of(value: Any) -> Any:
    """JSON has lists where a configuration, to be hashable, has tuples."""
    return tuple(value) if isinstance(value, list) else value


def _list_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _vision_from_hf(vision: Mapping[str, Any], placeholder: int) -> VisionConfig:
    _check_object("vision_config", vision)
    vision = {key: _tuple_of(value) for key, value in vision.items() if not key.startswith("_")}
    for key, only in _VISION_FIXED.items():
        found = vision.pop(key, only)
        if found != only or type(found) is not type(only):
            raise ValueError(f"vision_config.{key}: found {found!r}, only {only!r} is implemented")
    fields = {field.name: field for field in dataclasses.fields(VisionConfig)}
    _check_known(vision, fields, "vision_config.")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in vision:
            raise ValueError(f"vision_config.{name}: missing from the config")
    return VisionConfig(**vision, media_placeholder_token_id=placeholder)
