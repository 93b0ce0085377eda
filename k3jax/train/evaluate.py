"""Losses on held-out data, by source, in nats a token and nats a byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.data.packed import PackedDataset
from k3jax.nn.model import K3
from k3jax.text import ByteTokenizer, Tokenizer
from k3jax.train import step as training
from k3jax.train.checkpoint import meet
from k3jax.train.data import RowDataset


class Score(NamedTuple):
    """Summed loss of learnt tokens, how many they are, and the bytes of text they stand for (markers stand for none)."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def byte_loss(self) -> float:
        """Nats a byte: what models with other tokenizers can be compared by; infinite where markers alone are learnt."""
        return self.nats / self.bytes if self.bytes else float("inf")

    def __add__(self, other: Score) -> Score:
        return Score(*(a + b for a, b in zip(self, other, strict=True)))


class Evaluation:
    """Evaluates a model on a mesh; its program is compiled once. Call within `jax.set_mesh(mesh)`.

    Example:
        >>> Evaluation(model, mesh, tokenizer)(params, router, held_out, limit=64)
        {'chats.jsonl': Score(nats=8123.4, tokens=4101, bytes=11002)}
    """

    def __init__(self, model: K3, mesh, tokenizer: Tokenizer | type[ByteTokenizer]):
        sizes = np.zeros(model.cfg.vocab_size, np.int32)
        sizes[: tokenizer.vocab_size] = tokenizer.sizes()

        @jax.jit
        def sums(params, router, batch):
            one = jnp.ones((), jnp.float32)
            loss = training.batch_loss(model, params, router, batch, one)[0]
            bytes_ = jnp.sum(jnp.where(batch["weights"] > 0, jnp.asarray(sizes)[batch["targets"]], 0))
            return loss, jnp.sum(batch["weights"]), bytes_

        self._mesh, self._sums, self._compiled = mesh, sums, False

    def __call__(
        self, params, router, data: RowDataset | PackedDataset, limit: int | None = None
    ) -> dict[str, Score]:
        """Scores by the source's name, over `limit` rows of all of them together, or all rows.

        Raises ValueError, one line, where nothing is learnt.
        """
        found = {}
        for name, part, rows in _parts(data, limit):
            sums = [self._run(params, router, batch, part.batch_size) for batch in self._batches(part, rows)]
            nats, tokens, bytes_ = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
            if not tokens:
                raise ValueError(f"{name}: no held-out token has a predecessor in its document; give longer documents")
            found[name] = Score(float(nats), int(tokens), int(bytes_))
        return found

    def _batches(self, data, limit: int | None) -> Iterator[dict]:
        return data.windows(limit, training.process_rows(data.batch_size, self._mesh))

    def _run(self, params, router, batch, batch_size: int):
        batch = training.shard_batch(batch, self._mesh, batch_size)
        if not self._compiled:
            self._sums, self._compiled = program(self._sums, params, router, batch), True
        return self._sums(params, router, batch)


def _parts(data: RowDataset | PackedDataset, limit: int | None) -> Iterator[tuple[str, RowDataset | PackedDataset, int | None]]:
    """(name, data, rows to take) of every source."""
    if not isinstance(data, PackedDataset):
        yield "data.paths", data, limit
        return
    for source in data.sources:
        share = None if limit is None else max(1, round(limit * len(source) / len(data)))
        yield source.name, PackedDataset([source], data.batch_size, data.seed), share


def program(jitted, *arguments):
    """The compiled program, when all processes have it: a collective on CPU does not wait long for one that compiles."""
    compiled = jitted.lower(*arguments).compile()
    meet("compiled")
    return compiled
