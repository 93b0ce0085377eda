"""Text as bytes: finding it, splitting it by file, cutting it into packed windows, and the bigram baseline.

Axis letters: B batch, T tokens of a window. A batch is a pure function of (seed, step), so a run resumes from
its step number alone: no iterator state is saved.
"""

from __future__ import annotations

import abc
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.data.sources import LIBRARY, files_of, once
from k3jax.text import ByteTokenizer

log = logging.getLogger(__name__)

Batch = dict[str, Any]  # of arrays


def find_text(paths: Sequence[str] = ()) -> list[Path]:
    """Sorted absolute paths, without duplicates, of the non-empty UTF-8 files that `paths` name.

    Each entry is a file, a folder (searched to any depth, without hidden names and `__pycache__`) or a glob
    (`**` reaches any depth). Empty `paths` means the `*.py` sources of the running Python's own standard
    library, without its tests. Files that are empty or not UTF-8 text are left out, and one logged warning
    counts those that `paths` name. Raises ValueError for an entry that is empty, matches nothing, or names what is
    neither file nor folder (a pipe, a device), and when no text is left.

    >>> len(find_text()) > 100
    True
    """
    files = once(file for entry in paths or [LIBRARY] for file in files_of(entry))
    texts = [file for file in files if _is_text(file)]
    source = ", ".join(paths or [LIBRARY])
    if not texts:
        raise ValueError(f"no text in {source}: of {len(files)} files found, all are empty or not UTF-8; "
                         "data.paths takes files, folders or globs of text")
    if paths and len(texts) < len(files):
        log.warning("%d of %d files in %s are empty or not UTF-8 text and were skipped",
                    len(files) - len(texts), len(files), source)
    return texts


def _is_text(file: Path) -> bool:
    if not file.is_file():  # a pipe in a folder, or a link to nothing
        return False
    data = file.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(data) and b"\0" not in data


def split_files(files: Sequence[Path], held_out: float = 0.05) -> tuple[list[Path], list[Path]]:
    """Splits by file into (train, held-out), the latter a share `held_out` of the files and at least one.

    Files are ranked by SHA-256 of their name relative to their common folder and the lowest are held out, so
    the same tree is split alike wherever it lies. Both lists keep the order of `files`. Raises ValueError
    when `held_out` is not between 0 and 1 or either side would be empty.

    >>> train, held = split_files(find_text())
    """
    if not 0 < held_out < 1:
        raise ValueError(f"data.held_out is a share of the files between 0 and 1, not {held_out}")
    if len(files) < 2:
        raise ValueError(f"a split by file into train and held-out needs at least 2 files, not {len(files)}")
    root = os.path.commonpath([file.parent for file in files])

    def rank(file: Path) -> bytes:
        return hashlib.sha256(os.fsencode(file.relative_to(root).as_posix())).digest()

    ranked = sorted(files, key=rank)
    count = min(max(1, round(held_out * len(files))), len(files) - 1)
    held = set(ranked[:count])
    return [file for file in files if file not in held], [file for file in files if file in held]


class RowDataset(abc.ABC):
    """Rows of `seq_len` tokens, visited in an order of its own in every epoch.

    A subclass says how many there are (`__len__`) and gives the batch of some by number (`_cut`); a number behind the
    last gives padding.
    """

    vocab_size = ByteTokenizer.vocab_size
    key = "data.paths"  # the setting that names its files
    offset = 0
    """The number of the first sample of step 0: other than 0 where a run goes on with batches of another size."""

    def __init__(self, seq_len: int, batch_size: int, seed: int = 0):
        for name, value, least in (("seq_len", seq_len, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self._order = -1, np.empty(0, np.int64)  # of an epoch, together: threads read ahead

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """SHA-256 of what decides the rows."""

    def parts(self) -> dict[str, RowDataset]:
        """It by its name: there is one source."""
        return {self.key: self}

    @abc.abstractmethod
    def _cut(self, windows: np.ndarray, images: bool = True) -> Batch: ...

    def epoch(self, step: int) -> float:
        """Passes over the windows completed before `step`."""
        return step * self.batch_size / len(self)

    def batch(self, step: int, rows: slice | np.ndarray = slice(None)) -> Batch:
        """Rows `rows` (or their numbers) of training batch `step`, [rows of B, T]: a process asks only for its share.

        Sample n = `offset` + step*B + row is window order_e[n mod W] of epoch e = n div W, over all W = len(self)
        windows: an epoch visits each exactly once, in an order of its own, and batches run on across epochs.
        """
        samples = self.offset + step * self.batch_size + np.arange(self.batch_size)[rows]
        epochs, places = np.divmod(samples, len(self))
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            windows[epochs == epoch] = self._order_of(int(epoch))[places[epochs == epoch]]
        return self._cut(windows)

    def windows(
        self, limit: int | None = None, rows: slice | np.ndarray = slice(None), images: bool = True
    ) -> Iterator[Batch]:
        """Batches of all windows in order, or of `limit` spread evenly; the last is filled up with padding.

        Over all windows each byte that has a predecessor in its document has weight 1 exactly once. `rows`
        picks rows of every batch, as in `batch`; `images=False` leaves images unread.
        """
        count = len(self) if limit is None else min(limit, len(self))
        chosen = np.arange(count) * len(self) // max(count, 1)
        past_the_end = len(self) + 1
        for first in range(0, count, self.batch_size):
            windows = np.full(self.batch_size, past_the_end)
            picked = chosen[first : first + self.batch_size]
            windows[: len(picked)] = picked
            yield self._cut(windows[rows], images)

    def _order_of(self, epoch: int) -> np.ndarray:
        known, order = self._order
        if epoch != known:
            # Sorted raw Philox words, whose stream NumPy keeps stable: Generator.permutation may differ
            # between versions, and a resumed run must see the same text.
            words = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self))
            order = np.argsort(words, kind="stable")
            self._order = epoch, order
        return order


class ByteDataset(RowDataset):
    """Documents packed back to back into one stream of bytes, cut into windows of T = `seq_len` inputs.

    Window i has inputs stream[iT : iT+T] and targets stream[iT+1 : iT+T+1]; together the windows hold each
    byte but the first as a target exactly once. A batch is a dictionary of [B, T] arrays:

    - `tokens`, `targets` (int32): byte ids, 0 where the stream has ended;
    - `segment_ids` (int32): number of the document within the window from 1, and 0 for padding;
    - `weights` (float32): 1 where the target belongs to the same document as its input, else 0.

    Held in memory: one byte a token, and one epoch's order of windows (8 bytes a window).

    >>> data = ByteDataset([b"abc", b"de"], seq_len=4, batch_size=1)
    >>> data.batch(0)["segment_ids"], data.batch(0)["weights"]
    (array([[1, 1, 1, 2]], dtype=int32), array([[1., 1., 0., 1.]], dtype=float32))
    """

    def __init__(self, documents: Iterable[bytes], seq_len: int, batch_size: int, seed: int = 0):
        """Raises ValueError for sizes below 1, a negative seed, or less text than fills one window."""
        super().__init__(seq_len, batch_size, seed)
        stream, starts = bytearray(), []
        for document in documents:
            if document:
                starts.append(len(stream))
                stream += document
        if len(stream) < seq_len + 1:
            raise ValueError(f"the data set is smaller than one window: {len(starts)} documents hold "
                             f"{len(stream)} bytes and seq_len={seq_len} needs {seq_len + 1}; "
                             "give more text (data.paths) or a shorter data.seq_len")
        self._stream = np.frombuffer(stream, np.uint8)
        self._starts = np.asarray(starts, np.int64)

    @classmethod
    def from_files(cls, files: Iterable[Path], seq_len: int, batch_size: int, seed: int = 0) -> ByteDataset:
        """One document a file, read one at a time."""
        return cls((file.read_bytes() for file in files), seq_len, batch_size, seed)

    def __len__(self) -> int:
        """Windows in the stream, the last of which may be partial."""
        return -(-(self.tokens - 1) // self.seq_len)

    @property
    def identity(self) -> str:
        return hashlib.sha256(self._starts.tobytes() + self._stream.tobytes()).hexdigest()

    @property
    def tokens(self) -> int:
        """Bytes of text."""
        return len(self._stream)

    @property
    def targets(self) -> int:
        """Bytes with a predecessor in their own document: what one pass over all windows predicts."""
        return self.tokens - len(self._starts)

    def _cut(self, windows: np.ndarray, images: bool = True) -> Batch:
        positions = windows[:, None] * self.seq_len + np.arange(self.seq_len + 1)[None, :]
        real = positions < self.tokens
        ids = np.where(real, self._stream[np.minimum(positions, self.tokens - 1)], 0).astype(np.int32)
        document = np.searchsorted(self._starts, positions, side="right")
        segments = np.where(real, document - document[:, :1] + 1, 0).astype(np.int32)
        same_document = (segments[:, :-1] == segments[:, 1:]) & real[:, 1:]
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "segment_ids": segments[:, :-1],
                "weights": same_document.astype(np.float32)}


def bigram_nats(train: RowDataset, held_out: RowDataset, limit: int | None = None) -> float:
    """Nats per byte, on the weighted targets of `held_out.windows(limit)`, of a bigram counted on `train`.

    p(b|a) = (n(ab) + alpha u(b)) / (n(a) + alpha) with u(b) = (n(b) + 1) / (n + 256), n over the pairs within
    documents. alpha is the power of two that maximises the leave-one-out likelihood of the training text; the
    held-out text has no say in it. Raises ValueError when no held-out byte has a predecessor in its document.

    >>> data = ByteDataset([b"abababab"], seq_len=4, batch_size=1)
    >>> bigram_nats(data, data) < 0.5
    True
    """
    counts = _pair_counts(train)
    of_first, of_second = counts.sum(1, keepdims=True), counts.sum(0, keepdims=True)
    unigram = (of_second + 1) / (of_second.sum() + 256)
    seen = counts > 0

    def left_out_nats(alpha: float) -> float:
        # A pair is scored by the counts of all the others: one less of it and of its first byte.
        kept = np.where(seen, counts - 1, 0), np.maximum(of_first - 1, 0)
        return -(counts * np.log((kept[0] + alpha * unigram) / (kept[1] + alpha))).sum()

    alpha = min((2.0**power for power in range(-4, 17)), key=left_out_nats)
    log_p = np.log((counts + alpha * unigram) / (of_first + alpha))
    scored = _pair_counts(held_out, limit)
    if not scored.any():
        raise ValueError("no held-out byte has a predecessor in its document: give longer held-out files")
    return float(-(scored * log_p).sum() / scored.sum())


def _pair_counts(data: RowDataset, limit: int | None = None) -> np.ndarray:
    """How often target b follows input a, [256, 256] int64 at [a, b], over the windows' weighted targets."""
    counts = np.zeros(256 * 256, np.int64)
    for batch in data.windows(limit, images=False):
        pairs = batch["tokens"] * 256 + batch["targets"]
        counts += np.bincount(pairs[batch["weights"] > 0], minlength=256 * 256)
    return counts.reshape(256, 256)
