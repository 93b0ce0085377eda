"""Batches of packed rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from k3jax.data.corpus import Rows, fill
from k3jax.data.mixture import Schedule, shuffled

Batch = dict[str, np.ndarray]


class PackedDataset:
    """Rows of T = `seq_len` places from one or several sources.

    Without weights all rows are one deck, shuffled anew in every epoch: every row comes once an epoch. With weights every source is a
    deck of its own, and `Schedule` says whose turn it is. Row n of all batches is a function of (seed, n, sources, weights), and what is
    held in memory does not grow with the rows.

    A batch is a dictionary of [B, T] arrays: `tokens`, `targets`, `segment_ids` (int32, the document within the row from 1, and 0 for
    padding) and `weights` (float32, 1 where the target is learnt).

    Example:
        >>> data = PackedDataset(corpus.rows("train"), batch_size=8)
        >>> data.batch(0)["tokens"].shape
        (8, 4096)
    """

    offset = 0
    """The number of the first row of step 0: other than 0 where a run goes on with batches of another size."""

    def __init__(self, sources: Sequence[Rows], batch_size: int, seed: int = 0, weights: Sequence[float] = ()):
        """Raises ValueError for weights that do not fit, and for sources without rows or of several lengths."""
        if weights and len(weights) != len(sources):
            names = ", ".join(source.name for source in sources)
            raise ValueError(f"data.weights: found {len(weights)}, must be {len(sources)}, one a source: {names}")
        self._schedule = Schedule(weights or [1])
        for source in sources:
            if not len(source):
                raise ValueError(f"{source.name}: no row of data")
        lengths = {source.seq_len for source in sources}
        if len(lengths) != 1:
            raise ValueError(f"data.paths: found rows of {', '.join(map(str, sorted(lengths)))} places, must be of one length")
        (self.seq_len,) = lengths
        self.sources, self.batch_size, self.seed = list(sources), batch_size, seed
        count = len(self.sources)
        self._decks = [(i, i + 1) for i in range(count)] if weights else [(0, count)]  # first and last source of each
        self.weights = tuple(weights)

    def __len__(self) -> int:
        """Rows of all sources."""
        return sum(len(source) for source in self.sources)

    def epoch(self, step: int) -> float:
        """Passes over as many rows as there are completed before `step`."""
        return step * self.batch_size / len(self)

    @property
    def identity(self) -> str:
        """SHA-256 of what decides the rows and their order: the content of all sources, and their weights."""
        shards = [[shard.sha256 for shard in source.shards] for source in self.sources]
        return hashlib.sha256(repr((shards, self.weights)).encode()).hexdigest()

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Rows `rows` (or their numbers) of training batch `step`, [rows of B, T]: a process asks only for its share."""
        numbers = self.offset + step * self.batch_size + np.arange(self.batch_size)[rows]
        batch = self._empty(len(numbers))
        self._fill(batch, np.arange(len(numbers)), *self._chosen(numbers))
        return batch

    def records(self, numbers: np.ndarray) -> Iterator[tuple[Rows, int, bytes]]:
        """(source, row of the source, record) of the rows with these numbers, counted over all batches."""
        for source, row in zip(*(found.tolist() for found in self._chosen(numbers)), strict=True):
            yield self.sources[source], row, self.sources[source].read(np.array([row]))[0]

    def windows(
        self, limit: int | None = None, rows: slice | np.ndarray = slice(None), images: bool = True
    ) -> Iterator[Batch]:
        """Batches of all rows in order, or of `limit` spread evenly; the last is filled up with padding.

        `rows` picks rows of every batch, as in `batch`; `images` is there for the likeness to other data.
        """
        count = len(self) if limit is None else min(limit, len(self))
        for first in range(0, count, self.batch_size):
            places = (first + np.arange(self.batch_size))[rows]
            batch = self._empty(len(places))
            real = np.flatnonzero(places < count)
            self._fill(batch, real, *self._located(places[real] * len(self) // count, 0, len(self.sources)))
            yield batch

    def _chosen(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, row of the source) of the rows with these numbers."""
        decks, places = self._schedule.at(numbers)
        sources, found = np.empty_like(places), np.empty_like(places)
        for deck in np.unique(decks).tolist():
            first, last = self._decks[deck]
            count = sum(len(source) for source in self.sources[first:last])
            epochs = places // count
            for epoch in np.unique(epochs[decks == deck]).tolist():
                here = (decks == deck) & (epochs == epoch)
                order = shuffled(places[here] - epoch * count, count, (self.seed, deck, epoch))
                sources[here], found[here] = self._located(order, first, last)
        return sources, found

    def _located(self, numbers: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, row of the source) of the rows with these numbers in sources `first` to `last`-1, one behind the other."""
        ends = np.cumsum([len(source) for source in self.sources[first:last]])
        of_source = np.searchsorted(ends, numbers, side="right")
        return first + of_source, numbers - np.concatenate([[0], ends])[of_source]

    def _empty(self, count: int) -> Batch:
        batch = {name: np.zeros((count, self.seq_len), np.int32) for name in ("tokens", "targets", "segment_ids")}
        return batch | {"weights": np.zeros((count, self.seq_len), np.float32)}

    def _fill(self, batch: Batch, places: np.ndarray, sources: np.ndarray, rows: np.ndarray) -> None:
        """Fills the batch's rows `places` with these rows of these sources."""
        for number in np.unique(sources).tolist():
            source, here = self.sources[number], sources == number
            for place, record in zip(places[here].tolist(), source.read(rows[here]), strict=True):
                try:
                    fill(batch, place, record)
                except ValueError as error:
                    raise ValueError(f"{source.name}: a record is damaged ({error}); make the corpus anew") from None
