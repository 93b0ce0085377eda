"""Losses of a checkpoint on data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from k3jax.config import ModelConfig
from k3jax.data.open import open_all
from k3jax.data.packed import PackedDataset
from k3jax.data.tokenize import bar
from k3jax.paths import expand
from k3jax.run_config import DataConfig, RunConfig
from k3jax.serve.generate import load_model, load_text
from k3jax.sharding import make_mesh
from k3jax.text import Tokenizer
from k3jax.train.checkpoint import open_model
from k3jax.train.data import RowDataset
from k3jax.train.evaluate import Evaluation, Score, total
from k3jax.train.images import reader
from k3jax.train.loop import encoding, open_data

SEQ_LEN = 4096  # of a row, for a model that was trained elsewhere


def evaluate(
    checkpoint: str | Path,
    paths: Sequence[str] = (),
    batch_size: int = 8,
    rows: int | None = None,
    experts: str = "packed",
    mxfp8_inputs: bool = True,
    **given,
) -> dict[str, Score]:
    """Scores by source of a released checkpoint, an import or a run; of several sources, of all together as "all" too.

    Args:
        paths: sources as of `data.paths`, all of whose documents are taken. Without, the documents that a run held out itself.
        rows: about so many, spread evenly; all by default.
        given: `seq_len`, `learn` and `thinking` as in `Encoding`, where they are not to be those of the run or the corpus.

    Raises:
        ValueError: one line, for no checkpoint, no data, data in which nothing is learnt, or a corpus that was made in another way.

    Example:
        >>> evaluate("runs/chat/run", ["notes.jsonl"])["notes.jsonl"].byte_loss
        0.53
    """
    cfg, tokenizer, folder = load_text(checkpoint)
    is_released = (Path(expand(checkpoint)) / "config.json").is_file()
    made = None if is_released else open_model(checkpoint)[3].get("data")
    data = made and DataConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in made.items()})
    if paths:
        held_out = _open(paths, cfg, tokenizer, folder, data, batch_size, given)
    elif data:
        if data.tokenizer:
            data = dataclasses.replace(data, tokenizer=str(folder))  # the run has its files
        held_out = open_data(RunConfig(cfg, data))[1]
        held_out.batch_size = batch_size
    else:
        raise ValueError(f"--data: none given, must be at least one: {checkpoint} is no run with held-out data of its own")
    model, variables = load_model(checkpoint, experts, mxfp8_inputs)
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        evaluation = Evaluation(model, mesh, tokenizer)
        scores = evaluation(variables["params"], variables.get("router", {}), held_out, rows)
    return scores if len(scores) == 1 else scores | {"all": total(scores)}


def _open(
    paths: Sequence[str], cfg: ModelConfig, tokenizer: Tokenizer, folder: Path, data: DataConfig | None, batch_size: int, given: dict
) -> RowDataset | PackedDataset:
    rows = encoding(data or DataConfig(seq_len=min(SEQ_LEN, cfg.max_position_embeddings)), cfg.vision)
    images = reader(cfg.vision, tokenizer)
    with bar() as report:
        options = {"workers": os.cpu_count() or 1, "report": report, "images": images}
        return open_all(paths, folder, rows, batch_size, **options, **given)
