"""One writer a folder, by a lock that the kernel takes back when its owner ends, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

LOCK = ".k3jax.lock"  # the file in the folder; gone after a clean end, and of no weight after any other
T = TypeVar("T")
_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # the latter from some network file systems
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class Locked(ValueError):
    """A folder that another command writes into, or that cannot be written; one line that names it."""


@contextlib.contextmanager
def locked(folder: str | Path, wait: bool = False) -> Iterator[None]:
    """Keeps every other k3jax command from writing into `folder`, in this process and any other, on any host.

    The folder is made where there is none, and goes again if nothing was left in it. Where the file system knows no locks,
    a line on stderr says so and the work goes on.

    Raises `Locked`, at once and with nothing touched, if another holds it; with `wait` it is waited for.

    Example:
        >>> with locked("runs/k3"):
        ...     ...
    """
    folder = Path(folder).absolute()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _take(folder, wait)
        try:
            yield
        finally:
            if descriptor is not None:
                (folder / LOCK).unlink(missing_ok=True)  # before others can have the lock
                os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()


def _take(folder: Path, wait: bool) -> int | None:
    """The locked file, or None where there are no locks."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # whoever made the folder has just removed it
            continue
        except OSError as error:
            reason = "not a folder" if folder.is_file() else error.strerror
            raise Locked(f"{folder}: cannot be written ({reason})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in _HELD:
                raise Locked(f"{folder}: {holder or 'another process'} is writing here; wait for it, or name another folder") from None
            if error.errno not in _NO_LOCKS:
                raise
            (folder / LOCK).unlink(missing_ok=True)
            print(f"{folder}: the file system has no locks ({error.strerror}): start nothing else that writes here", file=sys.stderr)
            return None
        if _is_at(descriptor, folder / LOCK):
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)  # the holder before has removed the file since it was opened


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def claimed(folder: str | Path, prepare: Callable[[], tuple[T, dict[str, object]]]) -> Iterator[T]:
    """`locked` by the first of the processes that work together; gives what `prepare` has made in each, with settings.

    `prepare` is called when the lock is held. Raises in every process if it fails in one of them, or if its settings differ.
    """
    import jax

    from k3jax import peers, runtime

    with contextlib.ExitStack() as held:
        made, settings, mistake = None, {}, None
        try:
            if jax.process_index() == 0:
                held.enter_context(locked(folder))
            peers.note("own", "reads what it starts from")
            made, settings = prepare()
        except (ValueError, OSError) as error:
            mistake = error
        runtime.agree(settings, mistake)
        yield made
