"""Work on many pieces at once in bounded memory, under a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import NamedTuple

from tqdm import tqdm

MEMORY = 2**31  # bytes that pieces may take together, by default
_THREADS = 8  # enough to keep a disk busy
_COPIES = 4  # of a piece, in the types and places it passes through


class Job(NamedTuple):
    """A piece of `bytes` bytes to be worked on; `key` names it."""

    key: str
    bytes: int
    work: Callable[[], None]


def run(
    jobs: Iterable[Job], title: str, done: Callable[[Job], None], skip: Callable[[str], bool], memory: int = MEMORY
) -> None:
    """Works on every job on a few threads, as many as fit in `memory` bytes but at least one, and calls `done` after each.

    Jobs that `skip` names count as done before. The bar on stderr, where that is a terminal, tells bytes, rate and time
    left. The first error ends all and is raised.
    """
    jobs = list(jobs)
    left = [job for job in jobs if not skip(job.key)]
    total = sum(job.bytes for job in jobs)
    before = total - sum(job.bytes for job in left)
    biggest = max((job.bytes for job in left), default=1)
    threads = max(1, min(_THREADS, memory // (_COPIES * biggest)))
    bar = tqdm(desc=title, total=total, initial=before, unit="B", unit_scale=True, unit_divisor=1024, disable=None)
    with bar, ThreadPoolExecutor(threads) as pool:
        running, waiting = {}, iter(left)
        try:
            while True:
                for job in waiting:
                    running[pool.submit(job.work)] = job
                    if len(running) > threads:  # one more is ready when a thread is
                        break
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    future.result()
                    job = running.pop(future)
                    done(job)
                    bar.update(job.bytes)
        finally:
            for future in running:
                future.cancel()
