"""Folders of models with a tokenizer, and a model that says what it is told."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from k3jax import chat
from k3jax.config import VisionConfig
from k3jax.serve import chat as serving
from k3jax.serve import generate
from k3jax.text import copy_tokenizer, load_tokenizer

VISION = VisionConfig(4, 6, 5, 4, 2, 1, 32, 64, 32, 32, 32)
VOCABULARY = 2600  # of the models: more than their tokenizer has


@pytest.fixture(scope="session")
def library_words(tmp_path_factory):
    """Folder of a tokenizer.json with the markers of the chat format."""
    folder = tmp_path_factory.mktemp("library")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    markers = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=markers, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(["message role assistant user think response"] * 20, trainer)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_msg|>"}')
    return folder


@pytest.fixture(scope="session")
def seeing_cfg(tiny, words):
    """Kimi K3 with vision, whose placeholder is the tokenizer's of `words`."""
    placeholder = load_tokenizer(words).marker("<|media_pad|>")
    vision = dataclasses.replace(VISION, media_placeholder_token_id=placeholder)
    return dataclasses.replace(tiny, vocab_size=VOCABULARY, vision=vision)


@pytest.fixture
def folder(tmp_path, seeing_cfg, words):
    """What is read of a released folder before its weights: config.json and the tokenizer."""
    path = tmp_path / "model"
    copy_tokenizer(words, path)
    (path / "config.json").write_text(json.dumps(seeing_cfg.to_hf()))
    return path


@pytest.fixture
def no_weights(monkeypatch):
    """Fails where weights are read."""

    def fail(*_):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(serving, "load_model", fail)
    monkeypatch.setattr(generate, "load_model", fail)


@pytest.fixture
def says(monkeypatch):
    """Has the model draw given ids, reply for reply, an exception among them raised; what it was asked is in the list returned."""
    asked = []

    def script(*replies):
        left = list(replies)

        def draw(model, variables, prompt, max_tokens, temperature, top_k, top_p, seed, images, stop_ids, ids):
            asked.append({"prompt": prompt.tolist(), "images": images, "ids": ids, "max_tokens": max_tokens, "seed": seed})
            for token in left.pop(0)[:max_tokens]:
                if isinstance(token, type):
                    raise token
                yield int(token)
                if token in stop_ids:
                    return

        for module in (serving, generate):
            monkeypatch.setattr(module, "load_model", lambda *_: (None, None))
            monkeypatch.setattr(module, "generate_tokens", draw)
        return asked

    return script


@pytest.fixture
def written(words):
    """Ids that an assistant writes for a message."""
    tokenizer, before = load_tokenizer(words), [{"role": "user", "content": "Hi"}]

    def ids(message, thinking=True):
        given, _ = chat.ids(chat.encode(before, thinking=thinking, prefix=True), tokenizer)
        whole, _ = chat.ids(chat.encode([*before, {"role": "assistant", **message}], thinking=thinking), tokenizer)
        assert whole[: len(given)].tolist() == given.tolist()
        return whole[len(given) :].tolist()

    return ids
