"""Making a tokenised corpus and reading packed rows: rates, memory, and how full the rows are."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.data import sources
from k3jax.data.corpus import ShardWriter, write_index
from k3jax.data.encoding import Encoding, Tokens
from k3jax.data.packing import Packer

GIB = 2**30
SEQ_LEN, BATCH = 4096, 16
MAKE_BAR = 5e6  # bytes of text a second and core
READ_BAR = 20e6  # tokens a second
MEMORY_BAR = 300 * 2**20  # beyond the interpreter's
UTILISATION_BAR = 0.97
_SHARDS = 64


def run(options) -> dict[str, Any]:
    """`options`: `k3jax.cli.bench.BenchData`."""
    report = {"cpus": os.cpu_count(), "make": [], "read": None}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-data-") as folder:
        if options.mb:
            report["make"] = _make(Path(folder), int(options.mb * 1e6), options.workers, options.tokenizer)
        if options.gib:
            made_up(Path(folder) / "rows", int(options.gib * GIB))
            report["read"] = _child(_read, str(Path(folder) / "rows"), options.seconds)
    return report


def _make(folder: Path, size: int, workers: int, tokenizer: str | None) -> list[dict[str, Any]]:
    texts = [file.read_text("utf-8", "replace") for file in sources.files_of(sources.LIBRARY)]
    if tokenizer is None:
        from k3jax.text import train_tokenizer

        tokenizer = str(folder / "tokenizer")
        train_tokenizer(texts, 16384, tokenizer)
    rows = []
    for name, records in (("texts", _texts(texts)), ("conversations", _chats("\n".join(texts)))):
        file, written = folder / f"{name}.jsonl", 0
        with open(file, "w") as stream:
            while written < size:
                written += stream.write(json.dumps(next(records)) + "\n")
        rows.append({"what": name} | _child(_tokenize, str(folder / name), str(file), tokenizer, workers))
        file.unlink()
    return rows


def _texts(texts):
    while True:
        yield from ({"text": text} for text in texts)


def _chats(text: str):
    """Conversations of about 20 to 4,000 tokens."""
    draw = random.Random(0)
    while True:
        messages = []
        for _ in range(draw.randint(1, 5)):
            at, sizes = draw.randrange(len(text) - 4000), [draw.randint(40, 1600) for _ in range(2)]
            messages.append({"role": "user", "content": text[at : at + sizes[0]]})
            answer = text[at + sizes[0] : at + sum(sizes)]
            messages.append({"role": "assistant", "content": answer, "reasoning_content": answer[: sizes[1] // 4]})
        yield {"messages": messages}


def _tokenize(out: str, file: str, tokenizer: str, workers: int) -> dict[str, Any]:
    from k3jax.data.tokenize import tokenize

    start, used = time.perf_counter(), _cpu_seconds()
    corpus = tokenize(out, [file], tokenizer, Encoding(SEQ_LEN), workers=workers)
    seconds, used = time.perf_counter() - start, _cpu_seconds() - used
    counts = corpus.rows("train")[0].counts
    size = os.path.getsize(file)
    return {
        "bytes": size,
        "tokens": counts["tokens"],
        "workers": workers,
        "rate": size / seconds,
        "core_rate": size / used,
        "utilisation": counts["tokens"] / counts["rows"] / SEQ_LEN,
    }


def _cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def made_up(folder: Path, size: int) -> None:
    """A corpus of about so many bytes of rows; the tokens are random."""
    rng = np.random.default_rng(0)
    packer, rows = Packer(SEQ_LEN), []
    while len(rows) < 256:
        count = int(rng.integers(20, 4000))
        tokens = Tokens(rng.integers(0, 163840, count, np.int32), rng.random(count) < 0.5, 4 * count)
        rows += packer.push(count - 1, tokens)
    shards, total = [], dict.fromkeys(("rows", "documents", "tokens", "learnt", "bytes"), 0)
    (folder / "0").mkdir(parents=True)
    for number in range(_SHARDS):
        writer = ShardWriter(folder / "0" / f"train-{number:05d}.array_record")
        for i in range(max(1, size // _SHARDS // (4 * SEQ_LEN))):
            writer.write(rows[(i + 7 * number) % len(rows)])
        counts = writer.close()
        shards.append({"file": f"0/train-{number:05d}.array_record"} | {k: counts[k] for k in ("rows", "size", "sha256")})
        total = {name: count + counts[name] for name, count in total.items()}
    side = {"counts": total, "shards": shards}
    source = {"name": "made up", "texts": 0, "conversations": 0, "skipped": {}, "train": side}
    source["held_out"] = {"counts": dict.fromkeys(total, 0), "shards": []}
    index = {"made": "", "encoding": vars(Encoding(SEQ_LEN)), "held_out": 0, "tokenizer": {}, "sources": [source]}
    write_index(folder, index)


def _read(folder: str, seconds: float) -> dict[str, Any]:
    from k3jax.data.ahead import Ahead
    from k3jax.data.corpus import open_corpus
    from k3jax.data.packed import PackedDataset
    from k3jax.runtime import peak_memory

    corpus = open_corpus(folder)
    data = PackedDataset(corpus.rows("train"), BATCH)
    size = sum(shard.size for shard in data.sources[0].shards)
    start, tokens, step = time.perf_counter(), 0, 0
    with Ahead(data.batch, 0, 1 << 40) as batches:
        for step, batch in enumerate(batches, 1):
            tokens += int(np.count_nonzero(batch["segment_ids"]))
            if time.perf_counter() - start >= seconds:
                break
    rate = tokens / (time.perf_counter() - start)
    return {"bytes": size, "batches": step, "tokens": tokens, "rate": rate, "memory": peak_memory() - _bare_memory()}


def _bare_memory() -> int:
    """Of an interpreter that does nothing."""
    code = "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    return 1024 * int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def _child(function, *arguments) -> dict[str, Any]:
    """What `function` gives in a process of its own, whose memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def text(report: dict[str, Any]) -> str:
    """The report as tables."""
    from k3jax.bench.timing import table

    parts = []
    if report["make"]:
        rows = [("", "MB", "processes", "MB/s", "MB/s of CPU time", "utilisation")]
        for row in report["make"]:
            rates = (f"{row[name] / 1e6:.1f}" for name in ("rate", "core_rate"))
            rows.append((row["what"], f"{row['bytes'] / 1e6:.0f}", str(row["workers"]), *rates, f"{row['utilisation']:.1%}"))
        parts.append(f"Tokenising and packing into rows of {SEQ_LEN}, {report['cpus']} cores\n\n{table(rows)}")
    if found := report["read"]:
        parts.append(
            f"Reading batches of {BATCH} rows of {SEQ_LEN} in a run's order from {found['bytes'] / GIB:.2f} GiB: "
            f"{found['rate'] / 1e6:.1f} M tokens/s, {found['memory'] / 2**20:.0f} MiB of memory beyond the interpreter's"
        )
    return "\n\n".join(parts)


def wrong(report: dict[str, Any]) -> list[str]:
    """What misses its bar."""
    found = []
    for row in report["make"]:
        if row["core_rate"] < MAKE_BAR:
            found.append(f"{row['what']}: {row['core_rate'] / 1e6:.1f} MB/s of CPU time, below {MAKE_BAR / 1e6:.0f}")
        if row["utilisation"] < UTILISATION_BAR:
            found.append(f"{row['what']}: utilisation {row['utilisation']:.1%}, below {UTILISATION_BAR:.0%}")
    if read := report["read"]:
        if read["rate"] < READ_BAR:
            found.append(f"reading: {read['rate'] / 1e6:.1f} M tokens/s, below {READ_BAR / 1e6:.0f}")
        if read["memory"] > MEMORY_BAR:
            found.append(f"reading: {read['memory'] / 2**20:.0f} MiB, above {MEMORY_BAR / 2**20:.0f}")
    return found
