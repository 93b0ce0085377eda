"""`python -m k3jax data tokenize | inspect | show`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, subcommand

from k3jax import runtime
from k3jax.cli.options import at_least, check, workers
from k3jax.values import PathText, Seed


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """How documents become rows."""

    tokenizer: PathText | None = None
    """Folder with the tokenizer's files: of the released layout, a run, an import. Without: a token is a byte."""
    seq_len: int = 4096
    """Tokens of a row, data.seq_len of the runs."""
    held_out: float = 0.05
    """Share of the documents of each source that is held out for evaluation."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """What is learnt of conversations: what the assistant has to produce, its last turn alone, or all."""
    thinking: bool = True
    """Whether the reasoning in conversations is part of them."""
    long: Literal["cut", "skip"] = "cut"
    """What becomes of documents longer than a row: texts are cut, of conversations the last messages are kept; or nothing."""
    workers: int = 0
    """Processes; 0 for one a core."""

    def options(self, paths: tuple[str, ...]) -> dict:
        """Arguments for those who read `paths`."""
        if not paths:
            raise ValueError("paths: none given, must be at least one")
        check(
            *at_least(1, seq_len=self.seq_len),
            ("held-out", self.held_out, 0 <= self.held_out < 1, "at least 0 and below 1"),
            workers(self.workers),
        )
        from k3jax.data.encoding import Encoding

        return {
            "tokenizer": self.tokenizer,
            "encoding": Encoding(self.seq_len, self.learn, self.thinking, self.long),
            "held_out": self.held_out,
            "workers": self.workers or os.cpu_count() or 1,
        }


@dataclass(frozen=True, kw_only=True)
class Tokenize(_Reading):
    """Make a tokenised corpus of packed rows.

    Goes on where the same command was stopped, by whatever.
    """

    out: Positional[PathText]
    """Folder to write."""
    paths: Positional[tuple[PathText, ...]]
    """Sources: files, folders or globs of plain text, *.jsonl, *.jsonl.gz and *.parquet."""

    def run(self) -> None:
        options = self.options(self.paths)
        from k3jax.data import inspect, tokenize

        with tokenize.bar() as report:
            tokenize.tokenize(self.out, self.paths, **options, report=report)
        print(inspect.report(self.out))


@dataclass(frozen=True)
class InspectCorpus:
    """Say what a tokenised corpus holds: sources, counts, the share that is learnt, how full the rows are."""

    path: Positional[PathText]
    """Folder of the corpus."""
    contents: bool = False
    """Read every file and compare it with its checksum."""

    def run(self) -> None:
        from k3jax.data import inspect

        print(inspect.report(self.path, self.contents))


@dataclass(frozen=True, kw_only=True)
class Show(_Reading):
    """Print some training rows decoded: learnt tokens in colour, or in brackets where there is none."""

    paths: Positional[tuple[PathText, ...]]
    """Tokenised corpora, which are shown as they were made, or sources as of `tokenize`."""
    rows: int = 2
    """How many of each source."""
    side: Literal["train", "held_out"] = "train"
    """Which rows."""
    seed: Seed = 0
    """Of their order."""
    color: Literal["auto", "always", "never"] = "auto"
    """Colours; auto: in a terminal."""

    def run(self) -> None:
        options = self.options(self.paths)
        check(*at_least(1, rows=self.rows))
        from k3jax.data import corpus, inspect, tokenize
        from k3jax.data.open import open_corpora

        color = self.color == "always" or (self.color == "auto" and runtime.shows_colours())
        for path in self.paths:
            if corpus.is_corpus(path):
                found = corpus.open_corpus(path)
            else:
                with tokenize.bar() as report:
                    (found,) = open_corpora([path], **options, report=report)
            for text in inspect.show(found, self.side, self.rows, self.seed, color):
                print(text)


@dataclass(frozen=True)
class Data:
    """Make a tokenised corpus, say what is in one, or read some rows."""

    subject: (
        Annotated[Tokenize, subcommand("tokenize")]
        | Annotated[InspectCorpus, subcommand("inspect")]
        | Annotated[Show, subcommand("show")]
    )

    def run(self) -> None:
        self.subject.run()
