"""Two processes import one checkpoint: each writes its share, together the bytes that one writes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from k3jax.hf import pieces
from k3jax.train.convert import import_checkpoint

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "data" / "k3_tiny"

# The command, in small pieces, which can be killed before its n-th one; it prints those it has written.
PROCESS = """
import json, os, signal, sys
from k3jax import cli, runtime
from k3jax.hf import pieces
from k3jax.train.checkpoint import PieceWriter

pieces.PIECE_BYTES = 5000
write, written = PieceWriter.write, []

def counted(self, path, box, values):
    if len(written) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(str(self._file(path, box).relative_to(self._unfinished)))
    write(self, path, box, values)

PieceWriter.write = counted
code = cli.main(sys.argv[2:])
print(json.dumps(written))
runtime.end(code)
"""


def run(destination, kill_at=(-1, -1), of_one=()):
    """Exit codes of two processes, and what each has written; one has options `of_one`."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    options = ["--memory-gib", "0.0001", "--processes.count", "2", f"--processes.coordinator=localhost:{port}"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(at), "convert", "import", SOURCE, destination, *options]
            + [f"--processes.index={index}", *(of_one if index else ())],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        for index, at in enumerate(kill_at)
    ]
    said = [process.communicate(timeout=100)[0].splitlines() for process in processes]
    codes = [process.returncode for process in processes]
    return codes, [[] if code else json.loads(lines[-1]) for code, lines in zip(codes, said, strict=True)]


def test_shares_make_a_whole(tmp_path, files, monkeypatch):
    codes, written = run(tmp_path / "two")
    assert codes == [0, 0]
    monkeypatch.setattr(pieces, "PIECE_BYTES", 5000)
    import_checkpoint(SOURCE, tmp_path / "one")
    assert files(tmp_path / "two") == files(tmp_path / "one")
    of_all = sorted(str(path.relative_to(tmp_path / "two/checkpoints/0")) for path in tmp_path.glob("two/**/c/**/*") if path.is_file())
    assert sorted(sum(written, [])) == of_all  # each piece once
    assert len(written[0]) - len(written[1]) in (0, 1) and len(of_all) > 500

    codes, first = run(tmp_path / "again", kill_at=(90, 70))
    assert -signal.SIGKILL in codes and 0 not in codes  # one may end because the other did
    begun = [path for path in tmp_path.glob("again/checkpoints/unfinished/**/c/**/*") if path.is_file()]
    begun = len([path for path in begun if path.suffix != ".part"])
    codes, rest = run(tmp_path / "again")
    assert codes == [0, 0] and len(sum(rest, [])) == len(of_all) - begun < len(of_all) - 140
    assert files(tmp_path / "again") == files(tmp_path / "one")


def test_options_of_one_alone_are_refused_by_both(tmp_path):
    assert run(tmp_path / "unlike", of_one=("--experts", "packed"))[0] == [2, 2]
    assert not (tmp_path / "unlike").exists()
