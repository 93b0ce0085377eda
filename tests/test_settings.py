"""Every setting of a run and every flag of every command with values that cannot be: one line, before any work.

The cases follow from the dataclasses themselves, so that a new setting or flag is covered by being one.
"""

import dataclasses
import math
import os
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest

import k3jax.cli.bench
from k3jax import cli, run_config, runtime
from k3jax.config import VisionConfig
from k3jax.run_config import DataConfig, RunConfig
from k3jax.values import ANY, PATH, _kind, hints

ROOT = Path(__file__).parents[1]
FILE = """
from k3jax.config import ModelConfig, VisionConfig
from k3jax.run_config import *
config = {config!r}
"""

# By type, texts that stand for no value of it, or for one beyond what it may be: empty, negative, huge, NaN, of another type.
WRONG = {
    int: ("", "-7", "1" + 20 * "0", "-1e400", 5000 * "9", "nan", "1.5", "x"),
    float: ("", "-7", "1e300", "-inf", "nan", "x"),
    bool: ("", "-7", "1e20", "nan", "x"),
    str: ("",),
}
NEGATIVE_IS_RIGHT = {"gate_lower_bound", "bos_token_id", "eos_token_id", "pad_token_id"}  # ids: a model without such tokens


def wrong(name: str, hint) -> list[str]:
    """Texts to be refused for a field of a declared type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ["", "-7", "nan", "x"]
    if kind := _kind(hint):
        texts = () if kind is ANY else WRONG[kind.type]
        return [text for text in texts if text != "-7" or name not in NEGATIVE_IS_RIGHT]
    if origin is tuple:
        first = wrong(name, args[0])
        return first + [f"a,{text}" if _kind(args[0]) is PATH else f"1,{text}" for text in first]
    return wrong(name, next(arg for arg in args if arg is not type(None)))  # of X | None, and of a marked tuple


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tiny):
    vision = VisionConfig(14, 8, 8, 4, 2, 1, 32, 64, 32, 32, tiny.hidden_size, media_placeholder_token_id=255)
    return RunConfig(model=dataclasses.replace(tiny, vision=vision), data=DataConfig(seq_len=64, batch_size=8))


def settings_of(cls, prefix=""):
    """(dotted key, declared type) of every setting."""
    for name, hint in hints(cls).items():
        groups = [arg for arg in (hint, *typing.get_args(hint)) if isinstance(arg, type) and dataclasses.is_dataclass(arg)]
        yield from settings_of(groups[0], f"{prefix}{name}.") if groups else [(f"{prefix}{name}", hint)]


SETTINGS = dict(settings_of(RunConfig))


@pytest.fixture
def refuses(monkeypatch, capsys, tmp_path):
    """Runs a command line in an empty folder: it must say one line that names a key, before any work, and write nothing."""
    here = tmp_path / "empty"
    here.mkdir()
    monkeypatch.chdir(here)

    def work(*args, **kwargs):
        raise AssertionError("work has begun")

    monkeypatch.setattr(runtime, "setup", work)
    monkeypatch.setattr(k3jax.cli.bench, "_compile_anew", work)

    def run(key, *argv):
        start = time.process_time()
        assert cli.main(argv) == 2, argv
        assert time.process_time() - start < 1, argv
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1000, (argv, err)
        assert key is None or key in err or key.replace("-", "_") in err, (argv, err)
        assert not any(here.iterdir()), argv
        return err

    return run


@pytest.mark.parametrize("key", SETTINGS)
def test_wrong_settings_on_the_command_line(refuses, seeing, tmp_path, key):
    path = tmp_path / "config.py"
    path.write_text(FILE.format(config=seeing))
    name = key.rpartition(".")[2]
    for text in wrong(name, SETTINGS[key]):
        refuses(name, "train", "--config", str(path), f"{key}={text}")


@pytest.mark.parametrize("key", SETTINGS)
def test_wrong_settings_in_a_file(seeing, key):
    *groups, name = key.split(".")
    hint = SETTINGS[key]
    values = [object(), math.nan, -math.inf, 10**5000, [1], b"x", "x", "", ("",), 1.5, True, -7]
    kinds = [kind for kind in map(_kind, (hint, *typing.get_args(hint))) if kind]
    right = {kind.type for kind in kinds} | ({int} if float in {kind.type for kind in kinds} else set())
    negative_fits = name in NEGATIVE_IS_RIGHT
    refused = 0
    for value in values:
        if type(value) in right and (value in ("x", 1.5, True) or ANY in kinds or value == -7 and negative_fits):
            continue
        if type(value) is tuple and typing.get_origin(hint) is not tuple:
            value = (value,)
        with pytest.raises(ValueError, match=name) as error:
            _changed(seeing, groups, name, value).validate()
        assert "\n" not in str(error.value) and len(str(error.value)) < 1000
        refused += 1
    assert refused >= 6


def _changed(config, groups, name, value):
    if groups:
        value = _changed(getattr(config, groups[0]), groups[1:], name, value)
    return dataclasses.replace(config, **{groups[0] if groups else name: value})


def test_the_whole_is_right(seeing):
    seeing.validate()


# ---- flags -------------------------------------------------------------------------------------------------


def commands_of(kind, names=()):
    """(its words, its class) of every command."""
    for arg in typing.get_args(kind):
        cls, word = typing.get_args(arg)[:1], [x.name for x in typing.get_args(arg)[1:] if hasattr(x, "name")]
        inner = [hint for hint in hints(cls[0]).values() if any(map(typing.get_args, typing.get_args(hint)))]
        unions = [hint for hint in inner if all(hasattr(arg, "__metadata__") for arg in typing.get_args(hint))]
        if unions:
            yield from commands_of(unions[0], (*names, *word))
        else:
            yield (*names, *word), cls[0]


COMMANDS = {" ".join(words): cls for words, cls in commands_of(cli.Command)}


def flags_of(cls, prefix=""):
    """(name, declared type, whether it is positional, whether it must be given) of every flag."""
    for field in dataclasses.fields(cls):
        hint = hints(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint, f"{prefix}{field.name}.")
            continue
        plain = typing.get_type_hints(cls, include_extras=True)[field.name]
        positional = any("Positional" in str(x) for x in getattr(plain, "__metadata__", ()))
        yield f"{prefix}{field.name.replace('_', '-')}", hint, positional, field.default is dataclasses.MISSING


def test_all_commands_are_found():
    assert set(COMMANDS) == {
        "train", "generate", "plan", "inspect", "convert import", "convert export", "convert synthesize",
        "data tokenize", "data inspect", "data show", "bench convert", "bench data", "bench kda", "bench moe", "bench step", "bench strategies",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_flags(refuses, tmp_path, command):
    there = tmp_path / "there"
    there.mkdir()
    flags = list(flags_of(COMMANDS[command]))
    tried = 0
    for name, hint, positional, _ in flags:
        for text in wrong(name.replace("-", "_"), hint):
            if text.startswith("a,"):  # a list of paths is a flag given again
                continue
            argv = command.split()
            for other, _, at_place, needed in flags:
                if other == name:
                    argv += [text] if positional else [f"--{name}={text}"]
                elif needed:
                    argv += [str(there)] if at_place else [f"--{other}={there}"]
            refuses(name.upper() if positional else f"--{name}" if "." not in name else name, *argv)
            tried += 1
    assert tried >= len(flags) - 1


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_given_twice(refuses, tmp_path, command):
    flags = [flag for flag in flags_of(COMMANDS[command]) if not flag[2]]
    for name, hint, _, _ in flags:
        if name == "image":  # each names one more
            continue
        if hint is bool:
            for twice in ([f"--{name}", f"--no-{name}"], [f"--{name}=true", f"--{name}"], [f"--{name}", "on", f"--{name}"]):
                refuses(f"--{name}: given twice", *command.split(), *twice)
        else:
            refuses(f"--{name}: given twice", *command.split(), f"--{name}=1", f"--{name.replace('-', '_')}", "1")
