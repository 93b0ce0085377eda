"""The forms a checkpoint is written in: its configuration, and names and types of its tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from k3jax.config import ModelConfig
from k3jax.dialects import transformers_config, transformers_name
from k3jax.hf.names import Leaf, table

_WIDE = (".gate.weight",)  # matrices that Transformers keeps in float32 whatever the model is in


class Form(NamedTuple):
    """How a checkpoint is written."""

    layout: Literal["released", "transformers"] = "released"
    """As released, or as Transformers saves it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of all but packed experts and what the layout keeps in float32."""
    experts: Literal["packed", "bf16"] = "packed"
    """Quantised experts as MXFP4, or as the values that MXFP4 stands for; no matter where they are not quantised."""

    def check(self) -> None:
        """Raises `ValueError` for a choice that there is not."""
        for name, choices in (
            ("layout", ("released", "transformers")),
            ("dtype", ("bfloat16", "float32")),
            ("experts", ("packed", "bf16")),
        ):
            if (found := getattr(self, name)) not in choices:
                raise ValueError(f"{name}: found {found!r}, must be {' or '.join(map(repr, choices))}")

    def model(self, cfg: ModelConfig) -> ModelConfig:
        """What the checkpoint says it holds of a model."""
        return replace(cfg, quantized_experts=False) if self.experts == "bf16" else cfg

    def config(self, cfg: ModelConfig) -> dict[str, Any]:
        """Its `config.json`. Raises `ValueError` for a model that the layout has no words for."""
        if self.layout == "transformers":
            return transformers_config(self.model(cfg), self.dtype)
        config = self.model(cfg).to_hf()
        return config | {"dtype": self.dtype} if self.dtype == "float32" else config

    def table(self, cfg: ModelConfig) -> list[Leaf]:
        """Its tensors; two may hold the same leaf."""
        leaves = table(self.model(cfg))
        routed = (lambda leaf: leaf.experts and cfg.quantized_experts and self.experts == "bf16")
        if self.dtype == "float32":
            leaves = [replace(leaf, dtype="F32") if leaf.dtype == "BF16" and not routed(leaf) else leaf for leaf in leaves]
        if self.layout == "released":
            return leaves
        if cfg.tie_word_embeddings:  # it has a head of its own all the same
            (embedding,) = (leaf for leaf in leaves if leaf.template == "model.embed_tokens.weight")
            leaves.append(replace(embedding, template="lm_head.weight"))
        return [
            replace(leaf, template=transformers_name(leaf.template), dtype="F32" if leaf.template.endswith(_WIDE) else leaf.dtype)
            for leaf in leaves
        ]
