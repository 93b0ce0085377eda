"""Trains in several processes on this machine, each with its share of the devices.

`bash launch/local.sh 2 --config configs/quickstart.py [key=value ...]` runs it with 2 processes of 4 simulated devices each.
Process 0 shows the progress. When one process fails, all are ended and what it had to say is the last line. SIGINT and SIGTERM
are passed on: all stop after the same step, with a checkpoint. However this program ends, its processes end with it.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

ECHO_SECONDS = 1.0  # in which a failure of several processes shows itself in all of them
STOP_SECONDS = 10.0  # in which all end that a signal has stopped, when the first has
SAID = (2, 75)  # exit codes of a process that has said why in one line
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Exit code of the first process that fails, 0 if none does."""
    count = int(arguments[0]) if arguments and arguments[0].isdecimal() else 0
    if not count:
        how = "bash launch/local.sh 2 --config configs/quickstart.py [key=value ...]"
        print(f"error: the first argument is the number of processes: {how}", file=sys.stderr)
        return 2
    port, me = free_port(), os.getpid()
    processes, said, given = [], [tempfile.TemporaryFile() for _ in range(count)], []

    def pass_on(number, _) -> None:
        given.append(number)
        for process in processes:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        for index in range(count):
            command = [sys.executable, "-m", "k3jax", "train", *arguments[1:]]
            if count > 1:
                command += [f"processes.count={count}", f"processes.index={index}"]
                command += [f"processes.coordinator=localhost:{port}"]
            # The log goes to stderr; stdout has nothing but what Gloo says of its connections.
            streams = {"stdout": subprocess.DEVNULL, "stderr": said[index] if index else None}
            # In a session of its own: a terminal's Ctrl-C comes once, from here.
            processes.append(subprocess.Popen(command, **streams, start_new_session=True, preexec_fn=lambda: end_with(me)))
        for number in given:  # while they were started
            pass_on(number, None)
        while not failed(processes) and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        if not (first := failed(processes)):
            return 0
        if given:
            ends = time.monotonic() + STOP_SECONDS
            while any(process.poll() is None for process in processes) and time.monotonic() < ends:
                time.sleep(0.05)
            return 128 + given[0]
        time.sleep(ECHO_SECONDS)
        # What a process has said itself is the cause; any other failure may be its consequence.
        named = [index for index in failed(processes) if processes[index].returncode in SAID]
        return report((named or first)[0], processes, said)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent has ended, however that ended; where it is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def failed(processes: list[subprocess.Popen]) -> list[int]:
    """Indices of the processes that have ended with an error."""
    return [index for index, process in enumerate(processes) if process.poll()]


def report(index: int, processes: list[subprocess.Popen], said: list) -> int:
    """Tells how a process failed, unless it is process 0, which told it itself; its exit code."""
    code = processes[index].returncode
    if code < 0:
        print(f"error: process {index} was ended by signal {-code} ({signal.strsignal(-code)})", file=sys.stderr)
        return 128 - code
    if index:
        said[index].seek(0)
        text = said[index].read().decode(errors="replace").rstrip()
        last = (text.splitlines() or [f"exit code {code}"])[-1].removeprefix("error: ")
        if code not in SAID:
            print(text, file=sys.stderr)  # the traceback is wanted
        print(f"error: {last}" if code == 75 else f"error: process {index}: {last}", file=sys.stderr)
    return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
