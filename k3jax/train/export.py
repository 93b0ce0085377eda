"""Between a run's checkpoints and the released layout."""

from __future__ import annotations

from pathlib import Path

from k3jax.config import ModelConfig
from k3jax.hf import load_hf, save_hf
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.loop import restore_weights


def export_checkpoint(source: str | Path, destination: str | Path) -> None:
    """Writes the weights of a run's checkpoint as a released checkpoint: bfloat16, experts packed to MXFP4.

    A model trained with QAT gives the same logits, bit for bit, when its export runs packed.
    """
    cfg, variables, _ = restore_weights(source)
    save_hf(destination, cfg, variables)


def import_checkpoint(source: str | Path, destination: str | Path) -> None:
    """Writes a released checkpoint as one that `resume` can start a run from: float32 weights, step 0."""
    cfg = ModelConfig.from_hf(source)
    variables = load_hf(source, cfg)
    weights = {name: variables[name] for name in ("params", "router")}
    with Checkpoints(Path(destination) / "checkpoints") as checkpoints:
        checkpoints.save(0, weights, {"kind": "weights", "model": cfg.to_hf()}, wait=True)
