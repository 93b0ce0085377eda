"""Processes that work together: they meet, tell each other to stop, and name the one that does not go on.

What is said goes through the store of JAX's coordination service, which process 0 runs; threads say it, so that a process whose
main thread computes, compiles or is stuck still talks. Process 0 judges the others and itself, and the others judge whether process
0 is there at all.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterable

from k3jax import signals

STUCK = 75  # exit code, EX_TEMPFAIL of sysexits.h: to be tried again
_SILENT_SECONDS = 60  # after which a process of which nothing is heard is given up, or `timeout` where that is less
_BEAT_SECONDS = 5
_WORK_SECONDS = 3600  # for what is not expected to say that it goes on
_HELLO = b"k3jax "
_PLACE = "k3jax/peers"


def gather(address: str, count: int, index: int, timeout: float) -> None:
    """Returns when all `count` processes have called it; process 0 listens on `address`, host:port, which is free again afterwards.

    Raises `ValueError`, one line, that names those that did not come within `timeout` seconds.

    Example:
        >>> gather("localhost:1234", count=2, index=0, timeout=600)
    """
    host, _, port = address.rpartition(":")
    if count > 1 and index == 0:
        _receive(int(port), count, timeout)
    elif count > 1:
        _report((host.strip("[]"), int(port)), index, timeout)


def _receive(port: int, count: int, timeout: float) -> None:
    ends, there = time.monotonic() + timeout, {}
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=count)
    except OSError as error:
        raise ValueError(f"processes.coordinator: port {port} cannot be listened on ({error.strerror or error})") from None
    with server:
        while len(there) < count - 1:
            server.settimeout(max(ends - time.monotonic(), 0.01))
            try:
                caller, _ = server.accept()
                caller.settimeout(1)  # whoever else calls here is not waited for
                said = caller.recv(100)
            except TimeoutError:
                if time.monotonic() < ends:
                    continue
                missing = sorted(set(range(1, count)) - there.keys())
                line = f"process {_listed(missing)} of {count} did not start within {timeout:g} s (processes.timeout)"
                for other in there.values():
                    _send(other, line.encode())
                raise ValueError(line) from None
            except OSError:
                continue
            if said.startswith(_HELLO) and said[len(_HELLO) :].isdigit():
                there[int(said[len(_HELLO) :])] = caller
            else:
                caller.close()
        for other in there.values():
            _send(other, b"go")
        for other in there.values():  # those who call close first: the port is free at once
            other.settimeout(1)
            try:
                other.recv(1)
            except OSError:
                pass
            other.close()


def _send(other: socket.socket, text: bytes) -> None:
    try:
        other.sendall(text)
    except OSError:
        pass  # it has ended meanwhile, which will be noticed


def _report(address: tuple[str, int], index: int, timeout: float) -> None:
    ends, late = time.monotonic() + timeout, f"did not start within {timeout:g} s (processes.timeout)"
    while True:
        try:
            with socket.create_connection(address, timeout=max(ends - time.monotonic(), 0.01)) as server:
                server.sendall(_HELLO + str(index).encode())
                server.settimeout(max(ends - time.monotonic(), 0.01) + 1)  # process 0 knows who is missing
                said = server.recv(1000).decode()
            if said == "go":
                return
            if said:
                raise ValueError(said)
        except OSError:  # not there yet
            pass
        if time.monotonic() >= ends:
            raise ValueError(f"process 0 {late}, or cannot be reached at {address[0]}:{address[1]} (processes.coordinator)")
        time.sleep(0.1)


def _listed(numbers: Iterable[int]) -> str:
    """The first few of them."""
    numbers = list(numbers)
    more = f" and {len(numbers) - 5} more" if numbers[5:] else ""
    return ", ".join(map(str, numbers[:5])) + more


class Peers:
    """The other processes, as heard of in beats.

    `note` says what this process' main thread is about: "own" (reading data, writing pieces), which must go on within `timeout`
    seconds while others wait; "works" (compiling, and all that is not noted), which has an hour; or "waits", for others, or for
    devices that may be waiting for others'.
    """

    def __init__(self, client, count: int, index: int, timeout: float):
        self._client, self._count, self._index, self._timeout = client, count, index, timeout
        self._silent = min(_SILENT_SECONDS, timeout)
        self._interval = min(_BEAT_SECONDS, timeout / 4)
        self._noted = ("works", "starts", 0)
        self._beats = 0
        self._heard = time.monotonic()  # the last time that process 0 answered
        self._others: dict[int, tuple[str, float]] = {}  # of each its beat, and when it changed
        self._going_on: dict[int, tuple[list, float]] = {}  # of each what it noted, and when that changed
        self._closed = threading.Event()
        self._stop_told = False
        for work in (self._talk, self._listen, self._watch):
            threading.Thread(target=work, name=f"peers {work.__name__}", daemon=True).start()
        signals.stop.agree, signals.stop.note = self._agree, self.note

    def note(self, kind: str, what: str) -> None:
        """What the main thread is about from now on; costs nothing."""
        self._noted = (kind, what, self._noted[2] + 1)

    def close(self) -> None:
        """Before the processes part, which all do together."""
        self.note("waits", "ends")
        self._client.wait_at_barrier(f"{_PLACE}/ends", 1000 * max(int(self._timeout), _WORK_SECONDS))
        self._closed.set()
        self._set("stop/asked", "null")  # wakes those who listen

    def await_verdict(self) -> None:
        """Waits while a process is at something that others wait for, or is not heard of: it may be what they fail by.

        A collective on CPU gives up after 30 s, sooner than a process does.
        """
        ends = time.monotonic() + 2 * self._timeout
        before: dict[str, str] = {}
        while time.monotonic() < ends:
            beats = dict(self._client.key_value_dir_get(f"{_PLACE}/beat"))
            if before and not any(before.get(key) == beat or json.loads(beat)[1][0] == "own" for key, beat in beats.items()):
                return
            before = beats
            time.sleep(2 * self._interval)

    # ---- the stop ----

    def _agree(self, begun: int | None) -> int | None:
        """The last step of all: the largest that any of them has begun."""
        self._set("stop/asked", json.dumps([int(signals.stop.asked), self._index]))
        self._set(f"stop/begun/{self._index:06}", json.dumps(begun))
        if self._index == 0:
            found = [json.loads(self._get(f"stop/begun/{index:06}")) for index in range(self._count)]
            self._set("stop/last", json.dumps(max((step for step in found if step is not None), default=None)))
        last = json.loads(self._get("stop/last"))
        if last is None and self._index == 0:
            time.sleep(1)  # all end at once now: this process outlives what it has told the others
        return last

    def _listen(self) -> None:
        while not self._closed.is_set():
            started = time.monotonic()
            try:
                told = json.loads(self._client.blocking_key_value_get(f"{_PLACE}/stop/asked", 60_000))
            except Exception:  # nobody has asked, or process 0 is not there, which is seen elsewhere
                time.sleep(0 if time.monotonic() - started > 1 else 1)
                continue
            if told is not None:
                signals.stop.ask(told[0], "" if told[1] == self._index else f" to process {told[1]}")
            return

    def _get(self, key: str) -> str:
        try:
            return self._client.blocking_key_value_get(f"{_PLACE}/{key}", int(1000 * self._timeout))
        except Exception:
            signals.say(f"error: the processes did not agree on the last step within {self._timeout:g} s (processes.timeout)")
            signals.leave(STUCK)

    def _set(self, key: str, text: str) -> None:
        try:
            self._client.key_value_set(f"{_PLACE}/{key}", text)
        except Exception:  # it is there already: another process was first
            pass

    # ---- who does not go on ----

    def _talk(self) -> None:
        while not self._closed.wait(self._interval if self._beats else 0):
            self._beats += 1
            beat = json.dumps([self._beats, self._noted])
            try:
                self._client.key_value_set(f"{_PLACE}/beat/{self._index:06}", beat, allow_overwrite=True)
                if self._index == 0:
                    self._judge({int(key[-6:]): text for key, text in self._client.key_value_dir_get(f"{_PLACE}/beat")})
                    continue
                told = dict(self._client.key_value_dir_get(f"{_PLACE}/verdict"))
            except Exception:
                continue
            self._heard = time.monotonic()
            for line in told.values():
                self._end(line)

    def _watch(self) -> None:
        """What hangs itself where process 0 does is the thread that talks; this one does not ask it."""
        while self._index and not self._closed.wait(self._interval):
            if (since := time.monotonic() - self._heard) > self._silent + self._interval:
                self._end(f"process 0: nothing heard of it for {since:.0f} s; it is stopped, or its machine is")

    def _judge(self, beats: dict[int, str]) -> None:
        now, waits = time.monotonic(), False
        for index, text in beats.items():
            if self._others.get(index, ("", 0))[0] != text:
                self._others[index] = text, now
            noted = json.loads(text)[1]
            if self._going_on.get(index, (None, 0))[0] != noted:
                self._going_on[index] = noted, now
            kind, since = noted[0], now - self._going_on[index][1]
            waits |= kind == "waits" and since > self._timeout / 2
        for index, (_, since) in self._others.items():
            if now - since > self._silent:
                return self._condemn(f"process {index}: nothing heard of it for {now - since:.0f} s; it is stopped, or its machine is")
        for index, ((kind, what, _), since) in self._going_on.items():
            limit = {"own": self._timeout, "works": max(self._timeout, _WORK_SECONDS)}.get(kind)
            if waits and limit is not None and now - since > limit:
                return self._condemn(f"process {index}: {what} for {now - since:.0f} s (processes.timeout={self._timeout:g})")

    def _condemn(self, line: str) -> None:
        self._set("verdict/line", line)
        time.sleep(2 * self._interval)  # process 0 outlives what it has told the others
        self._end(line)

    def _end(self, line: str) -> None:
        signals.say(f"error: {line}")
        signals.leave(STUCK)


peers: Peers | None = None
"""Of this process, when it has met the others."""


def note(kind: str, what: str) -> None:
    """`Peers.note`, where there are any."""
    if peers is not None:
        peers.note(kind, what)


def close() -> None:
    """`Peers.close`, where there are any."""
    if peers is not None:
        peers.close()


def begin(client, count: int, index: int, timeout: float) -> None:
    """The processes have met."""
    global peers
    peers = Peers(client, count, index, timeout)
