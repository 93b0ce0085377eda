"""What a training run says about itself: a progress bar, the same numbers on disk, and a plot of them."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

_PLAIN_SECONDS = 10.0  # between lines where there is no terminal to draw a bar on


class RunLog:
    """Progress of steps `resume_step` + 1 .. `total_steps`, drawn on `stream`, kept in metrics.jsonl.

    Each line of the file is a JSON object with `step` and the numbers of that step; NaN and infinities are
    null. Lines after `resume_step`, from a run that went further than its checkpoint, are dropped at the
    start, so no step appears twice. Numbers are Python floats: turning an array into one waits for the
    device, so do that once for each line.

    Example:
        >>> with RunLog("runs/k3", total_steps=400) as log:
        ...     log.write(10, loss=4.1, tokens_per_second=9e3, gradient_norm=1.2, expert_load=1.7)
        >>> log.plot("runs/k3/training.png", bigram_loss=2.47)
    """

    def __init__(
        self, folder: str | Path, total_steps: int, resume_step: int = 0, stream: TextIO | None = None
    ):
        stream = stream or sys.stderr
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _keep_until(self.path, resume_step)
        self._file = self.path.open("a", buffering=1)
        self._stream = stream
        self._resume_step, self._total_steps = resume_step, total_steps
        self._start = self._last_line = time.monotonic()
        self._bar = None
        if stream.isatty():
            width = shutil.get_terminal_size().columns  # tqdm draws nothing where the terminal tells no width
            bar = {"file": stream, "ncols": width, "bar_format": _BAR, "mininterval": 0}
            self._bar = tqdm(total=total_steps, initial=resume_step, **bar)

    def say(self, text: str) -> None:
        """Shows a line that belongs to no step."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self) -> None:
        """Time runs from here: what came before, such as compilation, says nothing of the time that is left."""
        self._start = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.reset()
            self._bar.update(self._resume_step)

    def write(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float,
        gradient_norm: float,
        expert_load: float,
        waited: float | None = None,
        **more: float,
    ) -> None:
        """Adds a line: mean loss [nats per token], tokens/s, gradient norm, largest expert load over mean.

        `waited` is the share of the time that was spent waiting for data.
        """
        numbers = {
            "loss": loss,
            "tokens_per_second": tokens_per_second,
            "gradient_norm": gradient_norm,
            "expert_load": expert_load,
            **({} if waited is None else {"waited": waited}),
            **more,
        }
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        speed = f"{tokens_per_second:,.0f} tok/s"
        text = f"loss {loss:.3f}, {speed}, grad {gradient_norm:.3g}, load {expert_load:.2f}"
        if waited is not None:
            text += f", wait {waited:.0%}"
        if "held_out_loss" in more:
            text += f", held-out {more['held_out_loss']:.3f}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        first = self._last_line == self._start
        if first or now - self._last_line >= _PLAIN_SECONDS or step >= self._total_steps:
            self._last_line = now
            line = tqdm.format_meter(
                step,
                self._total_steps,
                now - self._start,
                initial=self._resume_step,
                bar_format=_LINE,
                postfix=text,
            )
            print(line, file=self._stream, flush=True)

    def plot(self, path: str | Path, title: str = "Training", bigram_loss: float | None = None) -> None:
        """Draws loss and expert load against the step as PNG, from the lines on disk.

        `bigram_loss` (nats per token) is drawn as a dashed line to beat.
        """
        from matplotlib.figure import Figure

        lines = read_numbers(self.path)
        steps = [line["step"] for line in lines]
        figure = Figure(figsize=(8, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        figure.suptitle(title)
        top.plot(steps, [line["loss"] for line in lines], label="model")
        if held_out := {n["step"]: n["held_out_loss"] for n in lines if n.get("held_out_loss") is not None}:
            top.plot(held_out.keys(), held_out.values(), "o", label="held-out")
        if bigram_loss is not None:
            top.axhline(bigram_loss, color="gray", linestyle="--", label=f"bigram, {bigram_loss:.3f}")
        top.set_ylabel("loss [nats per token]")
        top.legend()
        bottom.plot(steps, [line["expert_load"] for line in lines])
        bottom.axhline(1.0, color="gray", linewidth=0.8)
        bottom.set_ylabel("expert load, max / mean")
        bottom.set_xlabel("step")
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, path)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_) -> None:
        self.close()


_LINE = "step {n_fmt}/{total_fmt}{postfix}, {remaining} left"
_BAR = _LINE + " |{bar}|"  # last, so that a narrow terminal cuts the bar and not the numbers


def read_numbers(path: Path) -> list[dict]:
    """Lines of a metrics file, if there is one; a last one that a killed run has cut short is left out.

    Raises `ValueError`, one line, if any other is not what `RunLog` writes.
    """
    try:
        *texts, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    lines = [_numbers(text) for text in texts]
    if None in lines:
        number = lines.index(None) + 1
        raise ValueError(f"{path}: line {number} is not the numbers of a step as JSON; mend it, or move the file away")
    whole = _numbers(rest)
    if whole is None and rest[:1] not in (b"", b"{"):
        raise ValueError(f"{path}: ends with {rest[:20]!r}, which is not the numbers of a step; mend it, or move the file away")
    return lines if whole is None else [*lines, whole]


def _numbers(text: bytes) -> dict | None:
    try:
        line = json.loads(text)
    except ValueError:  # not JSON, or not even text
        return None
    if not isinstance(line, dict) or not {"step", "loss", "expert_load"} <= line.keys() or not isinstance(line["step"], int):
        return None
    return line if all(value is None or isinstance(value, int | float) for value in line.values()) else None


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in read_numbers(path) if line["step"] <= step))
    os.replace(temporary, path)
