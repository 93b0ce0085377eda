"""The command line: `python -m k3jax train | generate | convert | bench | inspect`.

A mistake in what the user gave (a setting, a file, a checkpoint) ends with one line on stderr and exit code
2; `K3JAX_TRACEBACK=1` shows where it was raised. JAX is imported when a command runs, not for `--help`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, subcommand


@dataclass(frozen=True)
class Train:
    """Train a model.

    Settings of the file are changed as key=value: python -m k3jax train --config configs/quickstart.py
    train.steps=50 strategy=ep_tp --out runs/short
    """

    config: str
    """Python file that defines `config`, a k3jax.run_config.RunConfig."""

    def run(self, overrides: Sequence[str]) -> None:
        from k3jax import run_config, runtime

        config = run_config.apply_overrides(run_config.load_config(self.config), overrides)
        config.validate()
        runtime.setup(config.cpu_devices, config.processes)
        import jax

        from k3jax.train import loop

        with runtime.ending_together():
            loop.train(config.on(jax.device_count()))


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with a trained or released model."""

    checkpoint: Positional[str]
    """Checkpoint of a run, or folder of the released layout."""
    prompt: str
    """Text to continue."""
    max_tokens: int = 200
    """Most tokens to write."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this much probability."""
    seed: int = 0
    """Seed of the draws."""
    experts: Literal["packed", "dequantized"] = "packed"
    """How the routed experts are held in memory: 4-bit, or as ordinary numbers."""
    mxfp8_inputs: bool = True
    """Round expert inputs to MXFP8, as quantisation-aware training does."""

    def run(self) -> None:
        _check(
            ("max-tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, self.temperature >= 0, "0 or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
        )
        from k3jax import runtime

        runtime.setup()
        from k3jax.serve import generate

        pieces = generate.generate_text(
            self.checkpoint,
            self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            experts=self.experts,
            mxfp8_inputs=self.mxfp8_inputs,
        )
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


@dataclass(frozen=True)
class Export:
    """Write a run's checkpoint in the released layout, experts packed."""

    source: Positional[str]
    """Checkpoint of a run: its step folder, or a run folder for its newest one."""
    destination: Positional[str]
    """Folder to write."""

    def run(self) -> None:
        from k3jax import runtime

        runtime.setup()
        from k3jax.train import export

        export.export_checkpoint(self.source, self.destination)


@dataclass(frozen=True)
class Import:
    """Write a checkpoint of the released layout as one a run can start from."""

    source: Positional[str]
    """Folder of the released layout."""
    destination: Positional[str]
    """Folder to write."""

    def run(self) -> None:
        from k3jax import runtime

        runtime.setup()
        from k3jax.train import export

        export.import_checkpoint(self.source, self.destination)


@dataclass(frozen=True)
class Convert:
    """Change a checkpoint's layout."""

    direction: Annotated[Export, subcommand("export")] | Annotated[Import, subcommand("import")]

    def run(self) -> None:
        self.direction.run()


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
        _check(
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
        _check(
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
        _check(
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
        _check(
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
        Annotated[BenchKda, subcommand("kda")]
        | Annotated[BenchMoe, subcommand("moe")]
        | Annotated[BenchStep, subcommand("step")]
        | Annotated[BenchStrategies, subcommand("strategies")]
    )
    """What to measure."""

    def run(self, *rest) -> None:
        self.subject.run(*rest)


@dataclass(frozen=True)
class Inspect:
    """Say what a configuration or checkpoint holds."""

    path: Positional[str]
    """A released config.json, or a checkpoint folder."""

    def run(self) -> None:
        from k3jax.hf import inspect

        print(inspect.report(self.path))


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Inspect, subcommand("inspect")]
)
_NAMES = ("train", "generate", "convert", "bench", "inspect")
_PROG = "python -m k3jax"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for a mistake of the user, 130 when interrupted.

    Example:
        >>> main(["train", "--config", "configs/quickstart.py", "train.steps=50"])
        0
    """
    try:
        command, rest = _parse(list(sys.argv[1:] if argv is None else argv))
        if command is not None:
            command.run(*rest)
        sys.stdout.flush()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left, as in `| head`; nothing more may be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("K3JAX_TRACEBACK") == "1":
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _check(*options: tuple[str, object, bool, str]) -> None:
    """(name, value, whether it fits, what fits) of each option."""
    for name, value, fits, right in options:
        if not fits:
            raise ValueError(f"--{name} {value}: must be {right}")


def _parse(argv: list[str]):
    """The command and the arguments of its `run`; a help text prints itself and gives no command."""
    if argv and not argv[0].startswith("-") and argv[0] not in _NAMES:
        close = difflib.get_close_matches(argv[0], _NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(_NAMES)}"
        raise ValueError(f"{argv[0]}: no such command; {hint}")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command, unknown = tyro.cli(
                Command,
                prog=_PROG,
                description="Train, run, convert, measure and inspect models of the Kimi K3 family.",
                args=argv or ["--help"],
                return_unknown_args=True,
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.PositionalMetavarFromFieldName),
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(_condense(complaint.getvalue())) from None
        if argv[:1] == ["train"]:
            from k3jax.run_config import print_settings

            print_settings()
        return None, ()
    if isinstance(getattr(command, "subject", command), Train | BenchStep | BenchStrategies):
        return command, (unknown,)
    if unknown:
        raise ValueError(f"{' '.join(unknown)}: unknown argument; `{_PROG} {argv[0]} --help` lists them")
    return command, ()


def _condense(box: str) -> str:
    """What tyro says in a box of several lines, as one line without title and pointers to the help."""
    _, _, body = re.sub(r"\x1b\[[\d;]*m", "", box).partition("\n")
    text = " ".join(re.sub("[\u2500-\u257f]|-{3,}", " ", body).split())
    return re.split(r" (?:Argument helptext|For full helptext)", text)[0]
