"""The released `config.json`: read into the values of a model's description, and written from it.

Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3jax import strict_json
from k3jax.checks import check_object, check_type
from k3jax.dialects import released_config
from k3jax.paths import check_kind, expand

MX_BLOCK = 32  # values that share one microscaling exponent
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

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
    "text_eos_token_id",
    "vision",
}

# Settings with one meaning in every released model; any other value is refused.
_FIXED = {
    "mla_use_nope": True,
    "use_grouped_topk": True,
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}

# Settings of other programs for what no released model has; they are not written.
_ABSENT = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "num_mtp_layers": 0,
}

# Keys that say nothing about the model: generation defaults, bookkeeping of the library that wrote the file.
_IGNORED = set(
    "add_cross_attention architectures attn_implementation auto_map aux_loss_alpha bad_words_ids "
    "begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id "
    "diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size ep_size "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id head_dim "
    "id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length "
    "model_max_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_attentions output_hidden_states output_router_logits output_scores prefix pretraining_tp "
    "problem_type pruned_heads remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate rope_interleave rope_parameters rope_scaling rope_theta router_aux_loss_coef "
    "sep_token_id seq_aux suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version "
    "typical_p use_bfloat16 use_cache".split()
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


def read_file(path: str | Path) -> dict[str, Any]:
    """Content of a released `config.json`: a path to it, or to its folder."""
    path = Path(expand(path))
    path = path / "config.json" if path.is_dir() else path
    check_kind(path)
    try:
        raw = strict_json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a released config.json was expected") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    check_object(str(path), raw)
    return raw


def values(raw: Mapping[str, Any], model: type, vision: type) -> dict[str, Any]:
    """What a `config.json` says, as values of the fields of the dataclasses `model` and `vision`."""
    model_type = raw.get("model_type")
    if model_type not in ("kimi_k3", "kimi_linear"):
        raise ValueError(f"model_type: found {model_type!r}, must be 'kimi_k3' or 'kimi_linear'")
    if model_type == "kimi_k3" and "text_config" not in raw:
        raise ValueError("text_config: missing; a kimi_k3 config holds its text model there")
    outer = dict(raw) if model_type == "kimi_k3" else {}
    text = outer.pop("text_config", raw)
    check_object("text_config", text)
    text = released_config(text)
    tower = outer.pop("vision_config", None)
    _check_known(outer, _OUTER_KEYS, "")
    if "linear_attn_config" not in text:
        raise ValueError("linear_attn_config: missing; it names the KDA layers and their sizes")
    linear = text.pop("linear_attn_config")
    check_object("linear_attn_config", linear)
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

    hints = typing.get_type_hints(model)
    found = _fields_of_text(text, model, hints) | _fields_of_linear(linear, hints)
    _check_fixed(text, _FIXED | _ABSENT, "")
    heads = text.pop("num_key_value_heads", found["num_attention_heads"])
    if heads != found["num_attention_heads"] or type(heads) is not int:
        raise ValueError(
            f"num_key_value_heads: found {heads!r}, must equal num_attention_heads={found['num_attention_heads']}"
        )
    _check_known(text, _IGNORED, "text_config." if model_type == "kimi_k3" else "")
    inner = found.get("eos_token_id")
    found |= {key: _tuple_of(outer[key]) for key in TOKEN_IDS if key in outer}
    if found.get("eos_token_id") != inner:
        found["text_eos_token_id"] = inner
    if quantization is not None:
        check_object("quantization_config", quantization)
        if quantization.get("format") != "mxfp4-pack-quantized":
            raise ValueError(
                f"quantization_config.format: found {quantization.get('format')!r}, "
                "only 'mxfp4-pack-quantized' is implemented"
            )
    found |= {"model_type": model_type, "quantized_experts": quantization is not None}
    if tower is not None:
        found["vision"] = _vision(tower, outer.get("media_placeholder_token_id", 0), vision)
    return found


def _fields_of_text(text: dict[str, Any], model: type, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Takes the model's fields out of `text`."""
    found = {}
    for field in dataclasses.fields(model):
        if field.name in _ELSEWHERE:
            continue
        if field.name in text:
            value = text.pop(field.name)
            found[field.name] = _tuple_of(value) if field.name in TOKEN_IDS else value
            check_type(field.name, found[field.name], hints[field.name])
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{field.name}: missing from the config")
    return found


def _fields_of_linear(linear: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    names = {"head_dim": "kda_head_dim", "num_heads": "kda_num_heads"}
    found = {}
    for key in _LINEAR_KEYS:
        if key in linear:
            name, value = names.get(key, key), _tuple_of(linear[key])
            check_type(f"linear_attn_config.{key}", value, hints[name])
            found[name] = value
        elif key not in _LINEAR_OPTIONAL:
            raise ValueError(f"linear_attn_config.{key}: missing from the config")
    _check_known(linear, _LINEAR_KEYS, "linear_attn_config.")
    return found


def _vision(found: Mapping[str, Any], placeholder: int, vision: type) -> Any:
    check_object("vision_config", found)
    found = {key: _tuple_of(value) for key, value in found.items()}
    _check_fixed(found, _VISION_FIXED, "vision_config.")
    fields = {field.name: field for field in dataclasses.fields(vision)}
    _check_known(found, fields, "vision_config.")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in found:
            raise ValueError(f"vision_config.{name}: missing from the config")
    found = {name: value for name, value in found.items() if name in fields}
    return vision(**found, media_placeholder_token_id=placeholder)


def written(cfg: Any) -> dict[str, Any]:
    """The released `config.json` that a model's description stands for; `values` inverts it."""
    text: dict[str, Any] = {
        field.name: _list_of(getattr(cfg, field.name))
        for field in dataclasses.fields(cfg)
        if field.name not in _ELSEWHERE
    }
    linear = {
        "full_attn_layers": list(cfg.full_attn_layers),
        "kda_layers": list(cfg.kda_layers),
        "head_dim": cfg.kda_head_dim,
        "num_heads": cfg.kda_num_heads,
        "short_conv_kernel_size": cfg.short_conv_kernel_size,
        "use_full_rank_gate": cfg.use_full_rank_gate,
    }
    if cfg.gate_lower_bound is not None:
        linear["gate_lower_bound"] = cfg.gate_lower_bound
    text |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **_FIXED}
    text |= {"num_key_value_heads": cfg.num_attention_heads, "linear_attn_config": linear}
    if cfg.text_eos_token_id is not None:
        text["eos_token_id"] = _list_of(cfg.text_eos_token_id)
    if cfg.quantized_experts:
        text["quantization_config"] = _QUANTIZATION
    if cfg.model_type == "kimi_linear":
        return text
    outer: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": cfg.tie_word_embeddings,
        "bos_token_id": cfg.bos_token_id,
        "eos_token_id": _list_of(cfg.eos_token_id),
        "pad_token_id": cfg.pad_token_id,
        "text_config": text,
    }
    if cfg.vision is not None:
        vision = dataclasses.asdict(cfg.vision)
        outer["media_placeholder_token_id"] = vision.pop("media_placeholder_token_id")
        vision["merge_kernel_size"] = list(cfg.vision.merge_kernel_size)
        outer["vision_config"] = vision | _VISION_FIXED
    return outer


def _check_fixed(found: dict[str, Any], fixed: Mapping[str, Any], prefix: str) -> None:
    """Takes settings that have one meaning alone out of `found`."""
    for key, only in fixed.items():
        value = found.pop(key, only)
        if value != only or isinstance(value, bool) is not isinstance(only, bool):  # 1 is not True, 0 is 0.0
            raise ValueError(f"{prefix}{key}: found {value!r}, only {only!r} is implemented")


def _check_known(found: Mapping[str, Any], known, prefix: str) -> None:
    for key in found:
        if key not in known and not key.startswith("_"):  # such as _attn_implementation: of the program that wrote it
            raise ValueError(
                f"{prefix}{key}: unknown config key (value {found[key]!r}); remove it or correct its name"
            )


def _tuple_of(value: Any) -> Any:
    """JSON has lists where a configuration, to be hashable, has tuples."""
    return tuple(value) if isinstance(value, list) else value


def _list_of(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
