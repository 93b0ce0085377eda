"""Processes that meet, tell each other to stop, and name the one that does not go on; with a stand-in for the store of JAX."""

import json
import re
import socket
import threading
import time

import pytest

from k3jax import peers, signals


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def gathered(indices, count, timeout, late=()):
    """What each process says that is started: None when all have met."""
    said, port = {}, free_port()

    def process(index):
        time.sleep(1.0 if index in late else 0)
        try:
            said[index] = peers.gather(f"localhost:{port}", count, index, timeout)
        except ValueError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=process, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    with socket.create_server(("", port)):  # is free again, for JAX
        return said


@pytest.mark.parametrize("late", [(), (0,), (1, 3)])
def test_processes_that_are_late_are_waited_for(late):
    assert gathered(range(4), 4, 10, late) == dict.fromkeys(range(4))


def test_those_that_never_start_are_named_by_all():
    line = "process 1, 3 of 4 did not start within 1 s (processes.timeout)"
    started = time.monotonic()
    assert gathered([0, 2], 4, 1) == {0: line, 2: line}
    assert time.monotonic() - started < 5


def test_process_0_that_never_starts_is_named():
    (said,) = gathered([1], 2, 1).values()
    assert re.fullmatch(r"process 0 did not start within 1 s \(processes.timeout\), or cannot be reached at localhost:\d+ \(.*\)", said)


def test_whoever_else_calls_is_not_counted():
    port, said = free_port(), {}
    first = threading.Thread(target=lambda: said.update({0: peers.gather(f"localhost:{port}", 2, 0, 20)}))
    first.start()
    time.sleep(0.2)
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"PRI * HTTP/2.0\r\n")
        peers.gather(f"localhost:{port}", 2, 1, 10)
    first.join(10)
    assert said == {0: None}


class Store:
    """What processes share; a process that is `gone` has to be waited for without end."""

    def __init__(self):
        self.values, self.changed, self.gone = {}, threading.Condition(), False

    def wait_while_gone(self):
        while self.gone:
            time.sleep(0.01)

    def key_value_set(self, key, value, allow_overwrite=False):
        self.wait_while_gone()
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, place):
        self.wait_while_gone()
        return [(key, value) for key, value in self.values.items() if key.startswith(place)]

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


@pytest.fixture
def processes(monkeypatch):
    """Makes processes that share a store, in this one; `ended` is what each of them says when it ends."""
    store, ended, made = Store(), {}, []
    monkeypatch.setattr(signals, "stop", signals.Stop())

    def make(count, timeout):
        for index in range(count):
            made.append(one := peers.Peers.__new__(peers.Peers))
            one._end = lambda line, index=index, one=one: (ended.setdefault(index, line), one._closed.set())
            one.__init__(store, count, index, timeout)
        return store, ended, made

    yield make
    store.gone = False
    for one in made:
        one._closed.set()
    store.key_value_set("k3jax/peers/stop/asked", "null", allow_overwrite=True)


def within(seconds, condition):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_process_that_is_stuck_is_named_by_all(processes):
    _, ended, (zero, one, two) = processes(3, timeout=1)
    zero.note("waits", "step 12")
    one.note("own", "waits for the data of step 12")
    two.note("waits", "step 12")
    within(10, lambda: len(ended) == 3)
    (line,) = set(ended.values())
    assert re.fullmatch(r"process 1: waits for the data of step 12 for \d+ s \(processes.timeout=1\)", line)


@pytest.mark.parametrize("kind", ["works", "waits", "goes on"])
def test_a_process_that_works_or_waits_or_goes_on_is_waited_for(processes, kind):
    _, ended, (zero, one) = processes(2, timeout=1)
    zero.note("waits", "for the others to have compiled")
    for _ in range(10):
        one.note("own" if kind == "goes on" else kind, "what it does")
        time.sleep(0.3 if kind == "goes on" else 0.0)
    time.sleep(0 if kind == "goes on" else 2.5)
    assert not ended


def test_nobody_is_named_where_nobody_waits(processes):
    _, ended, both = processes(2, timeout=1)
    for one in both:
        one.note("own", "reads its data")
    time.sleep(2.5)
    assert not ended


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_of_which_nothing_is_heard_is_named(processes, index):
    store, ended, both = processes(2, timeout=1)
    time.sleep(0.5)
    if index:
        both[1]._closed.set()
    else:
        store.gone = True  # it has the store
    within(10, lambda: 1 - index in ended)
    assert re.fullmatch(rf"process {index}: nothing heard of it for \d s; it is stopped, or its machine is", ended[1 - index])


def test_all_stop_after_the_largest_step_that_any_has_begun(processes, monkeypatch):
    _, ended, made = processes(3, timeout=5)
    monkeypatch.setattr(signals.stop, "asked", signals.signal.SIGTERM)
    found = {}
    threads = [threading.Thread(target=lambda i=i, b=b: found.update({i: made[i]._agree(b)})) for i, b in enumerate((7, 9, 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert found == {0: 9, 1: 9, 2: 9} and not ended


def test_all_hear_of_a_signal_that_one_was_given(processes, monkeypatch):
    told = []
    monkeypatch.setattr(signals.Stop, "ask", lambda self, number, by="": told.append((number, by)))
    store, _, _ = processes(3, timeout=5)
    store.key_value_set("k3jax/peers/stop/asked", json.dumps([15, 1]))
    within(5, lambda: len(told) == 3)
    assert sorted(told) == [(15, ""), (15, " to process 1"), (15, " to process 1")]
