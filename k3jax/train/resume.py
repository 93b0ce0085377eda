"""What a run that goes on may change without being asked, and where its data goes on.

A checkpoint says what made it: settings, checksums of tokenizer and sources, and how many samples were taken. Whatever would make
the steps before it other steps is refused unless it is allowed by name; what is free is listed, so that a new setting is not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from k3jax.data.encoding import open_tokenizer
from k3jax.data.packed import PackedDataset
from k3jax.run_config import RunConfig, get, keys
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.data import RowDataset
from k3jax.train.optim import schedule

# What has to be allowed for a setting to change, by the group it is in, or by itself; None: nothing.
_GROUPS = {"data": "data", "train": "step"}
_SETTINGS = {
    "train.steps": "schedule",
    "train.learning_rate": "schedule",
    "train.final_learning_rate": "schedule",
    "train.warmup_fraction": "schedule",
    "train.remat": None,  # as a mesh: other roundings, the same step
    "train.grad_accum": None,
    "train.checkpoint_every": None,
    "train.keep_checkpoints": None,
    "train.eval_windows": None,
    "train.eval_every": None,
    "train.log_every": None,
}
# Compared by what they hold, wherever that lies.
_SOURCES = ("data.paths", "data.pairs", "data.held_out_paths", "data.tokenizer")


def kind(key: str) -> str | None:
    """What `resume_with` has to name for the setting `key` to change: "data", "schedule" or "step"; None where it is free.

    Example:
        >>> kind("data.batch_size"), kind("train.steps"), kind("train.beta2"), kind("mesh.fsdp")
        ('data', 'schedule', 'step', None)
    """
    return _SETTINGS.get(key, _GROUPS.get(key.partition(".")[0]))


def identity(config: RunConfig, training_data: RowDataset | PackedDataset, held_out: RowDataset | PackedDataset) -> dict[str, str]:
    """Checksums of what a run reads, which are kept in its checkpoints."""
    tokenizer = open_tokenizer(config.data.tokenizer)
    return {"tokenizer": tokenizer.identity, "sources": training_data.identity, "held-out sources": held_out.identity}


def go_on(config: RunConfig, resumed: tuple[Path, int] | None, meta: dict[str, Any], training_data: RowDataset | PackedDataset) -> str:
    """Makes the data go on where the checkpoint `resumed` (folder, step) of a run ended: with the sample after its last one.

    `meta` is what this run's checkpoints will say. Returns what is to be told of what was changed; empty where nothing is.

    Raises `ValueError`, one line, as `check` does.
    """
    made = {"kind": None} if resumed is None else Checkpoints(resumed[0]).read_model(resumed[1])[1]
    if made["kind"] != "run":  # nothing, or an import: the first step is still to come
        return ""
    different = check(config, made, resumed[1], meta["identity"])
    step, size = resumed[1], config.data.batch_size
    taken = made.get("samples", step * made["data"]["batch_size"])
    training_data.offset = taken - step * size
    return different and f"resume={config.resume}: {different}; the next sample is number {taken}"


def check(config: RunConfig, meta: dict[str, Any], step: int, found: dict[str, str]) -> str:
    """Complains of what is not as in the checkpoint of `step`, made with `meta`, and is not in `config.resume_with`.

    `found` is the run's `identity`. Returns what is different and allowed, for a line; empty where nothing is.

    Raises:
        ValueError: one line, with each difference, both values, and what would allow it.
    """
    different = list(_differences(config, meta, step, found))
    needed = list(dict.fromkeys(kind for kind, _ in different if kind not in config.resume_with))
    said = ", ".join(text for _, text in different)
    if needed:
        allowing = ",".join(dict.fromkeys([*config.resume_with, *needed]))
        refused = ", ".join(text for kind, text in different if kind in needed)
        raise ValueError(f"resume={config.resume}: {refused}; set it back, or allow it with resume_with={allowing}")
    return said


def _differences(config: RunConfig, meta: dict[str, Any], step: int, found: dict[str, str]):
    """(what has to be allowed, what is different) of every setting that is not free."""
    data = False
    for key in keys(config):
        needed, (group, _, name) = kind(key), key.partition(".")
        made = meta.get(group)
        if needed is None and not (key == "train.grad_accum" and config.train.capacity_drop) or not isinstance(made, dict):
            continue
        now, default = get(config, key), getattr(type(getattr(config, group))(), name)
        before = made.get(name, default)  # of a setting that there was not yet
        before = tuple(before) if isinstance(before, list) else before
        if before == now or key in _SOURCES and "identity" in meta:
            continue
        text = f"{key} was {_shown(before)} and is {_shown(now)}"
        if key == "train.steps":
            rates = [_rate(config, change, step) for change in ({"steps": before}, {})]
            if rates[0] == rates[1]:
                continue
            text += f" (the next learning rate {rates[0]:.3g} and {rates[1]:.3g})"
        data |= group == "data"
        yield needed or "step", text
    if data:  # the rows are others as a consequence
        return
    for name, checksum in meta.get("identity", {}).items():
        if found.get(name, checksum) != checksum:
            where = next((f" ({key}={_shown(get(config, key))})" for key in _SOURCES[:2] if name == "sources" and get(config, key)), "")
            yield "data", f"the content of its {name}{where} was {checksum[:8]} and is {found[name][:8]}"


def _rate(config: RunConfig, change: dict[str, Any], step: int) -> float:
    return float(schedule(dataclasses.replace(config.train, **change))(step))


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) or "None" if isinstance(value, tuple) else str(value)
