"""`python -m k3jax data tokenize | inspect | show`, as their user sees them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax import cli


@pytest.fixture
def chats(tmp_path):
    records = [
        {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}\x1b[2J"}]}
        for n in range(40)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / "c.jsonl")


def run(capsys, *words):
    code = cli.main(["data", *map(str, words)])
    out, err = capsys.readouterr()
    assert (code == 0) == (not err), err
    return out or err


def test_tokenize_inspect_and_show(chats, marked, tmp_path, capsys):
    out = tmp_path / "corpus"
    options = ("--tokenizer", marked, "--seq-len", 1000, "--no-thinking", "--held-out", 0.2, "--workers", 1)
    report = run(capsys, "tokenize", out, chats, *options)
    assert report == run(capsys, "inspect", out)
    assert report.startswith(f"{out}: rows of 1,000 places, tokenizer tiktoken (512 tokens, ")
    assert "learn=assistant, thinking=off, long=cut, held_out=0.2\n" in report and f"{chats}: 40 conversations\n" in report
    rows = re.findall(r"(?m)^  (train|held_out) +(\d+) +(\d+) .* ([\d.]+)% +([\d.]+)% +1$", report)
    assert [row[0] for row in rows] == ["train", "held_out"] and sum(int(row[2]) for row in rows) == 40
    assert float(rows[0][4]) > 50
    assert "all checksums are right" in run(capsys, "inspect", out, "--contents")

    shown = run(capsys, "show", out, "--rows", 1)
    assert shown.startswith(f"== {chats}, row ") and "1,000 places" in shown.splitlines()[0]
    learnt = re.findall("\u27e6(.*?)\u27e7", shown)
    assert len(learnt) > 3
    for text in learnt:
        # All that the assistant writes, what steers a terminal as an escape.
        assert re.fullmatch(r"answer \d+\\x1b\[2J<\|close\|>response<\|sep\|><\|close\|>message<\|sep\|><\|end_of_msg\|>", text)
    assert "question" in re.sub("\u27e6.*?\u27e7", "", shown) and "\x1b" not in shown
    colored = run(capsys, "show", out, "--rows", 1, "--color", "always")
    assert re.sub("\x1b\\[1;32m", "\u27e6", colored).replace("\x1b[0m", "\u27e7") == shown
    assert run(capsys, "show", out, "--rows", 1, "--seed", 1) != shown
    held = run(capsys, "show", out, "--side", "held_out")
    assert not set(re.findall(r"answer \d+", held)) & set(re.findall(r"answer \d+", run(capsys, "show", out, "--rows", 99)))


def test_show_reads_sources_too(chats, marked, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))
    shown = run(capsys, "show", chats, "--tokenizer", marked, "--seq-len", 1000, "--learn", "all", "--rows", 1)
    assert all("question" in text and "answer" in text for text in re.findall("(?s)\u27e6(.*?)\u27e7", shown))


def test_data_is_read_without_jax():
    code = "import sys, k3jax.data.open, k3jax.data.inspect; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=120).returncode == 0


def test_mistakes_are_one_line(chats, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    for words, complaint in (
        (("tokenize", corpus, chats), "error: marker <|open|>: this tokenizer (bytes, 256 tokens) has none"),
        (("tokenize", corpus), "error: paths: none given, must be at least one"),
        (("tokenize", corpus, tmp_path / "no"), f"error: data.paths: '{tmp_path}/no' matches no file or folder"),
        (("tokenize", corpus, chats, "--held-out", "1"), "error: --held-out 1.0: must be at least 0 and below 1"),
        (("tokenize", corpus, chats, "--seq-len", "0"), "error: --seq-len 0: must be at least 1"),
        (("tokenize", corpus, chats, "--learn", "some"), "error: invalid choice 'some'"),
        (("tokenize", corpus, chats, "--tokenizer", tmp_path / "no"), f"error: {tmp_path}/no: no such folder"),
        (("inspect", tmp_path), f"error: {tmp_path}: not a tokenised corpus"),
        (("show", chats, "--rows", "0"), "error: --rows 0: must be at least 1"),
        (("show",), "error: paths: none given"),
    ):
        found = run(capsys, *words)
        assert found.startswith(complaint) and found.count("\n") == 1, found
