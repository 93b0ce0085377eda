"""What other programs call the things of a checkpoint: keys of `config.json` and names of tensors, in tables.

What is read becomes the released form before anything else sees it, and what is written for another program is made from
that form. Transformers (5.24) writes Kimi-Linear its own way: layers as lists of types, sizes of KDA beside those of the
model, a dense layer's matrices under the name of the experts. Nothing here imports JAX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from k3jax.checks import check_object, shown

# ---- keys of config.json ---------------------------------------------------------------------------------------

# Another name of a key, and the released one.
_ALIASES = {
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
# Sizes of KDA, which the release keeps in linear_attn_config.
_LINEAR = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
_MIXERS = {"linear_attention": "kda_layers", "full_attention": "full_attn_layers"}
_FFNS = ("dense", "sparse")
_TRANSFORMERS = {"layer_types", "mlp_layer_types", *_LINEAR}  # keys that it alone writes

# Fields whose one value Transformers implements, and what it lacks where there is another.
_LACKS = {
    "model_type": ("kimi_linear", "Kimi K3"),
    "attn_res_block_size": (None, "Attention Residuals"),
    "mla_use_output_gate": (False, "output gates of latent attention"),
    "gate_lower_bound": (None, "a bounded decay"),
    "use_full_rank_gate": (False, "full-rank output gates of KDA"),
    "routed_expert_hidden_size": (None, "experts on a latent"),
    "latent_moe_use_norm": (False, "the norm of experts' latents"),
    "moe_router_activation_func": ("sigmoid", "routers with softmax"),
    "hidden_act": ("silu", "SiTU"),
    "vision": (None, "the vision tower"),
    "quantized_experts": (False, "packed MXFP4 experts (experts='bf16' writes their values)"),
}
# Fields that it calls as the release does.
_KEPT = """
    bos_token_id hidden_act hidden_size initializer_range intermediate_size kv_lora_rank model_type moe_intermediate_size
    moe_renormalize num_attention_heads num_expert_group num_experts num_experts_per_token num_hidden_layers
    num_shared_experts pad_token_id q_lora_rank qk_nope_head_dim qk_rope_head_dim rms_norm_eps routed_scaling_factor
    tie_word_embeddings topk_group v_head_dim vocab_size
""".split()


def released_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's configuration, in whichever dialect, with the released keys.

    Raises `ValueError` where two keys contradict each other, and for a stack that no released keys describe.

    Example:
        >>> released_config({"n_group": 2})
        {'num_expert_group': 2}
    """
    text = dict(found)
    for alias, name in _ALIASES.items():
        if alias in text:
            _same(text, name, text.pop(alias), alias)
    if "model_max_length" in text:  # says nothing about the model, so that it need not agree
        text.setdefault("max_position_embeddings", text.pop("model_max_length"))
        text.pop("model_max_length", None)
    if "qk_head_dim" in text:
        parts = text.get("qk_nope_head_dim"), text.get("qk_rope_head_dim")
        size = text.pop("qk_head_dim")
        if not all(isinstance(part, int) for part in parts) or size != sum(parts):
            raise ValueError(
                f"qk_head_dim: found {shown(size, repr)}, must be the sum of qk_nope_head_dim={parts[0]} and "
                f"qk_rope_head_dim={parts[1]}"
            )
    if not _TRANSFORMERS & text.keys():
        return text
    linear = text.get("linear_attn_config", {})
    check_object("linear_attn_config", linear)
    linear = text["linear_attn_config"] = dict(linear)
    for key, name in _LINEAR.items():
        if key in text:
            _same(linear, name, text.pop(key), key)
    if "layer_types" in text:
        types = _list(text, "layer_types", tuple(_MIXERS))
        for kind, name in _MIXERS.items():
            listed = [i for i, found in enumerate(types, 1) if found == kind]
            if isinstance(linear.get(name), list):
                linear[name] = sorted(linear[name])
            _same(linear, name, listed, "layer_types")
    if "mlp_layer_types" in text:
        first, freq = _sparse(_list(text, "mlp_layer_types", _FFNS), text)
        text |= {"first_k_dense_replace": first, "moe_layer_freq": freq}
    # Transformers gives Kimi-Linear a head of its own, saves it and loads it, whatever this key says.
    text["tie_word_embeddings"] = False
    return text


def transformers_config(cfg: Any, dtype: str) -> dict[str, Any]:
    """The `config.json` that Transformers writes for a model; `released_config` inverts it.

    Raises `ValueError` naming all that the model has and Transformers has not.
    """
    if lacks := [
        f"{what} ({name}={shown(value, repr)})"
        for name, (only, what) in _LACKS.items()
        if (value := getattr(cfg, name)) != only and value is not only
    ]:
        raise ValueError(f"layout: Transformers lacks {', '.join(lacks)}; 'released' has all")
    config = {name: getattr(cfg, name) for name in _KEPT}
    ids = cfg.eos_token_id
    mixers = {"kda": "linear_attention", "mla": "full_attention"}
    return config | {
        "architectures": ["KimiLinearForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "eos_token_id": list(ids) if isinstance(ids, tuple) else ids,
        "head_dim": cfg.qk_rope_head_dim,
        "linear_num_heads": cfg.kda_num_heads,
        "linear_head_dim": cfg.kda_head_dim,
        "linear_conv_kernel_dim": cfg.short_conv_kernel_size,
        "layer_types": [mixers[kind.mixer] for kind in cfg.layers],
        "mlp_layer_types": ["dense" if kind.ffn == "dense" else "sparse" for kind in cfg.layers],
        "model_max_length": cfg.max_position_embeddings,
        "num_key_value_heads": cfg.num_attention_heads,
        "qk_head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
        "use_cache": True,
    }


def _same(where: dict[str, Any], name: str, value: Any, key: str) -> None:
    """Sets `name` to what `key` says; what it held already must be the same."""
    before = where.setdefault(name, value)
    if before != value:
        raise ValueError(f"{key}: found {shown(value, repr)}, and {shown(before, repr)} as {name}; both must say the same")


def _list(text: dict[str, Any], key: str, known: tuple[str, ...]) -> list[str]:
    """Takes a list with a word for each layer out of `text`."""
    found = text.pop(key)
    n = text.get("num_hidden_layers")
    if not isinstance(found, list) or len(found) != n or not all(kind in known for kind in found):
        raise ValueError(
            f"{key}: found {shown(found, repr)}, must be a list of num_hidden_layers={n} times {' or '.join(known)}"
        )
    return found


def _sparse(types: list[str], text: Mapping[str, Any]) -> tuple[int, int]:
    """(first_k_dense_replace, moe_layer_freq) of a stack: what the config says, or the first that fit."""
    n = len(types)
    dense = next((i for i, kind in enumerate(types) if kind == "sparse"), n)
    options = [(dense, freq) for freq in range(1, n + 1)]
    if "first_k_dense_replace" in text:
        options = [(text["first_k_dense_replace"], text.get("moe_layer_freq", 1))]
    for first, freq in options:
        if isinstance(first, int) and isinstance(freq, int) and freq > 0:
            if types == ["sparse" if i >= first and i % freq == 0 else "dense" for i in range(n)]:
                return first, freq
    right = "dense layers, then sparse ones, all of them or each whose number a step divides"
    if "first_k_dense_replace" in text:
        right = "as first_k_dense_replace={} and moe_layer_freq={} say".format(*options[0])
    raise ValueError(f"mlp_layer_types: found {shown(types, repr)}, must be {right}")


# ---- names of tensors ------------------------------------------------------------------------------------------

_DENSE = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.weight)$")


def released_name(name: str) -> str:
    """The released name of a tensor.

    Example:
        >>> released_name("model.layers.0.block_sparse_moe.up_proj.weight")
        'model.layers.0.mlp.up_proj.weight'
    """
    return _DENSE.sub(r".mlp.\1", name)


def transformers_name(name: str) -> str:
    """The name that Transformers gives a tensor; `released_name` inverts it."""
    return name.replace(".mlp.", ".block_sparse_moe.")
