"""The data of a run: corpora as they are named, and other sources made into corpora first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from k3jax.data import sources
from k3jax.data.corpus import SIDES, Corpus, is_corpus, open_corpus
from k3jax.data.encoding import Encoding, open_tokenizer
from k3jax.data.packed import PackedDataset, ReadImages
from k3jax.data.tokenize import corpus_key, tokenize


def open_packed(
    paths: Sequence[str],
    tokenizer: str | Path | None,
    encoding: Encoding,
    batch_size: int,
    seed: int = 0,
    weights: Sequence[float] = (),
    held_out: float = 0.05,
    held_out_paths: Sequence[str] = (),
    workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
    images: ReadImages | None = None,
) -> tuple[PackedDataset, PackedDataset]:
    """(training, held-out) rows of sources, of the standard library without any. The held-out ones are those of `paths`, or all of `held_out_paths`.

    What is no corpus is made one in `corpora` of the cache (`K3JAX_CACHE`, or ~/.cache/k3jax), once as long as its files, the tokenizer
    and the settings stay the same.

    Raises:
        ValueError: one line, for a source that holds no data, a record that is none, a corpus of another tokenizer or other settings.
    """
    options = {"tokenizer": tokenizer, "encoding": encoding, "workers": workers, "report": report}
    paths = paths or [sources.LIBRARY]
    corpora = open_corpora(paths, **options, held_out=0 if held_out_paths else held_out)
    train = [rows for corpus in corpora for rows in corpus.rows("train")]
    if held_out_paths:
        others = open_corpora(held_out_paths, **options, held_out=0, key="data.held_out_paths")
        held = [rows for corpus in others for side in SIDES for rows in corpus.rows(side) if len(rows)]
    else:
        held = [rows for corpus in corpora for rows in corpus.rows("held_out") if len(rows)]
    if not held:
        raise ValueError(f"data.paths: {', '.join(paths)}: made without held-out rows; name some in data.held_out_paths")
    return PackedDataset(train, batch_size, seed, weights, images), PackedDataset(held, batch_size, seed, images=images)


def open_all(
    paths: Sequence[str],
    tokenizer: str | Path | None,
    encoding: Encoding,
    batch_size: int,
    workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
    images: ReadImages | None = None,
    **given,
) -> PackedDataset:
    """All rows of sources, held out or not. A corpus is taken as it was made, but what is `given` of `encoding` must fit."""
    rows = []
    for path in paths:
        wanted = replace(open_corpus(path).encoding if is_corpus(path) else encoding, **given)
        (corpus,) = open_corpora([path], tokenizer, wanted, 0, workers, report, "--data")
        rows += [rows for side in SIDES for rows in corpus.rows(side) if len(rows)]
    return PackedDataset(rows, batch_size, images=images)


def open_corpora(
    paths: Sequence[str],
    tokenizer: str | Path | None,
    encoding: Encoding,
    held_out: float = 0.05,
    workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
    key: str = "data.paths",
) -> list[Corpus]:
    """A corpus for each of `paths`, as `open_packed` says."""
    corpora = []
    for path in paths:
        if is_corpus(path):
            corpora.append(open_corpus(path))
            check_corpus(corpora[-1], tokenizer, encoding)
            continue
        found = [(path, sources.regular_files_of(path, key))]
        folder = _cache() / corpus_key(found, tokenizer, encoding, held_out)[:32]
        corpora.append(tokenize(folder, [path], tokenizer, encoding, held_out, workers, report, key, wait=True))
    return corpora


def _cache() -> Path:
    return Path(os.environ.get("K3JAX_CACHE") or Path.home() / ".cache" / "k3jax") / "corpora"


def check_corpus(corpus: Corpus, tokenizer: str | Path | None, encoding: Encoding) -> None:
    """Raises ValueError, one line, for a corpus that was made with another tokenizer or other settings."""
    made, speaks = corpus.index["tokenizer"], open_tokenizer(tokenizer)
    if made["identity"] != speaks.identity:
        raise ValueError(
            f"{corpus.folder}: made with another tokenizer ({_name(**made)}) than that of the model "
            f"({_name(speaks.kind, speaks.vocab_size, speaks.identity)}); make it anew"
        )
    has_images = any(source[side]["counts"]["images"] for source in corpus.index["sources"] for side in SIDES)
    for field in fields(Encoding):
        if field.name in ("patch", "merge") and not has_images:
            continue
        found, right = getattr(corpus.encoding, field.name), getattr(encoding, field.name)
        if found != right:
            key = "model.vision" if field.name in ("patch", "merge") else "data"
            raise ValueError(f"{key}.{field.name}={right}: {corpus.folder} was made with {found}; set that, or make it anew")


def _name(kind: str, vocab_size: int, identity: str) -> str:
    return f"{kind}, {vocab_size} tokens, {identity[:8]}"
