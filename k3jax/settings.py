"""Settings as they come in: the Python file that defines a run, a model or a strategy, and overrides as `key=value`.

Nothing here imports JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import runpy
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from k3jax.checks import shown
from k3jax.config import ModelConfig
from k3jax.paths import check_kind, expand
from k3jax.run_config import MeshConfig, RunConfig, field_names, keys
from k3jax.values import FLAGS, hints, parse

CONFIGS = Path(__file__).parent / "configs"  # what the commands find by name, in the checkout and installed
STRATEGIES = CONFIGS / "strategies"


def load_config(path: str | Path) -> RunConfig:
    """Runs a configuration file and returns the `config` it defines.

    Raises `ValueError`, one line, if there is no such file, if it fails (naming its line), and if it defines
    no `config` of type `RunConfig`.
    """
    return _defined(path, "config", RunConfig, "--config takes a Python file that defines `config`")


def load_model(path: str | Path) -> ModelConfig:
    """The model of a configuration file, which defines it as `model`, or of a released config.json or its folder.

    Raises `ValueError`, one line, for what cannot be read or defines none.

    Example:
        >>> load_model("configs/kimi_k3.py").num_parameters
        2779484476000
    """
    if not str(path).endswith(".py"):
        return ModelConfig.from_hf(path)
    expected = "a Python file that defines `model`, or a released config.json was expected"
    return _defined(path, "model", ModelConfig, expected)


def strategy_names() -> list[str]:
    """The strategies in `configs/strategies`."""
    return sorted(path.stem for path in STRATEGIES.glob("*.py"))


def load_strategy(name: str) -> MeshConfig:
    """The `mesh` that a strategy defines: one of `strategy_names()`, or a Python file.

    Raises `ValueError`, one line, if there is no such strategy, if its file fails, and if it defines no `mesh`.

    Example:
        >>> load_strategy("ep_tp").on(8)
        MeshConfig(data=1, fsdp=1, expert=4, context=1, tensor=2)
    """
    known = strategy_names()
    path = str(STRATEGIES / f"{name}.py") if name in known else expand(name)
    if name not in known and not (name.endswith(".py") and os.path.exists(path)):
        or_file = "or a Python file that defines `mesh`"
        raise ValueError(f"strategy={shown(name)}: must be one of {', '.join(known)}, {or_file}")
    return _defined(path, "mesh", MeshConfig, "a strategy is a Python file that defines `mesh`")


def _defined(path: str | Path, name: str, kind: type, expected: str) -> Any:
    """What a Python file defines as `name`, which must be a `kind`; `expected` says so where there is no such file."""
    path = expand(path)
    check_kind(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path}: {'is a folder' if os.path.isdir(path) else 'no such file'}; {expected}")
    try:
        value = runpy.run_path(path).get(name)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path:
            lines = [error.lineno]
        where = f"{path}:{lines[-1]}" if lines else path
        raise ValueError(f"{where}: {type(error).__name__}: {_one_line(error)}") from error
    if not isinstance(value, kind):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{path}: found {found} as `{name}`, must be a {kind.__name__}")
    return value


def apply_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` with each `key=value` (or `--key=value`, or `--key value`) set.

    Keys are dotted (`train.steps`, `model.hidden_size`). Values are read as their field's type (`k3jax.values.parse`);
    those of a tuple are separated by commas (`model.kda_layers=1,2,3`, `data.paths=a.txt,b/*.txt`).
    `strategy=NAME` puts a strategy's mesh in place of the configuration's; `mesh.*`, wherever it stands, changes that.

    Raises `ValueError`, one line, for a key that does not exist (with the closest that do) or is given twice, for a
    value of another type or beyond its range, and for what the changed model refuses.

    Example:
        >>> apply_overrides(config, ["train.steps=50", "--mesh.expert", "4"]).train.steps
        50
    """
    tree: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in pairs(overrides):
        if key in given:
            raise ValueError(f"{key}: given twice, as {shown(given[key])} and as {shown(value)}")
        given[key] = value
        if key == "strategy":
            config = dataclasses.replace(config, mesh=load_strategy(value))
            continue
        *groups, name = key.split(".")
        parent, node = config, tree
        for group in groups:
            if not dataclasses.is_dataclass(getattr(parent, group, None)):
                raise ValueError(_unknown(config, key))
            parent, node = getattr(parent, group), node.setdefault(group, {})
        if not hasattr(parent, name) or name not in field_names(parent):
            raise ValueError(_unknown(config, key))
        if dataclasses.is_dataclass(getattr(parent, name)):
            example = keys(config, key)[0]
            raise ValueError(f"{key}={shown(value)}: {key} is a group; set one of its keys, such as {example}")
        try:
            node[name] = parse(hints(type(parent))[name], value)
        except ValueError as error:
            raise ValueError(f"{key}={shown(value)}: must be {error}") from None
    return _replace(config, tree)


def print_settings() -> None:
    """Prints every setting with its type, meaning and default; of the model's, which have none, the names."""
    fields = [(field.name, hints(RunConfig)[field.name], field) for field in dataclasses.fields(RunConfig)]
    settings = dataclasses.make_dataclass("Settings", fields[1:], namespace={"__doc__": RunConfig.__doc__})
    with contextlib.suppress(SystemExit):
        options = {"use_underscores": True, "config": (tyro.conf.FlagConversionOff,), "registry": FLAGS}
        tyro.cli(settings, prog="settings", description="", args=["--help"], **options)
    names = ", ".join(field.name for field in dataclasses.fields(ModelConfig))
    print(textwrap.fill(f"model.KEY=VALUE changes the model: {names}.", width=80))
    strategies = ", ".join(strategy_names())
    print(textwrap.fill(f"strategy=NAME sets the mesh: {strategies}, or a Python file that defines `mesh`.", width=80))


def pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of each override."""
    tokens = iter(overrides)
    for token in tokens:
        flag = token.startswith("--")
        key, equals, value = token.removeprefix("--").partition("=")
        if not equals and flag:
            value = next(tokens, None)
        if not key or value is None or not (equals or flag):
            raise ValueError(f"{shown(token)}: a setting is changed as key=value, for example train.steps=50")
        yield key.replace("-", "_"), value


def _unknown(config: RunConfig, key: str) -> str:
    known = [*keys(config), "strategy"]
    # A forgotten group is the likeliest slip: steps for train.steps.
    close = [k for k in known if k.endswith(f".{key}")] or difflib.get_close_matches(key, known)
    hint = f"did you mean {' or '.join(close)}?" if close else "`python -m k3jax train --help` lists them"
    return f"{shown(key)}: no such setting; {hint}"


def _replace(config: Any, tree: Mapping[str, Any]) -> Any:
    """Sets all of a dataclass's changes at once: it may refuse them one by one."""
    changes = {
        name: _replace(getattr(config, name), value) if isinstance(value, dict) else value
        for name, value in tree.items()
    }
    return dataclasses.replace(config, **changes)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
