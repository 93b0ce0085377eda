"""The chat model from nothing: its data, and (slowly) the whole of it."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax import chat
from k3jax.data.encoding import Encoder, Encoding, open_tokenizer
from k3jax.data.sources import Document
from k3jax.settings import load_config

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def makes():
    return runpy.run_path(str(ROOT / "launch" / "chat_data.py"))


@pytest.fixture(scope="module")
def data(makes, tmp_path_factory):
    """Made of some modules of the standard library, of which `json` stands for those held out."""
    folder, library = tmp_path_factory.mktemp("chat"), Path(json.__file__).parents[1]
    files = [library / name for name in ("ast.py", "calendar.py", "textwrap.py", "json/__init__.py", "statistics.py", "shutil.py")]
    with pytest.MonkeyPatch.context() as patch:
        names = makes["main"].__globals__
        patch.setitem(names, "files_of", lambda entry: files)
        patch.setitem(names, "digest", lambda text: b"\0\1" if text.startswith("json") else bytes([1, len(text)]))
        makes["main"](folder)
    return folder


def records(data, name):
    return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]


def test_conversations_come_back_from_their_tokens(data):
    tokenizer = open_tokenizer(data / "tokenizer", load_config(str(ROOT / "configs" / "chat.py")).model.vocab_size)
    found = records(data, "chats") + records(data, "held_out")
    assert len(found) > 40 and sum("tools" in record for record in found) > 10
    encode = Encoder(tokenizer, Encoding(512))
    for record in found:
        (tokens,) = encode(Document("", 0, messages=record["messages"], tools=record.get("tools", ())))
        parser = chat.Parser(tokenizer=tokenizer)
        for id in tokens.ids.tolist():
            parser.push_id(id)
        parser.finish()
        said = [message for message in parser.messages if message["role"] == "assistant"]
        assert parser.faults == [] and len(said) == sum(message["role"] == "assistant" for message in record["messages"])
        assert len(tokens.ids) <= 513 and tokens.bytes > 20
    assert encode.skipped == {}


def test_what_is_held_out_is_of_other_modules(data):
    names = {name: json.dumps(records(data, name)) for name in ("chats", "held_out", "text")}
    assert "json.dumps" in names["held_out"] and not any("json." in names[name] for name in ("chats", "text"))
    assert "textwrap.dedent" in names["chats"] and "textwrap" not in names["held_out"]


def test_the_bigram_counts_what_the_assistant_writes(data, monkeypatch, tmp_path):
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path))
    script = runpy.run_path(str(ROOT / "launch" / "chat.py"))
    assert 1 < script["learnt_bigram"](load_config(script["CONFIG"]), data) < 5.6  # ln 256 is 5.55


def test_settings_are_checked_before_anything_is_made(tmp_path):
    command = [sys.executable, ROOT / "launch" / "chat.py", f"out={tmp_path / 'out'}", "train.steps=0"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.stderr == "error: train.steps=0: must be at least 1\n" and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_held_out_reply_is_in_the_right_form(tmp_path):
    """All that launch/chat.sh does, as it is."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    command = [sys.executable, ROOT / "launch" / "chat.py", f"out={tmp_path / 'out'}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["replies"] > 100 and summary["faulty"] == 0
    assert summary["after"]["held_out_byte_loss"] < min(summary["before"]["held_out_byte_loss"], summary["bigram_byte_loss"])
    assert summary["waited"] <= 0.02
