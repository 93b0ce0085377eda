"""The folder of a run: what is in it before anything is touched. Nobody's work is written over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from k3jax.lock import LOCK
from k3jax.text import tokenizer_files
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.log import read_numbers

CHECKPOINTS, METRICS, PLOT, RESULT = "checkpoints", "metrics.jsonl", "training.png", "result.json"


def was_of_bytes(meta: dict[str, Any]) -> bool:
    """Whether a checkpoint, of which `meta` is what `describe` wrote, is of a run without a tokenizer: its tokens are bytes."""
    return meta["kind"] == "run" and meta.get("data", {}).get("tokenizer") is None


def newest(out: str) -> str | None:
    """What `resume=auto` stands for: `out` if it has a checkpoint, else None."""
    return out if Checkpoints(Path(out) / CHECKPOINTS).latest() is not None else None


def check(out: str, resume: str | None, resumed: tuple[Path, int] | None, anew: bool = False) -> None:
    """Complains unless `out` is new, empty, or the run that `resume` names and that `resumed` (folder, step) was found for.

    `anew`: what is left of a run that ended before its first checkpoint may be written over.

    Raises `ValueError`, one line: another's folder, and whatever in the run's own would stop it later, at a save or its end.
    """
    folder = Path(out)
    found = sorted(path.name for path in folder.iterdir() if path.name != LOCK) if folder.exists() else []
    if resumed is not None and (folder / CHECKPOINTS).is_dir() and os.path.samefile(folder / CHECKPOINTS, resumed[0]):
        return _check_own(folder, out, *resumed)
    new = "name a new or empty folder as out"
    if resumed is None and Checkpoints(folder / CHECKPOINTS).latest() is not None:
        raise ValueError(f"out={out}: already holds a run; continue it with resume={out}, or name another folder")
    known = {CHECKPOINTS, METRICS, PLOT, RESULT, *(path.name for path in tokenizer_files(folder))}
    if strange := [name for name in found if name not in known]:
        more = f" and {len(strange) - 1} more" if strange[1:] else ""
        raise ValueError(f"out={out}: holds {strange[0]}{more}, which is not of a run; {new}")
    if Checkpoints(folder / CHECKPOINTS).latest() is not None:
        raise ValueError(f"out={out}: holds a run or an import that is not the run resumed, resume={resume}; {new}")
    if not anew and any(_has_content(folder / name) for name in found):
        raise ValueError(f"out={out}: holds what is left of a run without a whole checkpoint; remove it, or {new}")


def _check_own(folder: Path, out: str, checkpoints: Path, step: int) -> None:
    saved = Checkpoints(checkpoints)
    if saved.read_meta(step).get("kind") != "run":
        raise ValueError(f"out={out}: holds the import that the run starts from; name a new or empty folder as out")
    saved.check_whole(after=step)
    for name in (METRICS, PLOT, RESULT):
        for path in (folder / name, folder / f"{name}.tmp"):
            if path.exists() and not path.is_file():
                raise ValueError(f"{path}: not a file, which the run writes there; remove it first")
    read_numbers(folder / METRICS)


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
