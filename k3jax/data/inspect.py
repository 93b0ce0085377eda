"""What a corpus holds, and some of its rows to read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from k3jax.data.corpus import SIDES, Corpus, from_record, open_corpus
from k3jax.data.encoding import open_tokenizer
from k3jax.data.packed import PackedDataset
from k3jax.text import Tokenizer, printable

_LEARNT = {True: ("\x1b[1;32m", "\x1b[0m"), False: ("\u27e6", "\u27e7")}


def report(folder: str | Path, contents: bool = False) -> str:
    """Counts of every source; with `contents` every file is read and compared with its checksum.

    Raises ValueError, one line, for a folder that is no corpus, or one with a file that is missing or damaged.
    """
    corpus = open_corpus(folder)
    corpus.check(contents)
    made, encoding = corpus.index["tokenizer"], corpus.encoding
    lines = [
        f"{folder}: rows of {encoding.seq_len:,} places, tokenizer {made['kind']} ({made['vocab_size']:,} tokens, {made['identity'][:8]})",
        f"learn={encoding.learn}, thinking={'on' if encoding.thinking else 'off'}, long={encoding.long}, "
        f"held_out={corpus.index['held_out']}" + (", all checksums are right" if contents else ""),
    ]
    head = ("", "rows", "pieces", "tokens", "learnt", "bytes", "learnt share", "utilisation", "files")
    for source in corpus.index["sources"]:
        images = sum(source[side]["counts"]["images"] for side in SIDES)
        counts = {name: source[name] for name in ("texts", "conversations")} | {"images": images}
        kinds = [f"{count:,} {name}" for name, count in counts.items() if count]
        left = [f"{count:,} {reason}" for reason, count in source["skipped"].items()]
        lines += ["", f"{source['name']}: {', '.join(kinds)}" + (f"; left out: {', '.join(left)}" if left else "")]
        table = [head] + [_row(side, source[side], encoding.seq_len) for side in SIDES if source[side]["shards"]]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines += ["  " + "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in table]
    return "\n".join(lines)


def _row(side: str, part: dict, seq_len: int) -> tuple[str, ...]:
    counts = part["counts"]
    numbers = [counts[name] for name in ("rows", "documents", "tokens", "learnt", "bytes")]
    shares = counts["learnt"] / counts["tokens"], counts["tokens"] / (counts["rows"] * seq_len)
    return (side, *(f"{n:,}" for n in numbers), *(f"{share:.1%}" for share in shares), f"{len(part['shards']):,}")


def show(corpus: Corpus, side: str, rows: int, seed: int, color: bool) -> Iterator[str]:
    """The first rows of every source in a run's order, decoded: learnt tokens in colour, or in brackets."""
    tokenizer = open_tokenizer(corpus.tokenizer)
    for source in corpus.rows(side):
        if not len(source):
            yield f"== {source.name}: no {side} rows"
            continue
        data = PackedDataset([source], rows, seed)
        for _, row, record in data.records(np.arange(min(rows, len(source)))):
            documents = from_record(record)
            used = sum(len(ids) - 1 for ids, _ in documents)
            learnt = sum(int(mask[1:].sum()) for _, mask in documents)
            yield f"== {source.name}, row {row}: {used:,} of {source.seq_len:,} places, {learnt:,} learnt"
            for place, (ids, mask) in enumerate(documents, 1):
                yield f"-- {place} of {len(documents)}\n{_decoded(ids, mask, tokenizer, color)}"


def _decoded(ids: np.ndarray, learnt: np.ndarray, tokenizer: Tokenizer, color: bool) -> str:
    begin, end = _LEARNT[color]
    # The first token of a document is nobody's target.
    learnt = np.concatenate([[False], learnt[1:]])
    turns = np.flatnonzero(np.diff(learnt)) + 1
    runs = [
        (mask[0], printable(tokenizer.decode(run, markers=True)))
        for run, mask in zip(np.split(ids, turns), np.split(learnt, turns))
    ]
    return "".join(begin + text + end if is_learnt else text for is_learnt, text in runs)
