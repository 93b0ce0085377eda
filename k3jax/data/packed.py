"""Batches of packed rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from k3jax.data.corpus import Rows, fill
from k3jax.data.encoding import ImageFile
from k3jax.data.mixture import Schedule, shuffled

Batch = dict[str, Any]  # of arrays
ReadImages = Callable[[Sequence[Sequence[ImageFile]], int], Any]
"""(images of every row of a batch, most patches that any row has) -> what a batch holds as `images`."""


class PackedDataset:
    """Rows of T = `seq_len` places from one or several sources.

    Without weights all rows are one deck, shuffled anew in every epoch: every row comes once an epoch. With weights every source is a
    deck of its own, and `Schedule` says whose turn it is. Row n of all batches is a function of (seed, n, sources, weights), and what is
    held in memory does not grow with the rows.

    A batch is a dictionary of [B, T] arrays: `tokens`, `targets`, `segment_ids` (int32, the document within the row from 1, and 0 for
    padding) and `weights` (float32, 1 where the target is learnt). Where any source has images, every batch has `images`, too, of one
    shape: what `images` makes of them.

    Example:
        >>> data = PackedDataset(corpus.rows("train"), batch_size=8)
        >>> data.batch(0)["tokens"].shape
        (8, 4096)
    """

    offset = 0
    """The number of the first row of step 0: other than 0 where a run goes on with batches of another size."""

    def __init__(
        self,
        sources: Sequence[Rows],
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] = (),
        images: ReadImages | None = None,
    ):
        """Raises ValueError for weights that do not fit, for sources without rows or of several lengths, and images that nothing reads."""
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
        self.weights, self._images = tuple(weights), images
        self._patches = max(source.counts.get("patches", 0) for source in self.sources)
        if images is None and self._patches:
            named = next(source.name for source in self.sources if source.counts.get("patches"))
            raise ValueError(f"{named}: found images, must be text: the model has no vision")

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

    def parts(self) -> dict[str, PackedDataset]:
        """The rows of every source by its name, all in batches of one shape."""
        parts = {}
        for name in dict.fromkeys(source.name for source in self.sources):
            mine = [source for source in self.sources if source.name == name]
            parts[name] = PackedDataset(mine, self.batch_size, self.seed, images=self._images)
            parts[name]._patches = self._patches
        return parts

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Rows `rows` (or their numbers) of training batch `step`, [rows of B, T]: a process asks only for its share."""
        numbers = self.offset + step * self.batch_size + np.arange(self.batch_size)[rows]
        return self._filled(len(numbers), np.arange(len(numbers)), *self._chosen(numbers))

    def records(self, numbers: np.ndarray) -> Iterator[tuple[Rows, int, bytes]]:
        """(source, row of the source, record) of the rows with these numbers, counted over all batches."""
        for source, row in zip(*(found.tolist() for found in self._chosen(numbers)), strict=True):
            yield self.sources[source], row, self.sources[source].read(np.array([row]))[0]

    def windows(
        self, limit: int | None = None, rows: slice | np.ndarray = slice(None), images: bool = True
    ) -> Iterator[Batch]:
        """Batches of all rows in order, or of `limit` spread evenly; the last is filled up with padding.

        `rows` picks rows of every batch, as in `batch`; `images=False` leaves images unread.
        """
        count = len(self) if limit is None else min(limit, len(self))
        for first in range(0, count, self.batch_size):
            places = (first + np.arange(self.batch_size))[rows]
            real = np.flatnonzero(places < count)
            found = self._located(places[real] * len(self) // count, 0, len(self.sources))
            yield self._filled(len(places), real, *found, images)

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

    def _filled(self, count: int, places: np.ndarray, sources: np.ndarray, rows: np.ndarray, images: bool = True) -> Batch:
        """A batch of `count` rows, of which `places` are these rows of these sources and the others padding."""
        batch = {name: np.zeros((count, self.seq_len), np.int32) for name in ("tokens", "targets", "segment_ids")}
        batch["weights"] = np.zeros((count, self.seq_len), np.float32)
        found: list[list[ImageFile]] = [[] for _ in range(count)]
        for number in np.unique(sources).tolist():
            source, here = self.sources[number], sources == number
            for place, record in zip(places[here].tolist(), source.read(rows[here]), strict=True):
                try:
                    found[place] = fill(batch, place, record)
                except ValueError as error:
                    raise ValueError(f"{source.name}: a record is damaged ({error}); make the corpus anew") from None
        if images and self._patches:
            batch["images"] = self._images(found, self._patches)
        return batch
