"""Scores against a plain loss of every document alone, whatever the packing, the batches and the mesh; checkpoints of every kind."""

import dataclasses
import json
import random
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import k3jax
from k3jax.cli import main
from k3jax.data.encoding import Encoder, Encoding, open_tokenizer
from k3jax.data.open import open_all
from k3jax.data.sources import documents, files_of, parts_of
from k3jax.nn.model import K3, init_variables
from k3jax.serve.evaluate import evaluate
from k3jax.text import load_tokenizer, train_tokenizer
from k3jax.train.evaluate import Evaluation, Score, total

MOST = 128  # tokens of a document


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """(folder of a tokenizer of 512 tokens, texts, conversations)."""
    folder, draw = tmp_path_factory.mktemp("sources"), random.Random(0)
    train_tokenizer(["a"], 512, folder / "words")
    talk = lambda most: "".join(draw.choice("abc é") for _ in range(draw.randint(2, most)))  # noqa: E731
    texts = [{"text": talk(60)} for _ in range(24)]
    chats = [{"messages": [{"role": r, "content": talk(12)} for r in ("user", "assistant")]} for _ in range(11)]
    for name, records in (("t", texts), ("c", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "words", str(folder / "t.jsonl"), str(folder / "c.jsonl")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))


def alone(model, variables, encode, path) -> Score:
    """The loss of every document of a file by itself, from the logits."""
    found = [tokens for part in parts_of(files_of(path), 1 << 30) for span in part for d in documents(span) for tokens in encode(d)]
    ids = np.zeros((len(found), MOST), np.int32)
    for row, tokens in zip(ids, found, strict=True):
        row[: len(tokens.ids)] = tokens.ids
    mask = (np.arange(MOST) < np.array([len(t.ids) for t in found])[:, None]).astype(np.int32)
    nats = -np.asarray(jax.nn.log_softmax(jax.jit(model.apply)(variables, ids, mask).logits, axis=-1))
    score = Score()
    for row, tokens in zip(nats, found, strict=True):
        places = np.flatnonzero(tokens.learnt[1:])
        text = encode.tokenizer.decode(tokens.ids[places + 1], errors="surrogateescape")
        score += Score(row[places, tokens.ids[places + 1]].sum(), len(places), len(text.encode("utf-8", "surrogateescape")))
    return score


def test_scores_are_the_losses_of_documents_alone(tiny, sources):
    words, *paths = sources
    tokenizer = open_tokenizer(words)
    model = K3(dataclasses.replace(tiny, vocab_size=512, initializer_range=0.3), dtype=jnp.float64, param_dtype=jnp.float64)
    variables = jax.jit(lambda: nn.unbox(init_variables(model, jax.random.key(0))))()
    right = {path: alone(model, variables, Encoder(tokenizer, Encoding(MOST - 1, thinking=False)), path) for path in paths}
    assert right[paths[0]].loss != pytest.approx(right[paths[1]].loss, rel=1e-3)
    for seq_len, batch_size, axes in ((MOST, 3, {}), (256, 8, {"fsdp": 2, "expert": 2, "tensor": 2})):
        mesh = k3jax.make_mesh(**axes)
        data = open_all(paths, words, Encoding(seq_len, thinking=False), batch_size)
        with jax.set_mesh(mesh):
            scores = Evaluation(model, mesh, tokenizer)(variables["params"], variables["router"], data)
        assert scores.keys() == right.keys()
        for path, score in scores.items():
            assert score[1:] == right[path][1:] and score.nats == pytest.approx(right[path].nats, rel=1e-9)
        whole = total(scores)
        assert whole.byte_loss == pytest.approx(sum(s.nats for s in right.values()) / sum(s.bytes for s in right.values()), rel=1e-9)


def save(tiny, folder, kind, words):
    """A released checkpoint of random weights with a tokenizer; what its folder is called."""
    cfg = dataclasses.replace(tiny, vocab_size=256 if kind == "bytes" else 512, initializer_range=0.3)
    model = K3(cfg)
    k3jax.save_hf(folder, cfg, jax.jit(lambda: nn.unbox(init_variables(model, jax.random.key(0))))())
    if kind == "tiktoken":
        for file in words.iterdir():
            shutil.copy(file, folder)
    if kind == "json":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        core.train_from_iterator(["abc cab"] * 20, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
        core.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder, cfg.vocab_size).kind == kind
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiktoken", "bytes", "json"])
def test_released_folders_and_imports_of_every_tokenizer(tiny, sources, kind, tmp_path, capsys):
    words, texts, chats = sources
    folder = save(tiny, tmp_path / "released", kind, words)
    data = ["--data", texts, *(["--data", chats] if kind == "tiktoken" else []), "--seq-len", "256", "--no-thinking"]
    assert main(["convert", "import", folder, str(tmp_path / "imported")]) == 0
    capsys.readouterr()
    tables = []
    for path in (folder, str(tmp_path / "imported")):
        assert main(["evaluate", path, *data]) == 0
        tables.append(capsys.readouterr().out.splitlines())
    assert tables[0] == tables[1]  # packed experts and dequantised ones are the same numbers
    head, *rows = tables[0]
    assert head.split() == ["nats", "a", "token", "nats", "a", "byte", "tokens", "bytes"]
    assert [row.split()[0] for row in rows] == ([texts, chats, "all"] if kind == "tiktoken" else [texts])
    size = sum(len(json.loads(line)["text"].encode()) for line in open(texts))
    nats, byte, tokens, bytes_ = (float(number.replace(",", "")) for number in rows[0].split()[1:])
    assert 0 <= size - bytes_ <= 24 * (1 if kind != "json" else 7)  # the first token of a text is nobody's target
    assert nats * tokens / bytes_ == pytest.approx(byte, rel=1e-3)


def test_what_cannot_be_evaluated_is_one_line(tiny, sources, tmp_path, capsys):
    words, texts, chats = sources
    folder = save(tiny, tmp_path / "released", "tiktoken", words)
    made = ["data", "tokenize", str(tmp_path / "corpus"), texts, "--seq-len", "64", "--workers", "1"]
    assert main(made) == 0
    for words_, complaint in (
        ([], f"error: --data: none given, must be at least one: {folder} is no run with held-out data of its own"),
        (["--learn", "last"], "error: --learn last: must be left out without --data: what a run held out is as it was made"),
        (["--data", "nowhere"], "error: --data: 'nowhere' matches no file or folder"),
        (["--data", str(tmp_path / "corpus")], f"error: {tmp_path}/corpus: made with another tokenizer (bytes, 256 tokens, "),
        (["--data", texts, "--rows", "0"], "error: --rows 0: must be at least 1"),
    ):
        capsys.readouterr()
        assert main(["evaluate", folder, *words_]) == 2
        said = capsys.readouterr().err
        assert said.startswith(complaint) and said.count("\n") == 1, said
    bytes_ = save(tiny, tmp_path / "bytes", "bytes", words)
    with pytest.raises(ValueError, match=r"^data.learn=all: .*corpus was made with assistant; set that, or make it anew"):
        evaluate(bytes_, [str(tmp_path / "corpus")], learn="all")
