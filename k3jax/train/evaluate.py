"""Losses on held-out data, by source, in nats a token and nats a byte."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.data.packed import PackedDataset
from k3jax.nn.model import K3
from k3jax.text import Tokenizer
from k3jax.train import step as training
from k3jax.train.checkpoint import meet
from k3jax.train.data import RowDataset


class Score(NamedTuple):
    """Summed loss of learnt tokens, how many they are, and the bytes of text they stand for (markers stand for none)."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

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


def total(scores: dict[str, Score]) -> Score:
    """The score of all sources together."""
    return sum(scores.values(), Score())


class Evaluation:
    """Evaluates a model on a mesh; its program is compiled once. Call within `jax.set_mesh(mesh)`.

    nats = -sum_t log p(target_t) over all learnt targets, so a score does not depend on how documents are packed into rows, rows
    into batches or batches over devices, but for rounding.

    Example:
        >>> Evaluation(model, mesh, tokenizer)(params, router, held_out, limit=64)
        {'chats.jsonl': Score(nats=8123.4, tokens=4101, bytes=11002)}
    """

    def __init__(self, model: K3, mesh, tokenizer: Tokenizer):
        sizes = np.zeros(model.cfg.vocab_size, np.int32)
        sizes[: tokenizer.vocab_size] = tokenizer.sizes()

        @jax.jit
        def sums(params, router, batch):
            loss = training.batch_loss(model, params, router, batch, jnp.ones((), jnp.float32))[0]
            learnt = batch["weights"] > 0
            return loss, jnp.sum(learnt), jnp.sum(jnp.where(learnt, jnp.asarray(sizes)[batch["targets"]], 0))

        self._mesh, self._sums, self._compiled = mesh, sums, None

    def __call__(self, params, router, data: RowDataset | PackedDataset, limit: int | None = None) -> dict[str, Score]:
        """Scores by the source's name, over about `limit` rows of all of them together (at least one of each), or all rows.

        Raises ValueError, one line, where nothing is learnt.
        """
        scores = {}
        for name, part in data.parts().items():
            rows = None if limit is None else max(1, round(limit * len(part) / len(data)))
            batches = part.windows(rows, training.process_rows(part.batch_size, self._mesh))
            sums = [self._run(params, router, training.shard_batch(b, self._mesh, part.batch_size)) for b in batches]
            nats, tokens, bytes_ = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
            if not tokens:
                raise ValueError(f"{name}: no held-out token has a predecessor in its document; give longer documents")
            scores[name] = Score(float(nats), int(tokens), int(bytes_))
        return scores

    def _run(self, *arguments):
        if self._compiled is None:
            self._compiled = program(self._sums, *arguments)
        return self._compiled(*arguments)


def program(jitted, *arguments):
    """The compiled program, when all processes have it: a collective on CPU does not wait long for one that compiles."""
    compiled = jitted.lower(*arguments).compile()
    meet("compiled")
    return compiled
