"""`python -m k3jax bench convert | data | kda | moe | step | strategies`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import subcommand

from k3jax.cli.options import check


@dataclass(frozen=True)
class BenchConvert:
    """Compare import and export of a made-up checkpoint with `cp`: rates and memory."""

    folder: str = "."
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
    out: str | None = None
    """JSON file to write."""

    def run(self) -> None:
        folder = Path(self.out or "").parent
        check(
            ("folder", self.folder, Path(self.folder).is_dir(), "a folder that exists"),
            ("gib", self.gib, self.gib >= 0, "0 or more"),
            ("kills", self.kills, self.kills >= 0, "0 or more"),
            ("repeats", self.repeats, self.repeats >= 1, "at least 1"),
            ("out", self.out, folder.is_dir(), f"in a folder that exists, {folder} does not"),
        )
        from k3jax.bench import convert

        _hand_over(convert, convert.run(self), self.out)


@dataclass(frozen=True)
class BenchData:
    """Measure making a tokenised corpus and reading packed rows: rates, memory, and how full the rows are."""

    folder: str = "."
    """Where to make both; one and a half times their sizes must be free."""
    mb: float = 100.0
    """Input of each kind, texts and conversations, in 10^6 bytes; 0 leaves making out."""
    gib: float = 2.0
    """Size of the corpus that is read; 0 leaves reading out."""
    workers: int = 0
    """Processes that make; 0 for one a core."""
    seconds: float = 10.0
    """How long to read."""
    tokenizer: str | None = None
    """Folder of a tokenizer's files; one of 16,384 tokens is made without."""
    out: str | None = None
    """JSON file to write."""

    def run(self) -> None:
        folder = Path(self.out or "").parent
        check(
            ("folder", self.folder, Path(self.folder).is_dir(), "a folder that exists"),
            ("mb", self.mb, self.mb >= 0, "0 or more"),
            ("gib", self.gib, self.gib >= 0, "0 or more"),
            ("workers", self.workers, self.workers >= 0, "0 or more"),
            ("seconds", self.seconds, self.seconds > 0, "above 0"),
            ("out", self.out, folder.is_dir(), f"in a folder that exists, {folder} does not"),
        )
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
    out: str | None = None
    """JSON file to write."""

    def run(self) -> None:
        tokens, long, folder = self.tokens, self.long_tokens, Path(self.out or "").parent
        check(
            ("tokens", tokens, tokens > 0 and tokens % 64 == 0, "a positive multiple of 64"),
            ("heads", self.heads, self.heads >= 1, "at least 1"),
            ("batch", self.batch, self.batch >= 1, "at least 1"),
            ("key-dim", self.key_dim, self.key_dim >= 1, "at least 1"),
            ("value-dim", self.value_dim, self.value_dim >= 1, "at least 1"),
            ("repeats", self.repeats, self.repeats >= 1, "at least 1"),
            ("long-tokens", long, long >= 0 and long % 64 == 0, "a multiple of 64, or 0"),
            ("decode-batch", self.decode_batch, self.decode_batch >= 0, "0 or more"),
            ("out", self.out, folder.is_dir(), f"in a folder that exists, {folder} does not"),
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
    out: str | None = None
    """JSON file to write."""

    def run(self) -> None:
        folder = Path(self.out or "").parent
        even = self.tokens * self.active % max(self.experts, 1) == 0
        check(
            *((name, getattr(self, name), getattr(self, name) >= 1, "at least 1") for name in ("experts", "latent")),
            ("width", self.width, self.width >= 1, "at least 1"),
            ("active", self.active, 1 <= self.active < self.experts, f"from 1 to {self.experts - 1}, fewer than experts"),
            ("tokens", self.tokens, self.tokens >= 1 and even, "such that tokens * active is a multiple of experts"),
            ("repeats", self.repeats, self.repeats >= 1, "at least 1"),
            ("out", self.out, folder.is_dir(), f"in a folder that exists, {folder} does not"),
        )
        from k3jax.bench import moe

        _hand_over(moe, moe.run(self), self.out)


@dataclass(frozen=True)
class BenchStep:
    """Time training and decoding steps on one device: beside matrix products, and beside plain residuals.

    Settings of the file are changed as key=value: python -m k3jax bench step data.seq_len=256
    """

    config: str = "configs/midsize.py"
    """Python file that defines `config`, a k3jax.run_config.RunConfig. Its data and mesh do not matter."""
    repeats: int = 3
    """Rounds."""
    decode_batch: int = 16
    """Rows of a decoding step; 0 leaves it out."""
    out: str | None = None
    """JSON file to write."""

    def run(self, overrides: Sequence[str] = ()) -> None:
        folder = Path(self.out or "").parent
        check(
            ("repeats", self.repeats, self.repeats >= 1, "at least 1"),
            ("decode-batch", self.decode_batch, self.decode_batch >= 0, "0 or more"),
            ("out", self.out, folder.is_dir(), f"in a folder that exists, {folder} does not"),
        )
        from k3jax import run_config

        config = run_config.apply_overrides(run_config.load_config(self.config), overrides)
        dataclasses.replace(config, mesh=run_config.MeshConfig(), cpu_devices=0).validate()
        _compile_anew()
        from k3jax.bench import step

        _hand_over(step, step.run(config, self.repeats, self.decode_batch), self.out)


@dataclass(frozen=True)
class BenchStrategies:
    """Compare sharding strategies: step time, memory, what every collective moves.

    Settings of the file are changed as key=value: python -m k3jax bench strategies data.seq_len=256
    """

    config: str = "configs/quickstart.py"
    """Python file that defines `config`, a k3jax.run_config.RunConfig. Its mesh does not matter."""
    strategies: str = ""
    """Strategies, separated by commas; all of configs/strategies if empty."""
    steps: int = 5
    """Rounds; each times every strategy."""
    out: str | None = None
    """JSON file to write."""

    def run(self, overrides: Sequence[str] = ()) -> None:
        folder = Path(self.out or "").parent
        check(
            ("steps", self.steps, self.steps >= 1, "at least 1"),
            ("out", self.out, folder.is_dir(), f"in a folder that exists, {folder} does not"),
        )
        from k3jax import run_config, runtime

        config = run_config.apply_overrides(run_config.load_config(self.config), overrides)
        names = self.strategies.split(",") if self.strategies else run_config.strategy_names()
        meshes = {name: run_config.load_strategy(name) for name in names}
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
