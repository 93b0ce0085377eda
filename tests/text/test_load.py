"""Which tokenizer a folder has, what ends a generation, and the files that travel; bytes."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from k3jax.text import ByteTokenizer, copy_tokenizer, load_tokenizer, printable, read_files, tokenizer_files, write_files
from k3jax.text.ranks import write_ranks

BYTES = [bytes([byte]) for byte in range(256)]


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_bytes_round_trip():
    ids = ByteTokenizer.encode("aé")
    assert ids.dtype == np.int32 and ids.tolist() == [97, 0xC3, 0xA9]
    assert ByteTokenizer.decode(ids) == "aé"
    assert ByteTokenizer.decode([97, 0xC3]) == "a\ufffd"
    line = os.fsdecode(b"a\xff")
    assert ByteTokenizer.encode(line).tolist() == [97, 0xFF]
    assert ByteTokenizer.decode([97, 0xFF], errors="surrogateescape") == line
    with pytest.raises(ValueError, match=r"^token id -1 at position \[2\] is outside"):
        ByteTokenizer.decode([1, 2, -1])
    with pytest.raises(ValueError, match=r"^found half a character, U\+D83D, at position 1"):
        ByteTokenizer.encode("a\ud83d")


def test_bytes_stream():
    stream = ByteTokenizer.stream()
    assert [stream.push(byte) for byte in "aé🙂".encode()] == ["a", "", "é", "", "", "", "🙂"]
    assert [stream.push(0xC3), stream.finish(), stream.finish(), stream.push(97)] == ["", "\ufffd", "", "a"]


def test_the_folder_decides(tmp_path, words):
    assert load_tokenizer(tmp_path).kind == load_tokenizer(tmp_path, 256).kind == "bytes"
    assert load_tokenizer(tmp_path).identity == ByteTokenizer.identity
    assert load_tokenizer(words, 2560).kind == load_tokenizer(words, 10_000).kind == "tiktoken"
    write(tmp_path, tokenizer="{}")  # not read where both are
    write_ranks(tmp_path, BYTES)
    assert load_tokenizer(tmp_path).kind == "tiktoken"


def test_a_tokenizer_fits_the_model(tmp_path, words):
    with pytest.raises(
        ValueError,
        match=rf"^{words}: its tokenizer \(tiktoken\) has 2560 ids, must have at most the model's vocab_size=2559$",
    ):
        load_tokenizer(words, 2559)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}: found neither tiktoken.model nor tokenizer.json, .* vocab_size=163840, .*$"
    ):
        load_tokenizer(tmp_path, 163_840)


def test_stop_ids_are_the_union_of_all_files(tmp_path):
    write_ranks(tmp_path, BYTES)
    assert load_tokenizer(tmp_path).stop_ids == {258}
    write(
        tmp_path,
        config={"eos_token_id": 7, "text_config": {"eos_token_id": [8, 9]}},
        generation_config={"eos_token_id": [9, 10]},
    )
    assert load_tokenizer(tmp_path).stop_ids == {7, 8, 9, 10, 258}
    write(tmp_path, tokenizer_config={"eos_token": {"content": "[EOS]", "special": True}}, config={"text_config": None})
    assert load_tokenizer(tmp_path).stop_ids == {9, 10, 257}
    write(tmp_path, tokenizer_config={"eos_token": None}, generation_config={"eos_token_id": None})
    assert load_tokenizer(tmp_path).stop_ids == frozenset()
    folder = tmp_path / "bytes"
    folder.mkdir()
    write(folder, config={"eos_token_id": 0})
    assert load_tokenizer(folder).stop_ids == {0} and ByteTokenizer.stop_ids == frozenset()


@pytest.mark.parametrize(
    "name, content, wrong",
    [
        ("config", '{"eos_token_id": 1, "eos_token_id": 2}', r"cannot be read as JSON \(eos_token_id is .* twice\)"),
        ("config", '{"eos_token_id": 1', r"cannot be read as JSON \(.*\)"),
        ("config", {"eos_token_id": "[EOS]"}, r'eos_token_id: found "\[EOS\]", must be an id or a list of ids'),
        ("config", {"text_config": {"eos_token_id": -1}}, r"eos_token_id: found -1, must be an id or a list of ids"),
        ("generation_config", {"eos_token_id": [1, True]}, r"eos_token_id: found \[1, true\], must be .*"),
        ("generation_config", "\xff", r"cannot be read as JSON \(.*\)"),
        ("generation_config", [], r"found \[\], must be a JSON object"),
        ("tokenizer_config", {"eos_token": "</s>"}, r'eos_token: found "</s>", must be the name of a special token'),
        (
            "tokenizer_config",
            {"eos_token": {"text": "[EOS]"}},
            r"eos_token: found .*, must be the name of a special token",
        ),
    ],
)
def test_damaged_stop_ids_are_one_line(tmp_path, name, content, wrong):
    write_ranks(tmp_path, BYTES)
    write(tmp_path, **{name: content})
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{name}.json: {wrong}$"):
        load_tokenizer(tmp_path)


def test_files_travel_byte_for_byte(tmp_path, words):
    source, destination = tmp_path / "source", tmp_path / "run" / "tokenizer"
    copy_tokenizer(words, source)
    write(source, generation_config='{"eos_token_id":\r\n3}', config="{}")
    (source / "chat_template.jinja").write_bytes(b"{{ \xff }}\n")
    (source / "model.safetensors").write_bytes(b"")
    destination.mkdir(parents=True)
    write(destination, tokenizer="{}")
    (destination / "notes.txt").write_text("stays")
    copies = copy_tokenizer(source, destination)
    assert [path.name for path in copies] == [
        "chat_template.jinja",
        "generation_config.json",
        "tiktoken.model",
        "tokenizer_config.json",
    ]
    assert copies == tokenizer_files(destination)
    assert all(path.read_bytes() == (source / path.name).read_bytes() for path in copies)
    assert {path.name for path in destination.iterdir()} == {*(path.name for path in copies), "notes.txt"}
    assert load_tokenizer(destination).identity == load_tokenizer(words).identity
    assert copy_tokenizer(destination, destination) == copies == tokenizer_files(destination)
    assert tokenizer_files(tmp_path) == tokenizer_files(tmp_path / "missing") == []


def test_files_that_are_written_are_whole(tmp_path, words, monkeypatch):
    files = read_files(words)
    write_files(files, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_files(files, tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError):
        write_files(files | {"tiktoken.model": b"YQ== 0\n"}, tmp_path)
    assert load_tokenizer(tmp_path).identity == load_tokenizer(words).identity


def test_ids_are_named(tmp_path, words):
    tokenizer = load_tokenizer(words)
    end, byte = tokenizer.marker("<|end_of_msg|>"), int(tokenizer.encode("\n")[0])
    assert tokenizer.describe(end) == f"<|end_of_msg|> ({end})"
    assert tokenizer.describe(byte) == f"'\\n' ({byte})"
    assert [tokenizer.describe(id) for id in (2560, 163_586)] == ["token (2560)", "token (163586)"]
    assert ByteTokenizer().describe(0) == "'\\x00' (0)"


def test_text_does_not_steer_a_terminal():
    assert printable("\x1b[2J\r\x00\x85\u2028\u202e\u2066\ud800") == r"\x1b[2J\r\x00\x85\u2028\u202e\u2066\ud800"
    for text in ("a\n\tb", "漢字\u3000かな", "👩\u200d💻", "می\u200cخواهم", "10\u00a0€", "e\u0301"):
        assert printable(text) == text
