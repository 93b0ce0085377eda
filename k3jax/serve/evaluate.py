"""Losses of a checkpoint on data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from k3jax.data.encoding import Encoding
from k3jax.data.open import open_held_out
from k3jax.data.tokenize import bar
from k3jax.paths import expand
from k3jax.run_config import DataConfig, RunConfig
from k3jax.serve.generate import load_model, load_text
from k3jax.sharding import make_mesh
from k3jax.train.checkpoint import open_model
from k3jax.train.evaluate import Evaluation, Score
from k3jax.train.loop import open_data

SEQ_LEN = 4096


def evaluate(
    checkpoint: str | Path,
    paths: Sequence[str] = (),
    batch_size: int = 8,
    rows: int | None = None,
    experts: str = "packed",
    mxfp8_inputs: bool = True,
    seq_len: int | None = None,
    **encoding,
) -> dict[str, Score]:
    """Scores by source of a released checkpoint, an import or a run; of several sources, of all together as "all" too.

    Without `paths`, of a run, on the documents that it held out itself. `encoding`: `learn` and `thinking`, as in
    `Encoding`.

    Raises:
        ValueError: one line, for no checkpoint, no data, or data in which nothing is learnt.
    """
    cfg, tokenizer, folder = load_text(checkpoint)
    meta = {} if (Path(expand(checkpoint)) / "config.json").is_file() else open_model(checkpoint)[3]
    made = meta.get("data")
    if not paths:
        if made is None:
            raise ValueError(f"--data: none given, must be at least one: {checkpoint} is no run with held-out data of its own")
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in made.items()}
        held_out = open_data(RunConfig(cfg, DataConfig(**fields)))[1]
    else:
        length = seq_len or (made or {}).get("seq_len") or min(SEQ_LEN, cfg.max_position_embeddings)
        with bar() as report:
            held_out = open_held_out(
                paths, folder, Encoding(length, **encoding), batch_size, workers=os.cpu_count() or 1, report=report
            )
    model, variables = load_model(checkpoint, experts, mxfp8_inputs)
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        evaluation = Evaluation(model, mesh, tokenizer)
        scores = evaluation(variables["params"], variables.get("router", {}), held_out, rows)
    if len(scores) > 1:
        scores["all"] = sum(scores.values(), Score(0.0, 0, 0))
    return scores
