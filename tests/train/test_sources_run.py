"""Runs on sources: conversations and texts in weights, with a tokenizer; what waited for data; what is refused."""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import numpy as np
import pytest

from k3jax.data.packed import PackedDataset
from k3jax.data.tokenize import tokenize
from k3jax.run_config import DataConfig, RunConfig, TrainConfig
from k3jax.serve.evaluate import evaluate
from k3jax.serve.generate import load_text
from k3jax.text import copy_tokenizer, read_files, train_tokenizer
from k3jax.train import inspect, loop
from k3jax.train.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("sources"), random.Random(0)
    train_tokenizer(["a"], 512, folder / "words")
    talk = lambda: "".join(draw.choice("abc ") for _ in range(draw.randint(5, 40)))  # noqa: E731
    chats = [
        {"messages": [{"role": "user", "content": talk()}, {"role": "assistant", "content": talk()}]} for _ in range(60)
    ]
    for name, records in (("c", chats), ("t", [{"text": talk()} for _ in range(200)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(
        paths=(str(folder / "c.jsonl"), str(folder / "t.jsonl")), weights=(3, 1), tokenizer=str(folder / "words"),
        thinking=False, seq_len=256, batch_size=4, held_out=0.2,
    )  # fmt: skip
    train = TrainConfig(steps=4, learning_rate=1e-2, log_every=1, eval_every=2, eval_windows=4, qat=False, remat=False)
    return RunConfig(model=dataclasses.replace(tiny, vocab_size=512), data=data, train=train)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K3JAX_CACHE", str(folder / "cache"))
        return folder / "run", loop.train(dataclasses.replace(config, out=str(folder / "run")))


def test_a_run_on_sources(run):
    folder, result = run
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] < 8 and result.held_out_loss < lines[0]["loss"]
    assert all(0 <= line["waited"] < 1 for line in lines) and result.bigram_loss is None
    assert ["held_out_loss" in line for line in lines] == [False, True, False, True]
    assert lines[-1]["held_out_loss"] == result.held_out_loss and lines[-1]["held_out_byte_loss"] == result.held_out_byte_loss
    assert sum(key.startswith("held_out_loss of ") for key in lines[-1]) == 2


def test_a_run_is_evaluated_on_what_it_held_out(run):
    folder, result = run
    scores = evaluate(folder, batch_size=4, rows=4)
    assert [Path(name).name for name in scores] == ["c.jsonl", "t.jsonl", "all"]
    assert scores["all"].tokens == result.eval_bytes and scores["all"].loss == pytest.approx(result.held_out_loss, rel=1e-5)
    assert scores["all"].byte_loss == pytest.approx(result.held_out_byte_loss, rel=1e-5)


def test_a_run_that_goes_on_with_other_data_is_refused(config, run, tmp_path):
    again = dataclasses.replace(config, resume=str(run[0]), out=str(tmp_path / "out"))
    texts = {"tokenizer": None, "paths": config.data.paths[1:], "weights": ()}
    for change, told in (
        ({}, "train.steps=4: the checkpoint is already at step 4"),
        ({"seed": 1}, "data.seed was 0 and is 1; set it back, or allow it with resume_with=data"),
        ({"weights": (1, 1)}, r"data.weights was 3.*,1.* and is 1,1; set it back"),
        ({"paths": config.data.paths[::-1]}, r"the content of its sources \(.*\) was ........ and is ........, the content of its held-out sources was "),
        (texts, r"data.tokenizer=None: resume=.* has another tokenizer \(tiktoken, 512 ids\), which lies in "),
    ):
        with pytest.raises(ValueError, match=told):
            loop.train(dataclasses.replace(again, data=dataclasses.replace(config.data, **change)))


def test_a_run_on_sources_keeps_its_tokenizer(config, run, tmp_path, monkeypatch):
    folder, _ = run
    words = read_files(config.data.tokenizer)
    assert read_files(folder) == words and "tiktoken.model" in words
    # It goes on in another folder with the tokenizer it has kept, whose own folder goes before anything is saved.
    shutil.copytree(folder, tmp_path / "moved")
    program = loop.program
    monkeypatch.setattr(loop, "program", lambda *given: shutil.rmtree(tmp_path / "moved", ignore_errors=True) or program(*given))
    data = dataclasses.replace(config.data, tokenizer=str(tmp_path / "moved"))
    train = dataclasses.replace(config.train, steps=6, checkpoint_every=1, keep_checkpoints=1)
    loop.train(dataclasses.replace(config, data=data, train=train, resume=str(folder), resume_with=("schedule",), out=str(tmp_path / "more")))
    assert read_files(tmp_path / "more") == words and not (tmp_path / "moved").exists()
    assert [path.name for path in (tmp_path / "more" / "checkpoints").iterdir()] == ["6"]
    text = inspect.report(tmp_path / "more").text
    assert "tokenizer   tiktoken, 512 ids, " in text and "ended by <|end_of_msg|> (258)" in text
    assert load_text(tmp_path / "more")[1].stop_ids == {258}


def test_sources_and_a_corpus_of_them_give_the_same_batches(config, tmp_path):
    data = config.data
    tokenize(tmp_path / "corpus", data.paths, data.tokenizer, loop.encoding(data), data.held_out)
    made = dataclasses.replace(config, data=dataclasses.replace(data, paths=(str(tmp_path / "corpus"),)))
    for one, other in zip(loop.open_data(config), loop.open_data(made)):
        for step in range(3):
            chex.assert_trees_all_equal(one.batch(step), other.batch(step))
        chex.assert_trees_all_equal(list(one.windows(5)), list(other.windows(5)))


def test_plain_text_as_bytes_is_a_stream_but_for_a_single_file(tiny, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} line\n" * 200)
    config = RunConfig(model=tiny, data=DataConfig(paths=(str(tmp_path / "*.txt"),), seq_len=32, batch_size=2))
    streams = loop.open_data(config)
    assert not any(isinstance(data, PackedDataset) for data in streams)
    data = dataclasses.replace(config.data, paths=(str(tmp_path / "a.txt"),), held_out=0.1)
    train, held_out = loop.open_data(dataclasses.replace(config, data=data))
    counts = [data.sources[0].counts["tokens"] for data in (train, held_out)]
    assert sum(counts) == 7 * 200 - 2 and counts[1] == 139
    data = dataclasses.replace(config.data, held_out_paths=(str(tmp_path / "b.txt"),), paths=(str(tmp_path / "a.txt"),))
    train, held_out = loop.open_data(dataclasses.replace(config, data=data))
    assert chr(held_out.batch(0)["tokens"][0, 0]) in "b line\n" and train.sources[0].name.endswith("a.txt")


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"weights": (1, -1)}, "data.weights=1,-1: must be positive numbers"),
        ({"weights": (0, 0)}, "data.weights=0,0: must be positive numbers"),
        ({"weights": (1,)}, "data.weights: found 1, must be 2, one a source: "),
        ({"learn": "some"}, "data.learn='some': must be"),
        ({"tokenizer": None}, "marker <|open|>: this tokenizer (bytes, 256 tokens) has none"),
        ({"tokenizer": "/nowhere"}, "/nowhere: no such folder"),
    ],
)
def test_what_does_not_fit_is_said_before_any_step(config, tmp_path, change, complaint):
    wrong = dataclasses.replace(config, data=dataclasses.replace(config.data, **change), out=str(tmp_path / "run"))
    with pytest.raises(ValueError) as error:
        loop.train(wrong)
    assert complaint in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
CALL = {"function": {"name": "look", "arguments": "{"}}


@pytest.mark.parametrize(
    "record, complaint",
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "message 1: role: found 'robot'"),
        ({"messages": [{"role": "user", "content": 3}, *CHAT]}, "message 1: content: found 3"),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]}, "message 3: tool_calls: entry 1: found"),
        ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [CALL]}]}, "message 3: tool_calls: entry 1: arguments of look: found '{'"),
        ({"messages": CHAT[:1]}, "the conversation ends with a message of role user, must end with an assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}, CHAT[1]]}, "{folder}/no.png: no such file"),
        ("{", "not JSON"),
    ],
)
def test_a_bad_record_is_named_with_file_and_line_before_any_step(config, tmp_path, record, complaint):
    lines = [json.dumps({"messages": CHAT}), "", record if isinstance(record, str) else json.dumps(record)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    data = dataclasses.replace(config.data, paths=(str(tmp_path / "bad.jsonl"),), weights=())
    with pytest.raises(ValueError) as error:
        loop.train(dataclasses.replace(config, data=data, out=str(tmp_path / "run")))
    assert str(error.value).startswith(f"{tmp_path}/bad.jsonl:3: {complaint.replace('{folder}', str(tmp_path))}")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_corpus_whose_tokenizer_is_cut_short_or_another(config, tmp_path):
    corpus, words = tmp_path / "corpus", tmp_path / "words"
    tokenize(corpus, config.data.paths, config.data.tokenizer, loop.encoding(config.data), config.data.held_out)
    shutil.copytree(config.data.tokenizer, words)
    data = dataclasses.replace(config.data, paths=(str(corpus),), tokenizer=str(words))
    ranks = (words / "tiktoken.model").read_bytes()
    (a, *rest), (b, *more), *others = (line.split(b" ") for line in ranks.splitlines())
    swapped = b"".join(b" ".join(line) + b"\n" for line in [[b, *rest], [a, *more], *others])
    for content, complaint in (
        (ranks[:-5], f"{words}/tiktoken.model:256: found "),
        (swapped, f"{corpus}: made with another tokenizer (tiktoken, 512 tokens, "),
    ):
        (words / "tiktoken.model").write_bytes(content)
        with pytest.raises(ValueError) as error:
            loop.train(dataclasses.replace(config, data=data, out=str(tmp_path / "run")))
        assert complaint in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "run").exists()


PROCESSES = """
import hashlib, json, os
import jax
from k3jax.config import ModelConfig
from k3jax.data.packed import PackedDataset
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig

batch = PackedDataset.batch

def noted(self, step, rows=slice(None)):
    found = batch(self, step, rows)
    if not isinstance(rows, slice):
        with open("rows.jsonl", "a") as file:
            for place, row in enumerate(rows.tolist()):
                content = b"".join(found[name][place].tobytes() for name in sorted(found))
                file.write(json.dumps([step, row, hashlib.sha256(content).hexdigest()]) + "\\n")
    return found

PackedDataset.batch = noted
config = RunConfig(
    model=ModelConfig.from_hf(json.loads(r'''MODEL''')),
    data=DataConfig(PATHS, weights=(5, 3, 2), tokenizer="WORDS", thinking=False, seq_len=256, batch_size=4, held_out=0.2),
    train=TrainConfig(steps=6, checkpoint_every=3, eval_windows=4, remat=False, qat=False),
    mesh=MeshConfig(fsdp=4),
    cpu_devices=4,
)
"""


@pytest.mark.slow
def test_two_processes_go_on_with_the_rows_of_one(config, tmp_path):
    """What every step of a run sees, from one process, and from two that go on at step 3."""
    paths = (*config.data.paths, str(tmp_path / "third.jsonl"))
    (tmp_path / "third.jsonl").write_text("".join(json.dumps({"text": f"third {n}"}) + "\n" for n in range(900)))
    text = PROCESSES.replace("MODEL", json.dumps(config.model.to_hf())).replace("PATHS", repr(paths))
    (tmp_path / "config.py").write_text(text.replace("WORDS", config.data.tokenizer))
    seen = []
    for count, more in ((1, ["out=one"]), (2, ["out=two", "resume=one/checkpoints/3"])):
        (tmp_path / "rows.jsonl").unlink(missing_ok=True)
        command = [sys.executable, ROOT / "launch" / "local.py", str(count), "--config=config.py", *more]
        env = os.environ | {"PYTHONPATH": str(ROOT), "K3JAX_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and "goes on with other" not in done.stderr, done.stderr[-2000:]
        seen.append(sorted(json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()))
    one, two = seen
    assert [row[:2] for row in one] == [[step, row] for step in range(6) for row in range(4)]
    assert two == one[12:]


def test_a_tokenizer_larger_than_the_model_is_named(config, tiny):
    with pytest.raises(ValueError, match="has 512 ids, must have at most the model's vocab_size=256"):
        loop.open_data(dataclasses.replace(config, model=tiny))


@pytest.mark.parametrize(
    "kind, trained, with_files, given, says",
    [
        ("run", None, False, "words", "data.tokenizer=WORDS: start=FOLDER has bytes"),
        ("run", None, False, None, None),
        ("run", "words", True, "words", None),
        ("run", "words", True, "others", "has another tokenizer (tiktoken, 512 ids), which lies in FOLDER"),
        ("run", "words", True, None, "data.tokenizer=None: start=FOLDER has another tokenizer (tiktoken, 512 ids)"),
        ("weights", None, True, "others", "has another tokenizer (tiktoken, 512 ids), which lies in FOLDER"),
        ("weights", None, False, "others", None),  # it came without
    ],
)
def test_weights_of_another_tokenizer_are_refused(config, tmp_path, kind, trained, with_files, given, says):
    words, others, folder = config.data.tokenizer, tmp_path / "others", tmp_path / "weights"
    train_tokenizer(["ab ab ab ab"], 513, others)
    paths = {"words": words, "others": str(others), None: None}
    meta = {"kind": kind, "model": config.model.to_hf()} | ({"data": {"tokenizer": trained and words}} if kind == "run" else {})
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, {"x": np.zeros(1)}, meta, wait=True)
    if with_files:
        copy_tokenizer(words, folder)
    found = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=paths[given]))
    if says is None:
        loop._check_tokenizer(found, "start", str(folder))
        return
    with pytest.raises(ValueError) as error:
        loop._check_tokenizer(found, "start", str(folder))
    assert says.replace("WORDS", words).replace("FOLDER", str(folder)) in str(error.value)
