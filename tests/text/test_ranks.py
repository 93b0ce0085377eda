"""Ids of a rank file against a slow byte-pair merge written from its definition, its markers, and damaged files."""

import base64
import hashlib
import json
import os
import re
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import regex

from k3jax.text import load_tokenizer, train_tokenizer
from k3jax.text.ranks import _cut, write_ranks

GOLDENS = Path(__file__).parents[3] / "shared" / "k3" / "tokenizer_goldens.json"
RELEASED = os.environ.get("K3JAX_TIKTOKEN")
BYTES = [bytes([byte]) for byte in range(256)]

# The split rule in the syntax of another regular expression library.
UPPER, LOWER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--\p{Han}]", r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--\p{Han}]"
SUFFIX = "(?:'(?i:s|t|re|ve|m|ll|d))?"
RULE = regex.compile(
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    regex.V1,
)


class Slow:
    """Merges the pair of lowest rank, the first of several, until no pair is a token."""

    def __init__(self, folder):
        lines = (Path(folder) / "tiktoken.model").read_text().splitlines()
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
        self.merge = lru_cache(None)(self.merge)

    def merge(self, word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            ranked = [
                (self.ranks.get(a + b, len(self.ranks)), i)
                for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            ]
            rank, i = min(ranked, default=(len(self.ranks), 0))
            if rank == len(self.ranks):
                return [self.ranks[part] for part in parts]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in re.split("([\udc80-\udcff])", text):
            if re.fullmatch("[\udc80-\udcff]", part):
                ids.append(self.ranks[os.fsencode(part)])
                continue
            found = RULE.findall(part)
            assert "".join(found) == part
            ids += [id for word in found for id in self.merge(word.encode())]
        return ids


def cut_slowly(text):
    """The released code's cuts, one character after the other."""
    for first in range(0, len(text), 400_000):
        part = text[first : first + 400_000]
        begin, run = 0, 0
        for i, character in enumerate(part):
            run = run + 1 if i and character.isspace() == part[i - 1].isspace() else 1
            if run > 25_000:
                yield part[begin:i]
                begin, run = i, 1
        yield part[begin:]


@pytest.fixture(scope="module")
def tokenizer(words):
    return load_tokenizer(words)


def test_ids_are_those_of_a_slow_merge(words, tokenizer, lines):
    slow = Slow(words)
    assert len(slow.ranks) > 2000
    used = set()
    for line in lines:
        ids = tokenizer.encode(line)
        assert ids.tolist() == slow.encode(line), line
        assert tokenizer.decode(ids, errors="surrogateescape") == line
        used.update(ids.tolist())
    assert len(used) > 800  # of all kinds, not only single bytes


def test_a_stream_is_the_whole_text(tokenizer, lines):
    for line in lines[:2000]:
        ids = tokenizer.encode(line)
        stream = tokenizer.stream()
        pieces = [*map(stream.push, ids.tolist()), stream.finish()]
        assert "".join(pieces) == tokenizer.decode(ids)
        if line.isprintable():
            assert "\ufffd" not in "".join(pieces)


def test_decoding_ends_characters_at_markers(tokenizer):
    ids = [*tokenizer.encode("aé"), tokenizer.marker("<|sep|>"), *tokenizer.encode("b"), *tokenizer.encode("\udcc3")]
    assert tokenizer.decode(ids) == "aéb\ufffd"
    assert tokenizer.decode(ids, markers=True) == "aé<|sep|>b\ufffd"
    first, second = tokenizer.encode("\udcc3")[0], tokenizer.encode("\udca9")[0]
    assert tokenizer.decode([first, second]) == "é"
    assert tokenizer.decode([first, tokenizer.marker("<|sep|>"), second]) == "\ufffd\ufffd"
    stream = tokenizer.stream()
    assert [stream.push(id) for id in (first, tokenizer.marker("<|sep|>"), second, 65)] == [
        "",
        "\ufffd",
        "\ufffd",
        tokenizer.decode([65]),
    ]
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token id {bad} .* outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([bad])
        with pytest.raises(ValueError, match=f"token id {bad} "):
            stream.push(bad)


@pytest.mark.parametrize(
    "text",
    ["QUJDRA" * 5000, " " * 30_000 + "end", "ab " * 9000 + "x" * 50_001 + " y", "word " * 80_001, "é" * 25_001],
    ids=range(5),
)
def test_long_texts_are_cut_as_the_released_code_does(tokenizer, text):
    parts = list(cut_slowly(text))
    assert list(_cut(text)) == parts and len(parts) > 1
    ids = tokenizer.encode(text)
    assert ids.tolist() == [id for part in parts for id in tokenizer.encode(part).tolist()]
    assert tokenizer.decode(ids) == text


def test_runs_are_cut_wherever_they_begin():
    for before in (0, 1, 12_499, 12_500, 12_501):
        for run, count in ((25_000, 1), (25_001, 2)):
            for text in ("a" * before + " " * run + "b", "\n" * before + "é" * run):
                assert list(_cut(text)) == list(cut_slowly(text))
            assert len(list(_cut("\n" * before + "é" * run))) == count


def test_markers_are_no_text(tokenizer):
    text = "".join(tokenizer.markers)
    ids = tokenizer.encode(text)
    assert not set(ids.tolist()) & set(tokenizer.markers.values())
    assert tokenizer.decode(ids) == text


def test_released_names_stand_behind_the_ranks(tmp_path):
    write_ranks(tmp_path, BYTES)
    named = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    bare = load_tokenizer(tmp_path, 512)
    assert bare.markers == named.markers and bare.identity == named.identity and bare.vocab_size == 512
    shift = 256 - 163_584
    ids = {"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588,
           "<|sep|>": 163589, "<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604,
           "<|media_pad|>": 163605, "[UNK]": 163838, "[PAD]": 163839}  # fmt: skip
    for name, id in ids.items():
        assert bare.marker(name) == id + shift and bare.marker_name(id + shift) == name
    others = {f"<|reserved_token_{id}|>" for id in range(256, 512) if id - shift not in ids.values()}
    assert set(bare.markers) == {*ids, *others} and sorted(bare.markers.values()) == list(range(256, 512))
    assert (named.stop_ids, bare.stop_ids) == ({258}, frozenset())
    assert bare.encode("aé\udcff").tolist() == [97, 0xC3, 0xA9, 0xFF]
    with pytest.raises(
        ValueError, match=r"^marker <\|im_end\|>: this tokenizer \(tiktoken, 512 tokens\) has none of that name$"
    ):
        bare.marker("<|im_end|>")


def test_names_in_the_folder_come_first(tmp_path):
    write_ranks(tmp_path, BYTES)
    before = load_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"added_tokens_decoder": {"258": {"content": "<|im_end|>"}}, "eos_token": {"content": "<|im_end|>"}})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.marker("<|im_end|>") == 258 and tokenizer.stop_ids == {258}
    assert "<|open|>" not in tokenizer.markers and tokenizer.marker("<|reserved_token_259|>") == 259
    assert tokenizer.identity != before.identity


def rank_lines(tokens=BYTES):
    return [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]


def changed(place, line):
    lines = rank_lines()
    lines[place] = line
    return b"\n".join(lines)


@pytest.mark.parametrize(
    "content, wrong",
    [
        (
            b"\n".join(rank_lines([*BYTES, b"ab"]))[:-4],
            r"model:257: found 'YWI=', must be a token in base64 and its rank",
        ),
        (b"\n".join(rank_lines())[:-1], r"model:256: rank 25 was there before, must be another one on every line"),
        (changed(3, b"A?== 3"), r"model:4: found 'A\?== 3', must be a token"),
        (changed(3, b"Aw== -3"), r"model:4: found 'Aw== -3', must be a token"),
        (changed(3, b"Aw== three"), r"model:4: found"),
        (changed(3, b"\xff\xfe"), r"model:4: found"),
        (changed(3, b"Ag== 3"), r"model:4: token b'\\x02' was there before"),
        (changed(3, b"Aw== 300"), r"model: no token has rank 3, but 256 tokens have ranks 0 to 255"),
        (changed(3, b"YWI= 3"), r"model: 1 of the 256 bytes are no tokens, the first is 3"),
        (b"", r"model: 256 of the 256 bytes are no tokens"),
    ],
)
def test_a_damaged_rank_file_is_one_line(tmp_path, content, wrong):
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/tiktoken.{wrong}.*$"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "added, wrong",
    [
        ({"255": {"content": "[BOS]"}}, "has id 255, must be 256 to 511, behind the 256 ranks of tiktoken.model"),
        ({"512": {"content": "[BOS]"}}, "has id 512, must be 256 to 511"),
        ({"256": {"content": "[BOS]"}, "257": {"content": "[BOS]"}}, r"names both 256 and 257 \[BOS\]"),
        ({"256": "[BOS]"}, 'must have entries such as "256": {"content": '),
        ({"256": {"content": 3}}, "must have entries such as"),
        ({"first": {"content": "[BOS]"}}, "must have entries such as"),
        (["[BOS]"], "must have entries such as"),
    ],
)
def test_damaged_names_are_one_line(tmp_path, added, wrong):
    write_ranks(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/tokenizer_config.json: added_tokens_decoder {wrong}.*$"):
        load_tokenizer(tmp_path)


def test_half_a_character_is_an_error(tokenizer):
    with pytest.raises(ValueError, match=r"^found half a character, U\+D83D, at position 2, must be whole ones$"):
        tokenizer.encode("é \ud83d")


def test_training_is_repeatable(words, tmp_path):
    text = ["one two three two one", "zwölf Boxkämpfer"] * 3
    for name in "ab":
        train_tokenizer(text, 600, tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    tokenizer = load_tokenizer(tmp_path / "a")
    assert 512 < tokenizer.vocab_size <= 600 and tokenizer.stop_ids == {tokenizer.marker("<|end_of_msg|>")}
    assert tokenizer.encode(" two").size == 1
    assert load_tokenizer(words).identity != tokenizer.identity
    with pytest.raises(ValueError, match="^vocab_size: found 511, must be at least 512: bytes and markers$"):
        train_tokenizer(text, 511, tmp_path / "c")


@pytest.mark.skipif(not RELEASED, reason="K3JAX_TIKTOKEN names no released tiktoken.model")
@pytest.mark.skipif(not GOLDENS.is_file(), reason=f"{GOLDENS} is not here")
def test_released_ids(tmp_path):
    goldens = json.loads(GOLDENS.read_text())
    content = Path(RELEASED).read_bytes()
    assert hashlib.sha256(content).hexdigest() == goldens["provenance"]["tiktoken_model_sha256"]
    (tmp_path / "tiktoken.model").write_bytes(content)
    tokenizer = load_tokenizer(tmp_path, goldens["provenance"]["n_vocab"])
    assert tokenizer.vocab_size == goldens["provenance"]["n_vocab"]
    for name, golden in goldens["texts"].items():
        assert tokenizer.encode(golden["text"]).tolist() == golden["ids"], name
        assert tokenizer.decode(np.asarray(golden["ids"], int)) == golden["text"], name
    for name, golden in goldens["long_texts"].items():
        ids = tokenizer.encode(golden["unit"] * golden["count"] + golden["suffix"]).tolist()
        assert len(ids) == golden["num_ids"], name
        assert hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest() == golden["ids_sha256"], name
