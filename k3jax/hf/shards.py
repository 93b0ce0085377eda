"""The files of a released checkpoint that is being written: any byte of any tensor, in any order."""

from __future__ import annotations

import json
import os
import struct
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from k3jax.hf.files import INDEX, CheckpointError
from k3jax.hf.names import DTYPES, Leaf
from k3jax.lock import LOCK

UNFINISHED = ".unfinished"  # suffix of files until all of them are whole
JOURNAL = "export.unfinished"


class ShardWriter:
    """Writes shards, index, configuration and copies of files into a folder, under names with a suffix until `commit`.

    The index gets its name last, so a folder that has it is whole. With an `identity` of what is written, finished jobs
    are recorded, and a writer with the same one goes on after a process that was killed.

    Raises `CheckpointError` if the folder holds anything else, and `OSError`.
    """

    def __init__(
        self,
        destination: Path,
        config: dict[str, Any],
        leaves: list[Leaf],
        weight_map: dict[str, str],
        identity: str | None = None,
        beside: Iterable[Path] = (),
    ):
        self.destination, self._weight_map, self._identity = destination, weight_map, identity
        self.total = sum(leaf.count * leaf.tensor_bytes for leaf in leaves)
        self._shards = _headers(leaves, weight_map)
        self._begins = {name: begin for _, begins, _ in self._shards.values() for name, begin in begins.items()}
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
        write = lambda content: json.dumps(content, indent=1).encode()  # noqa: E731
        copies = {path.name: path.read_bytes() for path in beside}
        self._texts = {"config.json": write(config), **copies, INDEX: write(index)}
        self._names = [*self._shards, *self._texts]
        self._files: dict[str, int] = {}
        self._journal = None
        self.resumable = identity is not None
        self.finished: set[str] = set()
        self._resumed = self._look()

    def begin(self) -> None:
        """Creates the files, or opens those of a writer that was killed."""
        self.destination.mkdir(parents=True, exist_ok=True)
        if not self._resumed:
            for name in self._names:
                self._path(name).unlink(missing_ok=True)
        if self._identity is not None:
            self._journal = open(self.destination / JOURNAL, "a" if self._resumed else "w")
            if not self._resumed:  # before anything else: what is here belongs to whoever wrote the journal
                self.record(self._identity)
        for shard, (header, _, size) in self._shards.items():
            if not (self.destination / shard).exists():  # its name is final when a commit was cut short
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                self._files[shard] = os.open(self._path(shard), flags, 0o666)
                os.pwrite(self._files[shard], header, 0)
                os.ftruncate(self._files[shard], size)
        for name, content in self._texts.items():
            if not (self.destination / name).exists():
                self._path(name).write_bytes(content)

    def write(self, parts: Iterable[tuple[str, int, memoryview]]) -> None:
        """Writes bytes of tensors: (name, first byte of the tensor, data). What is never written is zero.

        Returns when they are on disk, where that is recorded.
        """
        touched = set()
        for name, first, data in parts:
            file = self._files[self._weight_map[name]]
            touched.add(file)
            begin = self._begins[name] + first
            while data.nbytes:
                count = os.pwrite(file, data, begin)
                begin, data = begin + count, data[count:]
        if self._journal:
            for file in touched:
                os.fdatasync(file)

    def record(self, key: str) -> None:
        """Notes a finished job; a line that is lost costs doing it again."""
        if self._journal:
            self._journal.write(f"{key}\n")
            self._journal.flush()

    def commit(self) -> None:
        """Makes what was written a checkpoint."""
        for name in self._names:  # the index comes last
            if self._path(name).exists():
                _sync(self._path(name))
                os.rename(self._path(name), self.destination / name)
        _sync(self.destination)
        self.close()
        (self.destination / JOURNAL).unlink(missing_ok=True)
        _sync(self.destination)
        _sync(self.destination.parent)

    def abandon(self) -> None:
        """Removes what was written."""
        self.close()
        for name in self._names:
            self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        if self._journal:
            self._journal.close()
            self._journal = None

    def _path(self, name: str) -> Path:
        return self.destination / f"{name}{UNFINISHED}"

    def _look(self) -> bool:
        """Whether the folder holds the beginning of just this; complains if it holds something else."""
        folder = self.destination
        if not folder.exists():
            return False
        found = {entry.name for entry in folder.iterdir()} - {LOCK}
        first, *finished = [None]
        if JOURNAL in found:  # a last line without an end was cut short
            text = (folder / JOURNAL).read_bytes().decode(errors="replace")
            first, *finished = text.split("\n")[:-1] or [None]
        if first is None and all(name.endswith(UNFINISHED) for name in found):
            return False
        if first is None or not found <= {JOURNAL, *self._names, *(self._path(name).name for name in self._names)}:
            raise CheckpointError(f"{folder}: already exists; choose a new or empty folder")
        if first != self._identity:
            raise CheckpointError(
                f"{folder}: holds the beginning of another export; remove it, or choose another folder"
            )
        places = {shard: folder / shard if shard in found else self._path(shard) for shard in self._shards}
        for shard, path in places.items() if finished else ():
            if path.name not in found or path.stat().st_size != self._shards[shard][2]:
                if any(name in found for name in self._shards):
                    raise CheckpointError(f"{path}: missing or cut short; remove the folder, and export again")
                return False  # what was written into it is lost: all is done again
        self.finished = set(finished)
        return True


def split(leaves: list[Leaf], limit: int) -> dict[str, str]:
    """Shard of every tensor: layers in order, each begun in a new shard where the open one has no room for all of it."""
    groups = defaultdict(list)  # what belongs to no layer comes first
    for leaf in leaves:
        for r in range(leaf.repeats):
            layer = leaf.layers[r] if leaf.layers and leaf.part != "vision" else -1
            groups[layer] += [(name, leaf.tensor_bytes) for name in leaf.names(r)]
    shards, room = [[]], limit
    for _, group in sorted(groups.items()):
        needed = sum(size for _, size in group)
        for name, size in group:
            if max(size, needed) > room and shards[-1]:
                shards.append([])
                room = limit
            needed = 0  # once begun, a layer goes on in the same shard
            shards[-1].append(name)
            room -= size
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return {name: file for file, names in zip(files, shards, strict=True) for name in names}


def _headers(leaves: list[Leaf], weight_map: dict[str, str]) -> dict[str, tuple[bytes, dict[str, int], int]]:
    """(header, first byte of every tensor, size) of every shard, as the safetensors library lays them out."""
    members = defaultdict(list)
    for leaf in leaves:
        for r in range(leaf.repeats):
            for name in leaf.names(r):
                members[weight_map[name]].append((-DTYPES[leaf.dtype].itemsize, name, leaf))
    shards = {}
    for shard in sorted(members):
        entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for _, name, leaf in sorted(members[shard], key=lambda member: member[:2]):
            begins[name], end = end, end + leaf.tensor_bytes
            entries[name] = {"dtype": leaf.dtype, "shape": list(leaf.stored), "data_offsets": [begins[name], end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        first = 8 + len(text)
        header = struct.pack("<Q", len(text)) + text
        shards[shard] = (header, {name: first + begin for name, begin in begins.items()}, first + end)
    return shards


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
