"""What the commands share in reading and refusing options."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path

from k3jax.checks import shown
from k3jax.values import truth

Option = tuple[str, object, bool, str]
MOST_ROUNDS = 10_000  # of a measurement


def check(*options: Option) -> None:
    """(name, value, whether it fits, what fits) of each option."""
    for name, value, fits, right in options:
        if not fits:
            raise ValueError(f"--{name} {shown(value)}: must be {right}")


def at_least(least: int, **options: int | None) -> list[Option]:
    """For `check`: whole numbers that are left out or not below `least`."""
    fits, right = lambda value: value is None or value >= least, f"at least {least}" if least else "0 or more"
    return [(name.replace("_", "-"), value, fits(value), right) for name, value in options.items()]


def rounds(**options: int) -> list[Option]:
    """For `check`: how often something is measured."""
    right = f"from 1 to {MOST_ROUNDS:,}"
    return [(name, value, 1 <= value <= MOST_ROUNDS, right) for name, value in options.items()]


def workers(count: int) -> Option:
    """For `check`: processes of this machine, 0 for one a core."""
    most = 8 * (os.cpu_count() or 1)
    return "workers", count, 0 <= count <= most, f"from 0 to {most}, eight times this machine's cores"


def writable(name: str, path: str | None) -> Option:
    """For `check`: a file to write, if one is asked for."""
    if path is None:
        return name, path, True, ""
    folder = Path(path).parent
    if not folder.is_dir():
        return name, path, False, f"in a folder that exists, {folder} does not"
    if Path(path).is_dir():
        return name, path, False, "a file, it is a folder"
    return name, path, os.access(path if Path(path).exists() else folder, os.W_OK), "a file that may be written"


def in_memory(name: str, value: int, needed: int) -> Option:
    """For `check`: a size that makes arrays of `needed` bytes."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    right = f"smaller: its arrays take {needed / 1e9:.3g} GB, this machine has {there / 1e9:.3g} GB of memory"
    return name, value, needed <= there, right


def tidied(arguments: Sequence[str], commands: object) -> list[str]:
    """The command line with `--flag=false`, `--flag on` and the like as `--no-flag` and `--flag`.

    `commands`: the classes of all commands, as a union; their fields of type bool are such flags.

    Raises:
        ValueError: an option given twice that is no list, or a flag whose value is neither true nor false.
    """
    named = list(_options(commands))
    flags = {name for name, hint in named if hint is bool}
    lists = {name for name, hint in named if typing.get_origin(hint) is tuple}
    given, tidy, rest = set(), [], list(reversed(arguments))
    while rest:
        token = rest.pop()
        name, equals, value = token.partition("=")
        if not name.startswith("--"):
            tidy.append(token)
            continue
        name = name.removeprefix("--").replace("_", "-")
        on = name.removeprefix("no-") if name.removeprefix("no-") in flags else name
        if on in given and on not in lists:
            raise ValueError(f"--{on}: given twice")
        given.add(on)
        if name in flags and equals:
            tidy.append(_flag(name, value))
        elif name in flags and rest and _is_truth(rest[-1]):
            tidy.append(_flag(name, rest.pop()))
        else:
            tidy.append(token)
    return tidy


def _options(kind: object) -> Iterator[tuple[str, object]]:
    """(name, type) of every field of the classes of commands."""
    for inner in typing.get_args(kind):
        yield from _options(inner)
    for name, hint in typing.get_type_hints(kind).items() if isinstance(kind, type) and is_dataclass(kind) else ():
        yield name.replace("_", "-"), hint
        yield from _options(hint)


def _is_truth(text: str) -> bool:
    try:
        truth(text)
    except ValueError:
        return False
    return True


def _flag(name: str, value: str) -> str:
    try:
        return f"--{name}" if truth(value) else f"--no-{name}"
    except ValueError:
        raise ValueError(f"--{name}={shown(value)}: must be True or False") from None
