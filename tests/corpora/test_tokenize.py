"""Corpora in the making: the same whoever makes them, whole or absent, split by document."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from k3jax.data import tokenize as module
from k3jax.data.corpus import INDEX, from_record, open_corpus
from k3jax.data.encoding import Encoding, open_tokenizer
from k3jax.data.tokenize import tokenize
from k3jax.lock import locked

ROOT = Path(__file__).parents[2]
ROWS = Encoding(1024)


@pytest.fixture
def lines(tmp_path, conversation, monkeypatch):
    """300 conversations in parts of 20 kB."""
    monkeypatch.setattr(module, "_PART_BYTES", (20_000, 20_000))
    return write(tmp_path / "c.jsonl", [conversation(random.Random(n)) for n in range(300)])


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def content(folder):
    """Every file of a corpus."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def texts(corpus, side):
    """Every piece of one side, decoded."""
    decode = open_tokenizer(corpus.tokenizer).decode
    rows = [record for source in corpus.rows(side) for record in source.read(np.arange(len(source)))]
    return sorted(decode(ids, markers=True) for record in rows for ids, _ in from_record(record))


def test_a_corpus_tells_what_is_in_it(lines, marked, tmp_path):
    corpus = tokenize(tmp_path / "out", [str(lines)], marked, ROWS)
    (source,) = corpus.index["sources"]
    assert source["conversations"] + sum(source["skipped"].values()) == 300 and source["texts"] == 0
    for side in ("train", "held_out"):
        counts, (rows,) = source[side]["counts"], corpus.rows(side)
        found = [from_record(record) for record in rows.read(np.arange(len(rows)))]
        pieces = [piece for row in found for piece in row]
        assert counts == {
            "rows": len(found),
            "documents": len(pieces),
            "tokens": sum(len(ids) - 1 for ids, _ in pieces),
            "learnt": sum(int(learnt[1:].sum()) for _, learnt in pieces),
            "bytes": counts["bytes"],
            "images": 0,
            "patches": 0,
        }
        decode = open_tokenizer(marked).decode
        assert counts["bytes"] == pytest.approx(sum(len(decode(ids[learnt]).encode()) for ids, learnt in pieces), rel=0.02)
        assert all(sum(len(ids) - 1 for ids, _ in row) <= 1024 for row in found)
    assert 4 <= source["held_out"]["counts"]["documents"] <= 30
    files = sorted(path for path in content(tmp_path / "out"))
    assert files[-3:-1] == ["corpus.json", "tokenizer/tiktoken.model"] and len(files) > 12
    assert (tmp_path / "out/tokenizer/tiktoken.model").read_bytes() == (marked / "tiktoken.model").read_bytes()


def test_several_processes_make_the_same_bytes(lines, marked, tmp_path):
    one = tokenize(tmp_path / "one", [str(lines)], marked, ROWS)
    done = []
    tokenize(tmp_path / "two", [str(lines)], marked, ROWS, workers=2, report=lambda *now: done.append(now))
    assert content(tmp_path / "one") == content(tmp_path / "two") and len(one.rows("train")[0].shards) > 5
    assert done[0] == (0, lines.stat().st_size) and done[-1] == (lines.stat().st_size,) * 2 and done == sorted(done)


KILLED = """
import os, sys
from k3jax.data import tokenize as module
from k3jax.data.encoding import Encoding
module._PART_BYTES = (20_000, 20_000)
def report(done, total):
    if done > total / 2:
        os.kill(os.getpid(), 9)
module.tokenize(sys.argv[1], [sys.argv[2]], sys.argv[3], Encoding(1024), report=report)
"""


def test_what_was_killed_is_no_corpus_and_goes_on(lines, marked, tmp_path, monkeypatch):
    out = tmp_path / "out"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, out, lines, marked], env=env, timeout=120)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=f"out: not a tokenised corpus, {INDEX} is missing"):
        open_corpus(out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.array_record")}
    assert len(before) > 5
    (out / "0/train-00099.array_record.1.part").write_text("half")
    made = []
    make = module._make
    monkeypatch.setattr(module, "_make", lambda job, encoder: made.append(job.number) or make(job, encoder))
    tokenize(out, [str(lines)], marked, ROWS)
    assert made and min(made) > 3 and all(path.stat().st_mtime_ns == time for path, time in before.items())
    tokenize(tmp_path / "again", [str(lines)], marked, ROWS)
    assert content(out) == content(tmp_path / "again")
    made.clear()
    tokenize(out, [str(lines)], marked, ROWS)  # whole: nothing is left to do
    assert not made


def test_parts_of_other_sources_are_made_anew(lines, marked, tmp_path, monkeypatch):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(tmp_path / "out", [str(lines)], marked, ROWS, report=stop)
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    write(lines, records[::-1])
    tokenize(tmp_path / "out", [str(lines)], marked, ROWS)
    tokenize(tmp_path / "whole", [str(lines)], marked, ROWS)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_folder_of_something_else_is_left_alone(lines, marked, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="full: holds something else; name an empty folder"):
        tokenize(tmp_path / "full", [str(lines)], marked, ROWS)
    corpus = tokenize(tmp_path / "out", [str(lines)], marked, ROWS)
    with pytest.raises(ValueError, match="out: already holds a corpus of other sources or settings"):
        tokenize(tmp_path / "out", [str(lines)], marked, Encoding(128))
    with pytest.raises(ValueError, match="data.paths: .*out is a tokenised corpus already"):
        tokenize(tmp_path / "other", [str(corpus.folder)], marked, ROWS)


def test_a_folder_has_one_writer(lines, marked, tmp_path):
    out, others = tmp_path / "out", []
    with locked(out):
        with pytest.raises(ValueError, match="out: process .* is writing here"):
            tokenize(out, [str(lines)], marked, ROWS)
        waiting = threading.Thread(target=lambda: others.append(tokenize(out, [str(lines)], marked, ROWS, wait=True)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not others
    waiting.join(60)
    assert others and len(others[0].rows("train")[0]) > 0


# What is held out


def test_documents_are_held_out_by_their_content(tmp_path):
    records = [{"text": f"text {n} " + "x" * (n % 40)} for n in range(400)]
    splits = []
    for name, order in (("a", 1), ("b", -1)):
        file = write(tmp_path / f"{name}.jsonl", records[::order] + records[:50])
        corpus = tokenize(tmp_path / name, [str(file)], None, ROWS, held_out=0.1)
        train, held = set(texts(corpus, "train")), set(texts(corpus, "held_out"))
        assert not train & held and train | held == {record["text"] for record in records}  # a copy is on the same side
        assert 20 <= len(held) <= 60
        splits.append(held)
    assert splits[0] == splits[1]


def test_of_few_documents_one_is_held_out_and_one_is_not(tmp_path):
    file = write(tmp_path / "x.jsonl", [{"text": "one text"}, {"text": "and another"}, {"text": "a third"}])
    for name, share, sides in (("few", 1e-9, (2, 1)), ("most", 1 - 1e-9, (1, 2))):
        corpus = tokenize(tmp_path / name, [str(file)], None, ROWS, held_out=share)
        assert tuple(len(texts(corpus, side)) for side in ("train", "held_out")) == sides


def test_the_end_of_a_single_text_is_held_out(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {n}\n" for n in range(1000)))
    corpus = tokenize(tmp_path / "out", [str(tmp_path / "book.txt")], None, ROWS, held_out=0.1)
    text = (tmp_path / "book.txt").read_text()
    counts = [corpus.rows(side)[0].counts["tokens"] for side in ("train", "held_out")]
    assert sum(counts) == len(text) - 2 and counts[1] == round(0.1 * len(text)) - 1
    assert all(piece in text[len(text) * 9 // 10 - 1 :] for piece in texts(corpus, "held_out"))


def test_what_is_no_regular_file_in_a_folder_is_left_out(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("text")
    (tmp_path / "texts/link.txt").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "texts/pipe.txt")
    corpus = tokenize(tmp_path / "out", [str(tmp_path / "texts")], None, ROWS, held_out=0)
    assert texts(corpus, "train") == ["text"]
    with pytest.raises(ValueError, match="pipe.txt: is a pipe, must be a regular file or a folder"):
        tokenize(tmp_path / "pipe", [str(tmp_path / "texts/pipe.txt")], None, ROWS)


def test_nothing_is_held_out_if_nothing_should(tmp_path):
    file = write(tmp_path / "x.jsonl", [{"text": "one text"}])
    corpus = tokenize(tmp_path / "out", [str(file)], None, ROWS, held_out=0)
    assert texts(corpus, "train") == ["one text"] and len(corpus.rows("held_out")[0]) == 0


def test_sources_that_hold_nothing(tmp_path, marked):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty.jsonl: no document with a token to learn \(no document found\)$"):
        tokenize(tmp_path / "a", [str(tmp_path / "empty.jsonl")], None, ROWS)
    file = write(tmp_path / "long.jsonl", [{"text": "x" * 300}] * 3 + [{"text": "x"}])
    with pytest.raises(ValueError, match=r"long.jsonl: no document .* \(3 too long, 1 too short\)$"):
        tokenize(tmp_path / "b", [str(file)], None, Encoding(64, long="skip"))
    chat = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(ValueError, match="one.jsonl: found one conversation, must be two or more"):
        tokenize(tmp_path / "c", [str(write(tmp_path / "one.jsonl", [chat]))], marked, ROWS)
    for share in (1, -0.1):
        with pytest.raises(ValueError, match="data.held_out=.*: must be at least 0 and below 1"):
            tokenize(tmp_path / "d", [str(file)], None, ROWS, held_out=share)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"\(1 not UTF-8\)$"):
        tokenize(tmp_path / "e", [str(tmp_path / "latin")], None, ROWS)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_line_ends_it_and_leaves_no_corpus(lines, marked, tmp_path, workers):
    with open(lines, "a") as stream:
        stream.write("{\n")
    with pytest.raises(ValueError, match="c.jsonl:301: not JSON"):
        tokenize(tmp_path / "out", [str(lines)], marked, ROWS, workers=workers)
    assert not (tmp_path / "out" / INDEX).exists()


FULL = """
import resource, sys
from k3jax import cli
from k3jax.data import tokenize as module
module._PART_BYTES = (20_000, 20_000)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(cli.main(["data", "tokenize", *sys.argv[2:], "--seq-len=1024", "--workers=1"]))
"""


def test_a_full_disk_is_one_line_and_goes_on_when_there_is_room(lines, marked, tmp_path):
    """A limit on the size of a file stands for a disk: the larger shards do not fit."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    sizes = sorted(shard.size for shard in tokenize(tmp_path / "whole", [str(lines)], marked, ROWS).rows("train")[0].shards)
    for limit in (10, sizes[0] - 1):
        command = [sys.executable, "-c", FULL, str(limit), tmp_path / "out", lines, f"--tokenizer={marked}"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith(f"error: {tmp_path}/out/0/") and "writing failed (write() failed: File too large" in done.stderr
        with pytest.raises(ValueError, match="not a tokenised corpus"):
            open_corpus(tmp_path / "out")
        assert not list(tmp_path.glob("out/0/*.part"))
    tokenize(tmp_path / "out", [str(lines)], marked, ROWS)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
