"""The command line: `python -m k3jax train | generate | chat | evaluate | data | convert | plan | bench | inspect`.

A mistake in what the user gave (a setting, a file, a checkpoint) ends with one line on stderr and exit code
2; `K3JAX_TRACEBACK=1` shows where it was raised. SIGINT ends with 130 and SIGTERM with 143, training after a step and its
checkpoint. JAX is imported when a command runs, not for `--help`.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

import tyro
from tyro.conf import subcommand

from k3jax import runtime, signals
from k3jax.cli.bench import Bench, BenchStep, BenchStrategies
from k3jax.cli.convert import Convert, Inspect
from k3jax.cli.data import Data
from k3jax.cli.options import tidied
from k3jax.cli.plan import Plan
from k3jax.cli.serve import Chat, Evaluate, Generate
from k3jax.checks import shown
from k3jax.paths import check_kind
from k3jax.values import FLAGS, PathText


@dataclass(frozen=True)
class Train:
    """Train a model.

    Settings of the file are changed as key=value: python -m k3jax train --config configs/quickstart.py
    train.steps=50 strategy=ep_tp --out runs/short
    """

    config: PathText
    """Python file that defines `config`, a k3jax.run_config.RunConfig."""

    def run(self, overrides: Sequence[str]) -> None:
        from k3jax import settings

        config = settings.apply_overrides(settings.load_config(self.config), overrides)
        mistake = None
        try:
            config.validate()
            if config.resume is not None:
                check_kind(config.resume)
        except ValueError as error:
            config.processes.validate()
            if not config.processes.coordinator:
                raise
            mistake = error  # which the other processes, which may not have made it, are told
        runtime.setup(0 if mistake else config.cpu_devices, config.processes)
        import jax

        from k3jax.plan.fits import fits
        from k3jax.train import loop

        with runtime.ending_together():
            runtime.agree(runtime.versions() | config.settings() | {"config": runtime.digest(self.config)}, mistake)
            config = config.on(jax.device_count())
            if there := (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"):  # which CPUs do not tell
                line = fits(config, there)
                if jax.process_index() == 0:
                    signals.say(line)
            loop.train(config)


Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Data, subcommand("data")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Bench, subcommand("bench")]
    | Annotated[Inspect, subcommand("inspect")]
)
_NAMES = ("train", "generate", "chat", "evaluate", "data", "convert", "plan", "bench", "inspect")
_PROG = "python -m k3jax"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 for a mistake of the user, 130 or 143 when a signal has ended it.

    Example:
        >>> main(["train", "--config", "configs/quickstart.py", "train.steps=50"])
        0
    """
    runtime.show_what_can_be_shown()
    try:
        command, rest = _parse(list(sys.argv[1:] if argv is None else argv))
        if command is not None:
            if not isinstance(command, Train):
                signals.unlisten()
            command.run(*rest)
        sys.stdout.flush()
        return 0
    except signals.Stopped as stopped:
        signals.say(str(stopped))
        return stopped.code
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


def command() -> NoReturn:
    """`main` as a program: once it has said what failed, it ends."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    runtime.end(code)


def _parse(argv: list[str]):
    """The command and the arguments of its `run`; a help text prints itself and gives no command."""
    if argv and not argv[0].startswith("-") and argv[0] not in _NAMES:
        close = difflib.get_close_matches(argv[0], _NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be one of {', '.join(_NAMES)}"
        raise ValueError(f"{shown(argv[0])}: no such command; {hint}")
    argv = tidied(argv, Command)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command, unknown = tyro.cli(
                Command,
                prog=_PROG,
                description="Train, run, convert, plan, measure and inspect models of the Kimi K3 family.",
                args=argv or ["--help"],
                return_unknown_args=True,
                config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.PositionalMetavarFromFieldName),
                registry=FLAGS,
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(_condense(complaint.getvalue())) from None
        if argv[:1] == ["train"]:
            from k3jax.settings import print_settings

            print_settings()
        return None, ()
    if isinstance(getattr(command, "subject", command), Train | BenchStep | BenchStrategies):
        return command, (unknown,)
    if unknown:
        raise ValueError(f"{shown(' '.join(unknown))}: unknown argument; `{_PROG} {argv[0]} --help` lists them")
    return command, ()


def _condense(box: str) -> str:
    """What tyro says in a box of several lines, as one line without title and pointers to the help."""
    _, _, body = re.sub(r"\x1b\[[\d;]*m", "", box).partition("\n")
    text = " ".join(re.sub("[\u2500-\u257f]|-{3,}", " ", body).split())
    text = re.split(r" (?:Argument helptext|For full helptext)", text)[0]
    return re.sub(r"^Error parsing (\S+): ", r"\1 ", text)
