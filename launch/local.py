"""Trains in several processes on this machine, each with its share of the devices.

`bash launch/local.sh 2 --config configs/quickstart.py [key=value ...]` runs it with 2 processes of 4 simulated devices each.
Process 0 shows the progress. When one process fails, all are ended and what it had to say is the last line.
"""

import signal
import socket
import subprocess
import sys
import tempfile
import time

ECHO_SECONDS = 1.0  # in which a failure of several processes shows itself in all of them


def main(arguments: list[str]) -> int:
    """Exit code of the first process that fails, 0 if none does."""
    count = int(arguments[0]) if arguments and arguments[0].isdecimal() else 0
    if not count:
        how = "bash launch/local.sh 2 --config configs/quickstart.py [key=value ...]"
        print(f"error: the first argument is the number of processes: {how}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    port = free_port()
    processes, said = [], [tempfile.TemporaryFile() for _ in range(count)]
    try:
        for index in range(count):
            command = [sys.executable, "-m", "k3jax", "train", *arguments[1:]]
            if count > 1:
                command += [f"processes.count={count}", f"processes.index={index}"]
                command += [f"processes.coordinator=localhost:{port}"]
            # The log goes to stderr; stdout has nothing but what Gloo says of its connections.
            stderr = said[index] if index else None
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr))
        while not failed(processes) and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        if not (first := failed(processes)):
            return 0
        time.sleep(ECHO_SECONDS)
        # A mistake that a process names (exit code 2) is the cause; any other may be its consequence.
        named = [index for index in failed(processes) if processes[index].returncode == 2]
        return report((named or first)[0], processes, said)
    except KeyboardInterrupt:
        return 130
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
        last = text.splitlines()[-1:] or [f"exit code {code}"]
        if code != 2:
            print(text, file=sys.stderr)  # no mistake of the user's: the traceback is wanted
        print(f"error: process {index}: {last[0].removeprefix('error: ')}", file=sys.stderr)
    return code


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
