"""Tokenised corpora on disk: packed rows as records of ArrayRecord files, and an index that is written last.

    corpus/corpus.json                      what is in it: sources, counts, shards with their sizes and checksums
    corpus/tokenizer/                       the tokenizer's files
    corpus/0/train-00000.array_record       rows of the first source
    corpus/0/held_out-00000.array_record

A record is a row: little-endian uint32 of the number of documents, the number of tokens of each, and all tokens, whose highest bit says
whether they are learnt; behind them, where a row has images, their names and grids as JSON. ArrayRecord checks every record that is read
against a hash in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from k3jax import strict_json
from k3jax.data.encoding import Encoding, ImageFile, Tokens

INDEX = "corpus.json"
SIDES = ("train", "held_out")
_FORMAT = 1
_LEARNT = np.uint32(1 << 31)
_OPEN_FILES = 64
_WRITER = "group_size:1,uncompressed"  # one record can be read without its neighbours


def to_record(documents: Sequence[Tokens]) -> bytes:
    """A row's record."""
    head = np.array([len(documents), *(len(d.ids) for d in documents)], "<u4")
    body = [d.ids.astype("<u4") | np.where(d.learnt, _LEARNT, np.uint32(0)) for d in documents]
    images = [image for d in documents for image in d.images]
    text = json.dumps(images).encode() if images else b""
    return np.concatenate([head, *body]).tobytes() + text + b" " * (-len(text) % 4)


def from_record(record: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids int32 [n], learnt bool [n]) of every document of a row. Raises ValueError for what is no record."""
    lengths, body, _ = _split(record)
    parts = np.split(body, np.cumsum(lengths)[:-1])
    return [((part & ~_LEARNT).astype(np.int32), part >= _LEARNT) for part in parts]


def _split(record: bytes) -> tuple[np.ndarray, np.ndarray, list[ImageFile]]:
    words = np.frombuffer(record, "<u4") if len(record) % 4 == 0 else np.empty(0, "<u4")
    count = int(words[0]) if len(words) else 0
    lengths, body = words[1 : count + 1], words[count + 1 :]
    total = int(lengths.sum(dtype=np.int64))
    if not count or len(lengths) < count or lengths.min() < 2 or total > len(body):
        raise ValueError("no row of documents")
    return lengths, body[:total], _images(body[total:].tobytes())


def _images(text: bytes) -> list[ImageFile]:
    try:
        return [ImageFile(name, tuple(grid)) for name, grid in json.loads(text)] if text else []
    except (TypeError, ValueError):
        raise ValueError("no row of documents") from None


def fill(batch: dict[str, np.ndarray], b: int, record: bytes) -> list[ImageFile]:
    """Writes a record to row b of a batch: the inputs of a document are all its tokens but the last, its targets all but the first.

    Returns the row's images, in the order of their tokens.
    """
    lengths, body, images = _split(record)
    ends = np.cumsum(lengths)
    used = len(body) - len(lengths)
    if used > batch["tokens"].shape[1]:
        raise ValueError(f"a row of {used} places")
    # Between two documents there is a pair of neighbours, the last of one and the first of the other, that is none.
    inside = np.ones(len(body) - 1, bool)
    inside[ends[:-1] - 1] = False
    ids = (body & ~_LEARNT).view(np.int32)
    batch["tokens"][b, :used] = ids[:-1][inside]
    batch["targets"][b, :used] = ids[1:][inside]
    batch["weights"][b, :used] = (body[1:] >= _LEARNT)[inside]
    batch["segment_ids"][b, :used] = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths - 1)
    return images


class ShardWriter:
    """Writes a shard that has its name only when it is whole, and counts what is in it. Raises ValueError where it cannot be written."""

    def __init__(self, path: Path):
        self._path, self._part = path, path.with_name(f"{path.name}.{os.getpid()}.part")
        self._writer = None
        self.counts = dict.fromkeys(("rows", "documents", "tokens", "learnt", "bytes", "images", "patches"), 0)

    def write(self, row: Sequence[Tokens]) -> None:
        with self._writing():
            if self._writer is None:
                self._writer = ArrayRecordWriter(str(self._part), _WRITER)
            self._writer.write(to_record(row))
        self.counts["rows"] += 1
        self.counts["documents"] += len(row)
        self.counts["tokens"] += sum(len(d.ids) - 1 for d in row)
        self.counts["learnt"] += sum(int(np.count_nonzero(d.learnt[1:])) for d in row)
        self.counts["bytes"] += sum(d.bytes for d in row)
        self.counts["images"] += sum(len(d.images) for d in row)
        self.counts["patches"] = max(self.counts["patches"], sum(image.patches for d in row for image in d.images))

    def close(self) -> dict[str, Any]:
        """The shard's counts, with its size and checksum if it has any row."""
        if self._writer is None:
            return self.counts
        with self._writing():
            self._writer.close()
            self.counts["size"], self.counts["sha256"] = self._part.stat().st_size, sha256(self._part)
            os.replace(self._part, self._path)
        return self.counts

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # the latter, of the library, such as of a full disk
            self._part.unlink(missing_ok=True)
            reason = str(error).split(";")[0]
            raise ValueError(f"{self._path}: writing failed ({reason}); the same command goes on from the files that are whole") from None


def sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class Shard:
    """A file of rows."""

    path: Path
    rows: int
    size: int
    sha256: str


class Rows:
    """Packed rows of one source, read by number from any thread. At most 64 of its files are open at a time.

    Attributes:
        name: Of the source.
        counts: rows, documents, tokens (places that are used), learnt (targets with weight 1), bytes (of learnt text), images, and patches
            (of images, in the row that has most).
    """

    def __init__(self, name: str, seq_len: int, counts: dict[str, int], shards: Sequence[Shard]):
        self.name, self.seq_len, self.counts, self.shards = name, seq_len, counts, shards
        self._ends = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
        self._readers: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Records of the rows with these numbers [n]. Raises ValueError, naming the file, for one that is damaged."""
        records: list[bytes] = [b""] * len(numbers)
        shards = np.searchsorted(self._ends, numbers, side="right")
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            local = numbers[places] - (self._ends[shard] - self.shards[shard].rows)
            reader = self._reader(shard)
            try:
                found = reader.read(local.tolist())
            except (RuntimeError, ValueError, IndexError) as error:
                raise ValueError(f"{self.shards[shard].path}: a record is damaged; make the corpus anew ({error})") from None
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record
        return records

    def _reader(self, shard: int):
        with self._lock:
            reader = self._readers.get(shard)
            if reader is None:
                reader = self._readers[shard] = _open(self.shards[shard])
                if len(self._readers) > _OPEN_FILES:
                    self._readers.popitem(last=False)  # closed when the last thread that reads from it is done
            self._readers.move_to_end(shard)
            return reader


def _open(shard: Shard):
    try:
        reader = ArrayRecordReader(str(shard.path), "readahead_buffer_size:0,max_parallelism:1")
        count = reader.num_records()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{shard.path}: not readable as records; make the corpus anew ({error})") from None
    if count != shard.rows:
        raise ValueError(f"{shard.path}: found {count} records, must be {shard.rows}; the file is damaged or another")
    return reader


@dataclass(frozen=True)
class Corpus:
    """A corpus as its index describes it."""

    folder: Path
    index: dict[str, Any]

    @property
    def encoding(self) -> Encoding:
        """How its documents became rows."""
        return Encoding(**self.index["encoding"] | {"merge": tuple(self.index["encoding"]["merge"])})

    @property
    def tokenizer(self) -> Path | None:
        """Folder of its tokenizer's files; None for bytes."""
        return None if self.index["tokenizer"]["kind"] == "bytes" else self.folder / "tokenizer"

    def rows(self, side: str) -> list[Rows]:
        """The rows of every source on one side, "train" or "held_out"."""
        return [
            Rows(source["name"], self.encoding.seq_len, source[side]["counts"], self._shards(source, side))
            for source in self.index["sources"]
        ]

    def _shards(self, source: dict, side: str) -> list[Shard]:
        return [
            Shard(self.folder / shard["file"], shard["rows"], shard["size"], shard["sha256"])
            for shard in source[side]["shards"]
        ]

    def check(self, contents: bool = False) -> None:
        """Raises ValueError, one line, for files that are missing or of another size; with `contents`, of another checksum."""
        for source in self.index["sources"]:
            for shard in (shard for side in SIDES for shard in self._shards(source, side)):
                try:
                    size = shard.path.stat().st_size
                except OSError as error:
                    reason = error.strerror or error
                    raise ValueError(f"{shard.path}: {INDEX} names this shard, it cannot be read ({reason})") from None
                if size != shard.size:
                    raise ValueError(f"{shard.path}: found {size} bytes, must be {shard.size}; the file is cut short or another")
                if contents and sha256(shard.path) != shard.sha256:
                    raise ValueError(f"{shard.path}: damaged, its SHA-256 is not that of {INDEX}; make the corpus anew")


def is_corpus(path: str | Path) -> bool:
    """Whether it is a folder with a corpus' index."""
    return (Path(path) / INDEX).is_file()


def open_corpus(folder: str | Path) -> Corpus:
    """A corpus whose files are all there. Raises ValueError, one line, for anything else.

    Example:
        >>> open_corpus("runs/corpus").rows("train")[0].counts["learnt"]
        250173
    """
    folder = Path(folder)
    file = folder / INDEX
    try:
        index = strict_json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{folder}: not a tokenised corpus, {INDEX} is missing; `k3jax data tokenize` makes one, or goes on") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not readable as JSON ({error})") from None
    found = index.get("format") if isinstance(index, dict) else None
    if found != _FORMAT:
        raise ValueError(f"{file}: found format {found}, must be {_FORMAT}")
    corpus = Corpus(folder, index)
    corpus.check()
    return corpus


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Makes the folder a corpus, in one step."""
    part = folder / f"{INDEX}.part"
    part.write_text(json.dumps({"format": _FORMAT} | index, indent=1) + "\n")
    os.replace(part, folder / INDEX)
