"""Import and export beside `cp` on the same file system, their memory, and what they are made of."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.bench.timing import interleaved, machine, progress, table
from k3jax.config import ModelConfig
from k3jax.hf.files import INDEX
from k3jax.hf.names import table as released
from k3jax.hf.synthesize import synthesize
from k3jax.ops import mx
from k3jax.settings import CONFIGS, load_model
from k3jax.runtime import peak_memory

GIB = 2**30
KILLED_GIB = 0.5  # of a checkpoint whose conversion is killed again and again
BARS = {"import, packed": 0.6, "export": 0.5}  # of the rate of cp
MEMORY_GIB = 3
INDEX_SECONDS, INDEX_GIB = 20, 1.5
DEQUANTIZE = 1.5  # times a copy of the result


def model(gib: float) -> ModelConfig:
    """A model whose checkpoint is about `gib` GiB, most of it experts of Kimi K3's size."""

    def of(num_experts: int) -> ModelConfig:
        return ModelConfig(
            model_type="kimi_k3",
            vocab_size=4096,
            hidden_size=1024,
            intermediate_size=2048,
            num_hidden_layers=5,
            num_attention_heads=8,
            q_lora_rank=256,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            kda_layers=(1, 2, 3, 5),
            full_attn_layers=(4,),
            kda_head_dim=128,
            kda_num_heads=8,
            gate_lower_bound=-5.0,
            use_full_rank_gate=True,
            num_experts=num_experts,
            num_experts_per_token=1,
            num_shared_experts=1,
            moe_intermediate_size=3072,
            routed_expert_hidden_size=3584,
            latent_moe_use_norm=True,
            hidden_act="situ",
            attn_res_block_size=4,
            quantized_experts=True,
        )

    two, three = stored_bytes(of(2)), stored_bytes(of(3))
    return of(max(2, 2 + round((gib * GIB - two) / (three - two))))


def stored_bytes(cfg: ModelConfig) -> int:
    return sum(leaf.count * leaf.tensor_bytes for leaf in released(cfg))


def run(options) -> dict[str, Any]:
    """Compares as the command's options say; what `text` prints, fit for JSON."""
    report = {"machine": machine(), "folder": str(options.folder), "rates": [], "index": None, "kills": []}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-convert-") as folder:
        if options.gib:
            report["rates"] = _rates(Path(folder), options.gib, options.repeats, options.dequantized)
        if options.index:
            report["index"] = _index(Path(folder) / "index")
        if options.kills:
            report["kills"] = _kills(Path(folder) / "kills", options.kills)
    report["dequantize"] = _dequantize(options.repeats)
    return report


def _rates(folder: Path, gib: float, repeats: int, dequantized: bool) -> list[dict[str, Any]]:
    cfg = model(gib)
    source, imported, out = folder / "source", folder / "imported", folder / "out"
    rows = [_row("synthesize", stored_bytes(cfg), [_child(synthesize, cfg, source)])]
    convert = lambda *line: _child(_command, "convert", *map(str, line))  # noqa: E731
    calls: dict[str, tuple[Path, Path, Callable]] = {
        "cp": (source, out, lambda: _copy(source, out)),
        "import, packed": (source, imported, lambda: convert("import", source, imported, "--experts", "packed")),
        "export": (imported, out, lambda: convert("export", imported, out)),
    }
    if dequantized:
        wide = folder / "wide"
        calls["import, bfloat16"] = (source, wide, lambda: convert("import", source, wide))
    taken: dict[str, list] = {name: [] for name in calls}
    written = {}
    for name, (origin, destination, call) in progress(list(calls.items()) * repeats, "rates"):
        shutil.rmtree(destination, ignore_errors=True)
        _forget(origin)
        taken[name].append(call())
        written[name] = _size(destination)
    shutil.rmtree(folder / "wide", ignore_errors=True)
    return rows + [_row(name, written[name], rounds) for name, rounds in taken.items()]


def _row(name: str, size: int, rounds: list[dict]) -> dict[str, Any]:
    seconds = statistics.median(r["seconds"] for r in rounds)
    memory = max(r["memory"] for r in rounds)
    return {"what": name, "bytes": size, "seconds": seconds, "rate": size / seconds, "memory": memory}


def _copy(source: Path, destination: Path) -> dict[str, Any]:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, destination], check=True)
    for file in destination.rglob("*"):  # as export and import do
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.perf_counter() - start, "memory": 0}


def _forget(folder: Path) -> None:
    """Has the system drop a folder's files from memory; nothing waits to be written then."""
    os.sync()
    for file in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _child(function: Callable, *arguments) -> dict[str, Any]:
    """Seconds of a call in a process of its own, its start included, and the most memory that it held."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    start = time.perf_counter()
    process = context.Process(target=_report_memory, args=(send, function, *arguments))
    process.start()
    send.close()
    try:
        memory, result = receive.recv()
    except EOFError:
        raise ValueError(f"{function.__name__} failed, see above") from None
    process.join()
    return {"seconds": time.perf_counter() - start, "memory": memory, "result": result}


def _report_memory(send, function: Callable, *arguments) -> None:
    result = function(*arguments)
    send.send((peak_memory(), result))


def _command(*line: str) -> None:
    """`python -m k3jax` in this process, whose memory is measured."""
    sys.argv[1:] = line
    try:
        runpy.run_module("k3jax", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _index(folder: Path) -> dict[str, Any]:
    """Validates and plans the import of the headers of Kimi K3, in files that have no data but its size."""
    from k3jax.hf.shards import ShardWriter, split

    cfg = load_model(CONFIGS / "kimi_k3.py")
    leaves = released(cfg)
    writer = ShardWriter(folder, cfg.to_hf(), leaves, split(leaves, 17 * 10**9))
    writer.begin()
    writer.commit()
    found = _child(_plan, folder)
    shutil.rmtree(folder)
    return found


def _plan(folder: Path) -> dict[str, Any]:
    from k3jax.train.convert import plan_import

    plan = plan_import(folder, experts="packed")
    pieces = sum(1 for leaf in plan.leaves.values() for _ in leaf.boxes())
    return {"tensors": len(plan.checkpoint.headers), "shards": len(plan.checkpoint.shards), "pieces": pieces}


def _kills(folder: Path, kills: int) -> list[dict[str, Any]]:
    """Kills import and export while they write, at random moments, lets the same command go on, and compares the ends."""
    source, imported, out = folder / "source", folder / "imported", folder / "out"
    synthesize(model(KILLED_GIB), source)
    rows = []
    for what, origin, reference in (("import", source, imported), ("export", imported, folder / "exported")):
        line = [sys.executable, "-m", "k3jax", "convert", what, str(origin)]

        def begin(destination: Path, line=line) -> subprocess.Popen:
            process = subprocess.Popen([*line, str(destination)])
            while not destination.exists() and process.poll() is None:
                time.sleep(0.005)
            return process

        process, start = begin(reference), time.perf_counter()
        process.wait()
        seconds, expected = time.perf_counter() - start, _digests(reference)
        row = {"what": what, "kills": kills, "unfinished": 0, "differing": 0}
        for _ in progress(range(kills), f"kills of {what}"):
            process = begin(out)
            time.sleep(random.uniform(0, seconds))
            process.kill()
            process.wait()
            if not _whole(out, what):
                row["unfinished"] += 1
                subprocess.run([*line, str(out)], check=True)
            row["differing"] += _digests(out) != expected
            shutil.rmtree(out)
        rows.append(row)
    return rows


def _whole(out: Path, what: str) -> bool:
    """Whether nothing is left to do, by what only a finished command leaves."""
    last = out / "checkpoints" / "0" if what == "import" else out / INDEX
    return last.exists() and not any(out.rglob("*unfinished"))


def _digests(folder: Path) -> dict[str, str]:
    """Of all files but the two in which Orbax notes when and where it wrote."""
    found = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        if path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt"):
            with open(path, "rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _dequantize(repeats: int) -> dict[str, float]:
    """Milliseconds of packed experts to bfloat16, and of a copy of the result: four of Kimi K3's matrices."""
    rng = np.random.default_rng(0)
    packed = jnp.asarray(rng.integers(0, 256, (4, 3072, 1792), np.uint8))
    scale = jnp.asarray(rng.integers(118, 123, (4, 3072, 112), np.uint8))
    dequantize, copy = jax.jit(mx.dequantize_packed), jax.jit(jnp.copy)
    values = dequantize(packed, scale)
    calls = {"dequantize": lambda: dequantize(packed, scale), "copy": lambda: copy(values)}
    return {name: time.seconds for name, time in interleaved(calls, max(repeats, 3), "dequantisation").items()}


def text(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = []
    if report["rates"]:
        rows = [("", "GiB written", "s", "MB/s", "/ cp", "GiB of memory")]
        for row in report["rates"]:
            of_copy = "-" if row["what"] == "synthesize" else f"{row['rate'] / _copy_rate(report):.2f}"
            memory = f"{row['memory'] / GIB:.2f}" if row["memory"] else "-"
            numbers = (f"{row['bytes'] / GIB:.2f}", f"{row['seconds']:.1f}", f"{row['rate'] / 1e6:.0f}")
            rows.append((row["what"], *numbers, of_copy, memory))
        lines += ["Whole commands, from files that are not in memory until all is on disk:", "", table(rows), ""]
    if index := report["index"]:
        counts = index["result"]
        lines += [
            f"headers of Kimi K3: {counts['tensors']:,} tensors in {counts['shards']} shards checked and planned as "
            f"{counts['pieces']:,} pieces in {index['seconds']:.1f} s and {index['memory'] / GIB:.2f} GiB",
        ]
    for row in report["kills"]:
        lines += [
            f"{row['what']} killed {row['kills']} times while it wrote, {row['unfinished']} left to go on: "
            f"{row['differing']} ended with other bytes"
        ]
    times = report["dequantize"]
    lines += [f"packed to bfloat16: {1e3 * times['dequantize']:.1f} ms, {_slower(times):.2f} of a copy of the result"]
    return "\n".join(lines)


def _copy_rate(report: dict[str, Any]) -> float:
    return next(row["rate"] for row in report["rates"] if row["what"] == "cp")


def _slower(times: dict[str, float]) -> float:
    return times["dequantize"] / times["copy"]


def wrong(report: dict[str, Any]) -> list[str]:
    """What is slower or larger than it should be."""
    found = []
    for row in report["rates"]:
        bar = BARS.get(row["what"])
        if bar and row["rate"] < bar * _copy_rate(report):
            found.append(f"{row['what']}: {row['rate'] / _copy_rate(report):.2f} of the rate of cp, below {bar}")
        if row["memory"] > MEMORY_GIB * GIB:
            found.append(f"{row['what']}: {row['memory'] / GIB:.2f} GiB of memory, above {MEMORY_GIB}")
    found += [
        f"{row['what']} gone on: {row['differing']} ended with other bytes"
        for row in report["kills"]
        if row["differing"]
    ]
    if (index := report["index"]) and (index["seconds"] > INDEX_SECONDS or index["memory"] > INDEX_GIB * GIB):
        found.append(
            f"headers: {index['seconds']:.1f} s and {index['memory'] / GIB:.2f} GiB, above {INDEX_SECONDS} and {INDEX_GIB}"
        )
    if _slower(report["dequantize"]) > DEQUANTIZE:
        found.append(f"dequantisation: {_slower(report['dequantize']):.2f} of a copy, above {DEQUANTIZE}")
    return found
