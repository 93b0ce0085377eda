"""Makes tokenised corpora: reads, tokenises, packs and writes parts of the sources, in several processes.

A part is what lies in some spans of the files. Its shards depend on nothing else, so any number of processes makes the same corpus, and
one that was killed goes on with the parts whose shards are whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from k3jax import peers, text
from k3jax.data import sources
from k3jax.data.corpus import INDEX, SIDES, Corpus, ShardWriter, is_corpus, open_corpus, write_index
from k3jax.data.encoding import Encoder, Encoding, open_tokenizer
from k3jax.data.packing import Packer
from k3jax.lock import LOCK, locked

_PART_BYTES = (4 << 20, 1 << 30)  # least and most input of a part
_PARTS = 256  # of a source, if they are between these
_HASHES = 1 << 64


@dataclass(frozen=True)
class _Split:
    """Documents whose hash is below `below` are held out; or of every text the share from `after` on."""

    below: int = 0
    after: float | None = None


@dataclass(frozen=True)
class _Job:
    spans: list[sources.Span]
    split: _Split
    encoding: Encoding
    folder: Path
    number: int
    key: str  # of all that decides the part's content

    def path(self, name: str) -> Path:
        return self.folder / f"{name}-{self.number:05d}"


def tokenize(
    out: str | Path,
    paths: Sequence[str],
    tokenizer: str | Path | None,
    encoding: Encoding,
    held_out: float = 0.05,
    workers: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
    key: str = "data.paths",
    wait: bool = False,
) -> Corpus:
    """Writes the folder `out`, one source for each of `paths`; goes on where the same call was stopped, by whatever.

    Args:
        tokenizer: Folder of the tokenizer's files; None for bytes.
        held_out: Share of the documents of each source that is held out, chosen by a hash of their content; 0 for none. Of more than one
            document at least one is held out; a single text is cut, and its end held out.
        workers: Processes.
        report: Called with the bytes of input that are done, and all of them.
        key: What complaints call `paths`.
        wait: Until no other command writes the folder; without, that is a complaint.

    Raises:
        ValueError: one line, for sources that hold no data, a record that is none (file and line), or a folder of something else.
    """
    out = Path(out)
    if not 0 <= held_out < 1:
        raise ValueError(f"data.held_out={held_out}: must be at least 0 and below 1")
    for path in paths:
        if is_corpus(path):
            raise ValueError(f"{key}: {path} is a tokenised corpus already")
    found = [(path, sources.regular_files_of(path, key)) for path in paths]
    made = corpus_key(found, tokenizer, encoding, held_out)
    _may_be_written(out, made)
    with locked(out, wait):
        if is_corpus(out):
            _may_be_written(out, made)
            return open_corpus(out)
        total = sum(file.stat().st_size for _, files in found for file in files)
        with _Workers(tokenizer, workers) as pool:
            index, before = [], 0
            for number, (path, files) in enumerate(found):
                size = sum(file.stat().st_size for file in files)
                source = _Source(out, number, path, files, encoding, made, pool)
                index.append(source.make(held_out, lambda done, before=before: report(before + done, total)))
                before += size
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        (out / "tokenizer").mkdir()
        if tokenizer is not None:
            text.copy_tokenizer(tokenizer, out / "tokenizer")
        speaks = open_tokenizer(tokenizer)
        write_index(
            out,
            {
                "made": made,
                "encoding": dataclasses.asdict(encoding),
                "held_out": held_out,
                "tokenizer": {"kind": speaks.kind, "vocab_size": speaks.vocab_size, "identity": speaks.identity},
                "sources": index,
            },
        )
        named = {shard["file"] for source in index for side in SIDES for shard in source[side]["shards"]}
        for file in out.glob("[0-9]*/*"):
            if file.relative_to(out).as_posix() not in named:
                file.unlink()  # what parts had counted, and what earlier calls left
    return open_corpus(out)


@contextlib.contextmanager
def bar() -> Iterator[Callable[[int, int], None]]:
    """A `report` that shows, in a terminal, how much of the input is done."""
    with tqdm(unit="B", unit_scale=True, disable=None, leave=False, desc="tokenising") as shown:

        def report(done: int, total: int) -> None:
            peers.note("own", "tokenises its data")
            shown.total = total
            shown.update(done - shown.n)

        yield report


def corpus_key(found, tokenizer, encoding: Encoding, held_out: float) -> str:
    """A hash of all that decides a corpus: the files by name, size and time, the tokenizer, and what is done."""
    files = [(path, [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]) for path, files in found]
    identity = open_tokenizer(tokenizer).identity
    return _hash([files, identity, dataclasses.asdict(encoding), held_out])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _may_be_written(out: Path, made: str) -> None:
    if is_corpus(out):
        if open_corpus(out).index["made"] != made:
            raise ValueError(f"{out}: already holds a corpus of other sources or settings; name another folder")
    elif out.is_dir() and any(not _ours(entry) for entry in out.iterdir()):
        raise ValueError(f"{out}: holds something else; name an empty folder, or one that does not exist")
    elif out.exists() and not out.is_dir():
        raise ValueError(f"{out}: a file; name a folder to write")


def _ours(entry: Path) -> bool:
    return entry.name.isdecimal() or entry.name in (LOCK, "tokenizer", f"{INDEX}.part")


class _Source:
    """One source of a corpus in the making."""

    def __init__(self, out: Path, number: int, name: str, files, encoding: Encoding, made: str, pool: _Workers):
        self._out, self._folder, self._name = out, out / str(number), name
        self._encoding, self._made, self._pool = encoding, made, pool
        total = sum(file.stat().st_size for file in files)
        least, most = _PART_BYTES
        self._parts = sources.parts_of(files, min(max(total // _PARTS, least), most))

    def make(self, held_out: float, report: Callable[[int], None]) -> dict[str, Any]:
        """Its entry in the index."""
        self._folder.mkdir(exist_ok=True)
        split = _Split(below=int(held_out * _HASHES))
        parts = self._run(split, report)
        if held_out:
            hashes = [part[name] for part in parts for name in ("lowest", "highest") if part[name] is not None]
            counts = [sum(part[side]["documents"] for part in parts) for side in SIDES]
            if hashes and not all(counts):
                # So few documents that chance gave one side none.
                if min(hashes) < max(hashes):
                    split = _Split(below=max(hashes) if counts[1] else min(hashes) + 1)
                elif not any(part["conversations"] for part in parts):
                    split = _Split(after=1 - held_out)
                else:
                    raise ValueError(f"{self._name}: found one conversation, must be two or more, one to hold out (data.held_out)")
                parts = self._run(split, report)
        entry = {"name": self._name, "skipped": dict(sum((Counter(part["skipped"]) for part in parts), Counter()))}
        entry |= {name: sum(part[name] for part in parts) for name in ("texts", "conversations")}
        for side in SIDES[: 2 if held_out else 1]:
            if not sum(part[side]["rows"] for part in parts):
                left = ", ".join(f"{count} {reason}" for reason, count in entry["skipped"].items()) or "no document found"
                what = "held-out document" if side == "held_out" else "document"
                raise ValueError(f"{self._name}: no {what} with a token to learn ({left})")
        for side in SIDES:
            shards = [
                {"file": f"{self._folder.name}/{side}-{i:05d}.array_record"} | {k: part[side][k] for k in ("rows", "size", "sha256")}
                for i, part in enumerate(parts)
                if part[side]["rows"]
            ]
            names = ("rows", "documents", "tokens", "learnt", "bytes", "images")
            counts = {name: sum(part[side][name] for part in parts) for name in names}
            counts["patches"] = max(part[side]["patches"] for part in parts)
            entry[side] = {"counts": counts, "shards": shards}
        return entry

    def _run(self, split: _Split, report: Callable[[int], None]) -> list[dict[str, Any]]:
        key = _hash([self._made, dataclasses.asdict(split)])
        jobs = [_Job(spans, split, self._encoding, self._folder, i, key) for i, spans in enumerate(self._parts)]
        results: dict[int, dict] = {job.number: done for job in jobs if (done := _done(job))}
        weights = [sum(span.size for span in job.spans) for job in jobs]
        finished = sum(weights[number] for number in results)
        report(finished)
        for job, result in self._pool.map([job for job in jobs if job.number not in results]):
            results[job.number] = result
            finished += weights[job.number]
            report(finished)
        return [results[i] for i in range(len(jobs))]


def _done(job: _Job) -> dict[str, Any] | None:
    """What an earlier call counted in a part that it finished."""
    try:
        found = json.loads(job.path("part").with_suffix(".json").read_bytes())
    except (OSError, ValueError):
        return None
    return found if found["key"] == job.key else None


def _make(job: _Job, encoder: Encoder) -> dict[str, Any]:
    """Writes the shards of a part, and last what is in them."""
    encoder.skipped.clear()
    writers = {side: ShardWriter(job.path(side).with_suffix(".array_record")) for side in SIDES}
    packers = {side: Packer(job.encoding.seq_len) for side in SIDES}
    found = {"key": job.key, "texts": 0, "conversations": 0, "lowest": None, "highest": None}
    for document in (document for span in job.spans for document in sources.documents(span)):
        if document is None:
            encoder.skipped["not UTF-8"] += 1
            continue
        used = False
        for side, piece in _sides(document, job.split):
            for tokens in encoder(piece):
                used = True
                for row in packers[side].push(len(tokens.ids) - 1, tokens):
                    writers[side].write(row)
        if used:
            found["texts" if document.messages is None else "conversations"] += 1
            found["lowest"] = min(document.identity, found["lowest"] or document.identity)
            found["highest"] = max(document.identity, found["highest"] or document.identity)
    for side in SIDES:
        for row in packers[side].finish():
            writers[side].write(row)
        found[side] = writers[side].close()
    found["skipped"] = dict(encoder.skipped)
    marker = job.path("part").with_suffix(".json")
    part = marker.with_name(f"{marker.name}.{os.getpid()}.part")
    part.write_text(json.dumps(found))
    os.replace(part, marker)
    return found


def _sides(document: sources.Document, split: _Split) -> Iterator[tuple[str, sources.Document]]:
    if split.after is None or document.text is None:
        yield ("held_out" if document.identity < split.below else "train"), document
        return
    place = round(split.after * len(document.text))
    yield "train", dataclasses.replace(document, text=document.text[:place])
    yield "held_out", dataclasses.replace(document, text=document.text[place:])


class _Workers:
    """Processes that make parts, or this one."""

    def __init__(self, tokenizer: str | Path | None, count: int):
        self._tokenizer, self._count = tokenizer, count
        self._pool = None

    def map(self, jobs: Sequence[_Job]) -> Iterator[tuple[_Job, dict[str, Any]]]:
        """(job, what was counted) as parts are finished."""
        if self._count == 1 or len(jobs) < 2:
            tokenizer = open_tokenizer(self._tokenizer)
            for job in jobs:
                yield job, _make(job, Encoder(tokenizer, job.encoding))
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, context, _begin, (self._tokenizer,))
        futures = {self._pool.submit(_make_here, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_here: dict[str, Any] = {}  # of a worker process


def _begin(tokenizer: str | Path | None) -> None:
    _here["tokenizer"] = open_tokenizer(tokenizer)

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _make_here(job: _Job) -> dict[str, Any]:
    return _make(job, Encoder(_here["tokenizer"], job.encoding))
