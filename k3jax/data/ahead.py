"""Batches made ahead of the step that needs them, by threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Batch = TypeVar("Batch")


class Ahead:
    """`make(step)` for the steps `first` to `last`-1, in order, made by `threads` up to `depth` steps before they are asked for.

    `waited` is how many seconds the caller has waited. What `make` raises is raised when its step is asked for.

    Example:
        >>> with Ahead(lambda step: step**2, 3, 6) as batches:
        ...     list(batches)
        [9, 16, 25]
    """

    def __init__(self, make: Callable[[int], Batch], first: int, last: int, threads: int = 2, depth: int = 4):
        self._make, self._steps = make, iter(range(first, last))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="data")
        self._made = deque()
        self.waited = 0.0
        for _ in range(depth):
            self._next()

    def _next(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._made.append(self._pool.submit(self._make, step))

    def __iter__(self) -> Iterator[Batch]:
        while self._made:
            started = time.monotonic()
            batch = self._made.popleft().result()
            self.waited += time.monotonic() - started
            self._next()
            yield batch

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
