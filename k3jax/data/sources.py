"""Documents of a source: plain text, JSONL, Parquet.

A source is a file, a folder or a glob. What a file holds is told by its name: `*.jsonl`, `*.jsonl.gz` and `*.parquet` hold records, of
"messages" and "tools" (a conversation) or of "text"; any other file is one document of plain text. Large files are read in spans, each
by whoever has time: a span is two numbers, and what lies in it depends on nothing else.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from k3jax import strict_json
from k3jax.paths import check_kind, expand

LIBRARY = "<standard library>"
"""In place of an entry: the *.py sources of the running Python's own standard library, without its tests."""
# Folders of it that hold other packages, tests full of deliberately odd text, or a generated file of help texts so
# long (7 % of all bytes) that a split would hang on its side.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
TEXT_BYTES = 4 << 20
"""A plain text longer than this is read as documents of about this size, cut after a line."""
_LINE_BYTES = 1 << 16  # a line's end is looked for so far, then text is cut after a character


class Span(NamedTuple):
    """Bytes `begin` to `end` of a file, row groups of a Parquet file; `size` is its share of the file's bytes."""

    file: str
    begin: int
    end: int
    size: int


@dataclass(frozen=True)
class Document:
    """Plain text, or a conversation: messages and the tools declared in it."""

    file: str
    at: int  # byte of the file, row of a Parquet file
    text: str | None = None
    messages: Any = None
    tools: Any = ()
    identity: int = 0  # 64 bits of a hash of the content

    def where(self) -> str:
        """Where it is, as `file:line`. Reads the file up to there, so it is for complaints."""
        return _where(self.file, self.at)


def files_of(entry: str, key: str = "data.paths") -> list[Path]:
    """Sorted absolute paths of the files that a file, folder (to any depth, without hidden names) or glob names, or `LIBRARY`.

    A file reached by two names (a link, overlapping globs) counts once. Raises ValueError for an entry that is empty, matches nothing, or
    names what is neither file nor folder (a pipe, a device).

    Example:
        >>> files_of("k3jax/data/*.py")[0].name
        '__init__.py'
    """
    if entry == LIBRARY:
        found = [file for file in _walk(sysconfig.get_path("stdlib"), _NOT_LIBRARY) if file.suffix == ".py"]
        return once(found)
    if not entry.strip():
        raise ValueError(f"{key}: {entry!r} must be the name of a file or folder, or a glob")
    pattern = os.path.abspath(expand(entry))
    # A name that exists is taken as it is, glob characters and all.
    matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    if not matches:
        raise ValueError(f"{key}: {entry!r} matches no file or folder (looked for {pattern})")
    for match in matches:
        check_kind(match)
    return once(file for match in matches for file in (_walk(match) if os.path.isdir(match) else [Path(match)]))


def regular_files_of(entry: str, key: str = "data.paths") -> list[Path]:
    """`files_of` without pipes in folders and links to nothing."""
    return [file for file in files_of(entry, key) if file.is_file()]


def once(files: Iterable[Path]) -> list[Path]:
    """Sorted, each file under the first of its names."""
    by_identity = {os.path.realpath(file): file for file in sorted(files, reverse=True)}
    return sorted(by_identity.values())


def _walk(folder: str, skip: Iterable[str] = ()) -> Iterator[Path]:
    skip = {"__pycache__", *skip}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def kind_of(file: str | Path) -> str:
    """"jsonl", "jsonl.gz", "parquet" or "text"."""
    name = str(file).lower()
    return next((kind for kind in ("jsonl", "jsonl.gz", "parquet") if name.endswith("." + kind)), "text")


def parts_of(files: Iterable[str | Path], size: int) -> list[list[Span]]:
    """Spans of files, in order, in parts of about `size` bytes: what one worker reads, packs and writes at a time."""
    parts, room = [[]], size
    for span in (span for file in files for span in _spans(str(file), size)):
        if parts[-1] and span.size > room:
            parts.append([])
            room = size
        parts[-1].append(span)
        room -= span.size
    return [part for part in parts if part]


def _spans(file: str, size: int) -> Iterator[Span]:
    total, kind = os.path.getsize(file), kind_of(file)
    if kind == "parquet":
        units = _parquet(file).num_row_groups
        step = max(1, units * size // max(total, 1))
    else:
        units = total
        step = {"jsonl": size, "jsonl.gz": total, "text": total if total < 2 * TEXT_BYTES else TEXT_BYTES}[kind]
    for begin in range(0, units, max(step, 1)):
        end = min(begin + step, units)
        yield Span(file, begin, end, total * end // units - total * begin // units)


def documents(span: Span) -> Iterator[Document | None]:
    """Documents of a span; None for a text that is not UTF-8.

    Raises:
        ValueError: one line, naming file and line, for a record that is none.
    """
    kind = kind_of(span.file)
    return {"text": _texts, "jsonl": _lines, "jsonl.gz": _lines, "parquet": _rows}[kind](span)


def _texts(span: Span) -> Iterator[Document | None]:
    with open(span.file, "rb") as stream:
        begin, end = (_boundary(stream, at) for at in (span.begin, span.end))
        stream.seek(begin)
        data = stream.read(end - begin)
    if data:
        try:
            if b"\0" in data:
                raise ValueError
            yield Document(span.file, begin, text=data.decode(), identity=_hash(data))
        except ValueError:
            yield None


def _boundary(stream: io.BufferedReader, at: int) -> int:
    """The first place from `at` on where text may be cut: after a line, or after a character if the line is long."""
    if not at:
        return 0
    stream.seek(at - 1)
    data = stream.read(_LINE_BYTES)
    line = data.find(b"\n")
    if line >= 0:
        return at + line
    inside = next((i for i, byte in enumerate(data[1:]) if byte & 0xC0 != 0x80), 0)
    return at + inside


def _lines(span: Span) -> Iterator[Document]:
    packed = kind_of(span.file) == "jsonl.gz"
    with gzip.open(span.file, "rb") if packed else open(span.file, "rb") as stream:
        if span.begin:
            stream.seek(span.begin - 1)
            stream.readline()
        while packed or stream.tell() < span.end:
            at = stream.tell()
            try:
                line = stream.readline()
            except (OSError, EOFError) as error:
                raise ValueError(f"{span.file}: cut short or damaged ({error})") from None
            if not line:
                return
            if line.strip():
                yield _document(span.file, at, line)


def _document(file: str, at: int, line: bytes) -> Document:
    try:
        record = strict_json.loads(line)
    except ValueError as error:
        raise ValueError(f"{_where(file, at)}: not JSON ({error})") from None
    match record:
        case {"messages": messages} if messages is not None:
            pass
        case {"text": str(text)}:
            return Document(file, at, text=text, identity=_hash(text.encode("utf-8", "surrogatepass")))
        case _:
            found = line.strip().decode("utf-8", "replace")
            right = '{"messages": [...], "tools": [...]} or {"text": a string}'
            raise ValueError(f"{_where(file, at)}: found {found:.60}, must be {right}")
    return _conversation(file, at, messages, record.get("tools"))


def _conversation(file: str, at: int, messages, tools) -> Document:
    if isinstance(tools, str):
        try:
            tools = strict_json.loads(tools)
        except ValueError as error:
            raise ValueError(f"{_where(file, at)}: tools: not JSON ({error})") from None
    content = json.dumps([messages, tools], sort_keys=True)
    return Document(file, at, messages=messages, tools=tools or (), identity=_hash(content.encode()))


def _parquet(file: str):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{file}: not readable as Parquet ({error})") from None


def _rows(span: Span) -> Iterator[Document]:
    import pyarrow

    table = _parquet(span.file)
    names = table.schema_arrow.names
    columns = [name for name in ("messages", "tools") if name in names] if "messages" in names else ["text"]
    if columns[0] not in names:
        raise ValueError(f"{span.file}: found the columns {', '.join(names)}, must be messages (and tools), or text")
    at = sum(table.metadata.row_group(group).num_rows for group in range(span.begin))
    groups = list(range(span.begin, span.end))
    try:
        for batch in table.iter_batches(256, groups, columns):
            for record in batch.to_pylist():
                yield _row(span.file, at, record)
                at += 1
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{span.file}: cut short or damaged ({error})") from None


def _row(file: str, at: int, record: dict) -> Document:
    if "messages" in record:
        messages = record["messages"]
        if isinstance(messages, str):
            try:
                messages = strict_json.loads(messages)
            except ValueError as error:
                raise ValueError(f"{_where(file, at)}: messages: not JSON ({error})") from None
        return _conversation(file, at, _without_none(messages), _without_none(record.get("tools")))
    text = record["text"]
    if not isinstance(text, str):
        raise ValueError(f"{_where(file, at)}: found {text!r:.60} as text, must be a string")
    return Document(file, at, text=text, identity=_hash(text.encode()))


def _without_none(value):
    """A struct of Parquet has all keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _where(file: str, at: int) -> str:
    kind = kind_of(file)
    if kind == "parquet":
        return f"{file}, row {at + 1}"
    if kind == "text":
        return file
    line = 1
    with gzip.open(file, "rb") if kind == "jsonl.gz" else open(file, "rb") as stream:
        while at > 0 and (data := stream.read(min(at, 1 << 20))):
            line, at = line + data.count(b"\n"), at - len(data)
    return f"{file}:{line}"
