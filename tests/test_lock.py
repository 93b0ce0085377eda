"""The lock of a folder: one holder, none that is dead, nothing left behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from k3jax.lock import LOCK, Locked, locked

ROOT = Path(__file__).parents[1]

HOLDER = """
import sys
from k3jax.lock import Locked, locked
try:
    with locked(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()
except Locked as error:
    print(error, flush=True)
"""


def holder(folder):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", HOLDER, folder], env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)


def test_a_second_one_is_told_who_holds_it_and_touches_nothing(tmp_path):
    folder = tmp_path / "a" / "run"
    first = holder(folder)
    assert first.stdout.readline() == "held\n"
    before = {path: path.stat() for path in folder.iterdir()}
    with pytest.raises(Locked, match=rf"^{folder}: process {first.pid} on \S+ is writing here; wait for it, or name another"):
        with locked(folder):
            pass
    assert {path: path.stat() for path in folder.iterdir()} == before
    first.communicate("")
    assert os.listdir(tmp_path) == []  # what was made and stayed empty is gone again
    (folder / "kept").mkdir(parents=True)
    with locked(folder):
        assert sorted(os.listdir(folder)) == [LOCK, "kept"]
    assert os.listdir(folder) == ["kept"]


def test_the_dead_hold_nothing(tmp_path):
    first = holder(tmp_path)
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert os.listdir(tmp_path) == [LOCK]
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_of_many_at_the_same_moment_one_wins(tmp_path):
    """Each of many threads, again and again: never two inside, and a folder that comes and goes disturbs none."""
    inside, most, won = [], [], []
    start = threading.Barrier(8)

    def contend():
        for _ in range(50):
            start.wait()
            try:
                with locked(tmp_path / "new" / "run"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
                won.append(1)
            except Locked:
                pass

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(won) >= 50
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, capsys, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert os.listdir(tmp_path) == []
    line = f"{tmp_path}: the file system has no locks ({os.strerror(code)}): start nothing else that writes here\n"
    assert capsys.readouterr().err == line


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in (("file", "not a folder"), ("file/run", "Not a directory")):
        with pytest.raises(Locked) as error:
            with locked(tmp_path / path):
                pass
        assert str(error.value) == f"{tmp_path / path}: cannot be written ({reason})"
