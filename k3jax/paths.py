"""Names of files and folders as they come in from outside."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_KINDS = ((stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"))


def expand(path: str | os.PathLike) -> str:
    """`path` with a home folder in place of `~` or `~user` at its beginning; of an unknown user it stays as it is.

    Example:
        >>> expand("~/runs/k3")
        '/home/me/runs/k3'
    """
    return os.path.expanduser(os.fspath(path))


def check_kind(path: str | os.PathLike) -> None:
    """Raises `ValueError` for what is neither a regular file nor a folder: reading it could wait without end.

    What does not exist, or cannot be looked at, is left to whoever opens it.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise ValueError(f"{path}: is a {name}, must be a regular file or a folder")


def read_text(path: str | os.PathLike) -> str:
    """The UTF-8 text of a regular file. Raises `ValueError` for what is none and for other bytes, and `OSError`."""
    check_kind(path)
    return Path(path).read_text(encoding="utf-8")
