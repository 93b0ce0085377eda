"""SIGINT and SIGTERM: a training run ends after the step it is in, with a checkpoint; what has nothing to save ends at once.

Nothing here imports JAX: a program listens before all that takes long. The signals are read by a thread, so that neither a compiler
that runs for minutes nor a callback that swallows exceptions is in their way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Batch = TypeVar("Batch")


def code(number: int) -> int:
    """The exit code of what a signal has ended, as a shell gives it.

    Example:
        >>> code(signal.SIGTERM)
        143
    """
    return 128 + number


class Stopped(Exception):
    """A run that a signal has ended after a step; its message is the line that says how to go on, `code` the exit code."""

    def __init__(self, line: str, code: int):
        super().__init__(line)
        self.code = code


class Stop:
    """Whether a run is to stop, and after which step.

    `steps` counts those that were begun, from `starts` on. `ask` fixes the last one, which of several processes has to be the same in all: then
    `agree` is given this process' (None before the first) and returns the largest of all, while none begins another.

    Example:
        >>> for number, batch in stop.steps(batches, 0, 1000):
        ...     if number == 1:
        ...         step = compiled(state, batch)
        ...         stop.starts(number)
        ...     state, metrics = step(state, batch)
        >>> stop.asked
        <Signals.SIGTERM: 15>
    """

    def __init__(self):
        self.asked: signal.Signals | None = None
        self.agree: Callable[[int | None], int | None] = lambda begun: begun
        self.note: Callable[[str, str], None] = lambda kind, what: None  # what the run is about, for the other processes
        self._lock = threading.Lock()
        self._known = threading.Event()  # that `_last` is
        self._begun: int | None = None
        self._last: int | None = None
        self._ending = False

    def ask(self, number: int, by: str = "") -> None:
        """Stops after the current step, or, before the first, at once; not called by the thread that trains."""
        with self._lock:
            if self.asked is not None:
                return
            self.asked, begun = signal.Signals(number), self._begun
            ending = self._ending
        name = self.asked.name + by
        if ending:
            say(f"{name}: the last step is made, its end is waited for; once more ends at once")
            return
        self._last = self.agree(begun)
        if self._last is None:
            say(f"stopped by {name} before the first step")
            leave(code(number))
        self._known.set()
        say(f"{name}: stops after step {self._last}; once more ends at once")

    def steps(self, batches: Iterable[Batch], first: int, last: int) -> Iterator[tuple[int, Batch]]:
        """(number, batch) of every step from `first` + 1 to `last`, or up to the one that a signal makes the last."""
        self._ending, rest = False, iter(batches)
        try:
            for number in range(first + 1, last + 1):
                if not self._begins(number):
                    return
                self.note("own", f"waits for the data of step {number}")
                batch = next(rest)
                self.note("waits", f"step {number}")
                yield number, batch
        finally:
            with self._lock:
                self._begun, self._ending = None, True

    def starts(self, first: int) -> None:
        """The first step is begun: all that comes before, such as compilation, needs not be waited for."""
        with self._lock:
            self._begun = first

    def stopped(self, step: int, last: int) -> Stopped:
        """What a run raises whose last step is saved, as it has been asked to."""
        line = f"stopped by {self.asked.name} after step {step} of {last}, which is saved; the same command with resume=auto goes on"
        return Stopped(line, code(self.asked))

    def _begins(self, number: int) -> bool:
        with self._lock:
            if self.asked is None:
                self._begun = self._begun and number
                return True
        self._known.wait()
        return number <= self._last


stop = Stop()
"""Of this program."""


def listen() -> None:
    """From now on `stop` is asked by the first signal, and the second ends the program at once. Called by programs, at their start."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    mine = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # as `nohup` and `&` leave it
    for number in mine:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(read, mine), name="signals", daemon=True).start()


def _listen(read: int, mine: list[int]) -> None:
    given = 0
    while True:
        for number in os.read(read, 100):
            if number not in mine or signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                continue
            given += 1
            if given > 1:
                say(f"{signal.Signals(number).name} again: ended at once; what was saved before is whole")
                leave(code(number))
            threading.Thread(target=stop.ask, args=(number,), daemon=True).start()  # a second one must not wait for it


def unlisten() -> None:
    """Signals do what they do in any program of Python; for commands that have their own way to end."""
    if threading.current_thread() is not threading.main_thread() or signal.set_wakeup_fd(-1) == -1:
        return  # nobody has listened
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def say(line: str) -> None:
    """Prints a line on stderr, if there is still a reader."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Ends the program from whatever thread, with nothing waited for."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
