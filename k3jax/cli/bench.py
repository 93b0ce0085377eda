"""`python -m k3jax bench convert | data | kda | moe | step | strategies`."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import subcommand

from k3jax.cli.options import MOST_ROUNDS, at_least, check, in_memory, rounds, workers, writable
from k3jax.values import PathText

MOST_ROWS = 4096  # of a decoding step


@dataclass(frozen=True)
class BenchConvert:
    """Compare import and export of a made-up checkpoint with `cp`: rates and memory."""

    folder: PathText = "."
    """Where to make it; three times its size must be free, and six with --dequantized."""
    gib: float = 8.0
    """Size of the checkpoint; 0 leaves the rates out."""
    repeats: int = 3
    """Rounds."""
    dequantized: bool = False
    """Import to bfloat16, too."""
    index: bool = True
    """Check the headers of the whole Kimi K3, too."""
    kills: int = 0
    """Kill import and export this often, and compare what they end with."""
    out: PathText | None = None
    """JSON file to write."""

    def run(self) -> None:
        check(
            ("folder", self.folder, Path(self.folder).is_dir(), "a folder that exists"),
            ("gib", self.gib, self.gib >= 0, "0 or more"),
            *rounds(repeats=self.repeats),
            ("kills", self.kills, 0 <= self.kills <= MOST_ROUNDS, f"from 0 to {MOST_ROUNDS:,}"),
            writable("out", self.out),
        )
        free = shutil.disk_usage(self.folder).free / 2**30
        copies = 6 if self.dequantized else 3
        room = f"at most 1/{copies} of the {free:.3g} GiB that are free in --folder {self.folder}"
        check(("gib", self.gib, copies * self.gib <= free, room))
        from k3jax.bench import convert

        _hand_over(convert, convert.run(self), self.out)


@dataclass(frozen=True)
class BenchData:
    """Measure making a tokenised corpus and reading packed rows: rates, memory, and how full the rows are."""

    folder: PathText = "."
    """Where to make both; three times --mb and one and a half times --gib must be free."""
    mb: float = 100.0
    """Input of each kind, texts and conversations, in 10^6 bytes; 0 leaves making out."""
    gib: float = 2.0
    """Size of the corpus that is read; 0 leaves reading out."""
    workers: int = 0
    """Processes that make; 0 for one a core."""
    seconds: float = 10.0
    """How long to read."""
    tokenizer: PathText | None = None
    """Folder of a tokenizer's files; one of 16,384 tokens is made without."""
    out: PathText | None = None
    """JSON file to write."""

    def run(self) -> None:
        check(
            ("folder", self.folder, Path(self.folder).is_dir(), "a folder that exists"),
            ("mb", self.mb, self.mb >= 0, "0 or more"),
            ("gib", self.gib, self.gib >= 0, "0 or more"),
            workers(self.workers),
            ("seconds", self.seconds, self.seconds > 0, "above 0"),
            ("tokenizer", self.tokenizer, self.tokenizer is None or Path(self.tokenizer).is_dir(), "a folder that exists"),
            writable("out", self.out),
        )
        free, needed = shutil.disk_usage(self.folder).free, 3e6 * self.mb + 1.5 * 2**30 * self.gib
        room = f"smaller: --mb and --gib take {needed / 1e9:.3g} GB, {free / 1e9:.3g} GB are free in --folder {self.folder}"
        check(("mb", self.mb, 3e6 * self.mb <= free, room), ("gib", self.gib, needed <= free, room))
        from k3jax.bench import data

        options = dataclasses.replace(self, workers=self.workers or os.cpu_count() or 1)
        _hand_over(data, data.run(options), self.out)


@dataclass(frozen=True)
class BenchKda:
    """Compare the implementations of Kimi Delta Attention: correctness, time, memory."""

    tokens: int = 2048
    """Tokens of a row, a multiple of 64."""
    heads: int = 4
    """Heads."""
    batch: int = 1
    """Rows."""
    key_dim: int = 128
    """Size of a query and key."""
    value_dim: int = 128
    """Size of a value."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of queries, keys and values."""
    repeats: int = 9
    """Rounds; each times every implementation once."""
    long_tokens: int = 16384
    """Tokens that the growth of time and memory is measured to, a multiple of 64; 0 leaves it out."""
    decode_batch: int = 16
    """Rows of a decode step, 96 heads each; 0 leaves it out."""
    out: PathText | None = None
    """JSON file to write."""

    def run(self) -> None:
        tokens, long, batch = self.tokens, self.long_tokens, self.decode_batch
        check(
            ("tokens", tokens, tokens > 0 and tokens % 64 == 0, "a positive multiple of 64"),
            *at_least(1, heads=self.heads, batch=self.batch, key_dim=self.key_dim, value_dim=self.value_dim),
            *rounds(repeats=self.repeats),
            ("long-tokens", long, long >= 0 and long % 64 == 0, "a multiple of 64, or 0"),
            *at_least(0, decode_batch=batch),
            writable("out", self.out),
        )
        a_token = 4 * self.batch * self.heads * (3 * self.key_dim + 2 * self.value_dim)
        check(
            in_memory("tokens", tokens, a_token * tokens),
            in_memory("long-tokens", long, a_token * long),
            in_memory("decode-batch", batch, 4 * batch * 96 * 128 * 128),
        )
        _compile_anew()
        from k3jax.bench import kda

        _hand_over(kda, kda.run(self), self.out)


@dataclass(frozen=True)
class BenchMoe:
    """Compare a routed layer with every expert on every token, and with the experts' products alone."""

    tokens: int = 4096
    """Tokens."""
    experts: int = 64
    """Experts."""
    active: int = 8
    """Experts a token."""
    latent: int = 512
    """Width the experts act on."""
    width: int = 512
    """Hidden units of an expert."""
    repeats: int = 3
    """Rounds; each times every form."""
    out: PathText | None = None
    """JSON file to write."""

    def run(self) -> None:
        even = self.tokens * self.active % max(self.experts, 1) == 0
        check(
            *at_least(1, experts=self.experts, latent=self.latent, width=self.width),
            ("active", self.active, 1 <= self.active < self.experts, f"from 1 to {self.experts - 1}, fewer than experts"),
            ("tokens", self.tokens, self.tokens >= 1 and even, "such that tokens * active is a multiple of experts"),
            *rounds(repeats=self.repeats),
            writable("out", self.out),
        )
        # Every expert on every token is what takes most.
        an_expert = 4 * (self.latent + self.width)
        check(
            in_memory("experts", self.experts, 3 * 4 * self.experts * self.latent * self.width),
            in_memory("tokens", self.tokens, an_expert * self.experts * self.tokens),
        )
        from k3jax.bench import moe

        _hand_over(moe, moe.run(self), self.out)


@dataclass(frozen=True)
class BenchStep:
    """Time training and decoding steps on one device: beside matrix products, and beside plain residuals.

    Settings of the file are changed as key=value: python -m k3jax bench step data.seq_len=256
    """

    config: PathText | None = None
    """Python file that defines `config`, a k3jax.run_config.RunConfig. Its data and mesh do not matter. None: midsize."""
    repeats: int = 3
    """Rounds."""
    decode_batch: int = 16
    """Rows of a decoding step; 0 leaves it out."""
    out: PathText | None = None
    """JSON file to write."""

    def run(self, overrides: Sequence[str] = ()) -> None:
        most = f"from 0 to {MOST_ROWS:,}"
        check(
            *rounds(repeats=self.repeats),
            ("decode-batch", self.decode_batch, 0 <= self.decode_batch <= MOST_ROWS, most),
            writable("out", self.out),
        )
        from k3jax import run_config, settings

        path = self.config or settings.CONFIGS / "midsize.py"
        config = settings.apply_overrides(settings.load_config(path), overrides)
        dataclasses.replace(config, mesh=run_config.MeshConfig(), cpu_devices=0).validate()
        _compile_anew()
        from k3jax.bench import step

        _hand_over(step, step.run(config, self.repeats, self.decode_batch), self.out)


@dataclass(frozen=True)
class BenchStrategies:
    """Compare sharding strategies: step time, memory, what every collective moves.

    Settings of the file are changed as key=value: python -m k3jax bench strategies data.seq_len=256
    """

    config: PathText | None = None
    """Python file that defines `config`, a k3jax.run_config.RunConfig. Its mesh does not matter. None: the quickstart."""
    strategies: str | None = None
    """Strategies, separated by commas. None: all of configs/strategies."""
    steps: int = 5
    """Rounds; each times every strategy."""
    out: PathText | None = None
    """JSON file to write."""

    def run(self, overrides: Sequence[str] = ()) -> None:
        check(*rounds(steps=self.steps), writable("out", self.out))
        from k3jax import run_config, runtime, settings

        path = self.config or settings.CONFIGS / "quickstart.py"
        config = settings.apply_overrides(settings.load_config(path), overrides)
        names = self.strategies.split(",") if self.strategies else settings.strategy_names()
        meshes = {name: settings.load_strategy(name) for name in names}
        if config.processes.count > 1:
            raise ValueError(f"processes.count={config.processes.count}: must be 1 in a benchmark")
        dataclasses.replace(config, mesh=run_config.MeshConfig(), cpu_devices=0).validate()
        runtime.setup(config.cpu_devices)
        _compile_anew()
        from k3jax.bench import strategies

        _hand_over(strategies, strategies.run(config, meshes, self.steps), self.out)


def _compile_anew() -> None:
    import jax

    # A program read from the cache would seem to compile at once.
    jax.config.update("jax_enable_compilation_cache", False)


def _hand_over(bench, report, out: str | None) -> None:
    """Prints a benchmark's report, writes it, and complains of what is wrong in it."""
    from k3jax.bench import timing

    print(bench.text(report), flush=True)
    if out:
        timing.write_json(out, report)
    if wrong := bench.wrong(report):
        raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Bench:
    """Measure this machine's speed."""

    subject: (
        Annotated[BenchConvert, subcommand("convert")]
        | Annotated[BenchData, subcommand("data")]
        | Annotated[BenchKda, subcommand("kda")]
        | Annotated[BenchMoe, subcommand("moe")]
        | Annotated[BenchStep, subcommand("step")]
        | Annotated[BenchStrategies, subcommand("strategies")]
    )
    """What to measure."""

    def run(self, *rest) -> None:
        self.subject.run(*rest)
