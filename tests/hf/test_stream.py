"""Pieces worked on at once: as many as memory allows, each once, and none after an error."""

import io
import sys
import threading
import time

import pytest

from k3jax.hf.stream import Job, run


class Work:
    """Jobs that note how many of them run at once."""

    def __init__(self, count, size=100, fails=None):
        self.lock, self.running, self.most, self.ran = threading.Lock(), 0, 0, []
        self.jobs = [Job(str(i), size, lambda i=i: self.work(i, i == fails)) for i in range(count)]

    def work(self, i, fails):
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.01)
        with self.lock:
            self.running -= 1
            self.ran.append(i)
        if fails:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("memory, most", [(1, 1), (1200, 3), (10**9, 8)])
def test_no_more_at_once_than_fit(memory, most):
    work, done = Work(40), []
    run(work.jobs, "test", done.append, lambda key: False, memory)
    assert sorted(work.ran) == list(range(40)) and sorted(done) == sorted(work.jobs)
    assert work.most == most  # of 100 bytes each, four times


def test_what_is_done_is_left_out():
    work, done = Work(10), []
    run(work.jobs, "test", done.append, lambda key: int(key) < 7)
    assert sorted(work.ran) == [7, 8, 9] and len(done) == 3


def test_an_error_ends_all():
    work = Work(1000, fails=5)
    with pytest.raises(OSError, match="No space left"):
        run(work.jobs, "test", lambda job: None, lambda key: False)
    assert work.running == 0 and len(work.ran) < 50


def test_the_bar_tells_bytes_rate_and_time_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    work = Work(20, size=2**20)
    run(work.jobs, "import", lambda job: None, lambda key: int(key) < 5)
    last = sys.stderr.getvalue().split("\r")[-1]
    assert last.startswith("import: 100%") and "20.0M/20.0M [" in last and "<00:00" in last and "B/s]" in last
