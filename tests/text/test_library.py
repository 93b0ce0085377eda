"""tokenizer.json: ids of the library for plain text, markers that text cannot become, exact bytes, what is refused."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from k3jax.text import load_tokenizer

MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]"]


@pytest.fixture(scope="session")
def core():
    """A byte-level tokenizer of the library as people train them: special tokens first, one of them added by itself."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["the quick brown fox <|open|> jumps over", "你好，世界 naïve 🙂 <|sep|>"] * 20, trainer)
    core.add_tokens(["    "])  # text, though added
    core.post_processor = processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", core.token_to_id("[BOS]"))]
    )
    core.enable_truncation(5)
    core.enable_padding(length=9)
    return core


@pytest.fixture
def folder(core, tmp_path):
    core.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_ids_are_the_librarys(core, folder, lines):
    tokenizer = load_tokenizer(folder, 1000)
    plain = Tokenizer.from_str(core.to_str())
    plain.no_truncation()
    plain.no_padding()
    compared = 0
    for line in lines[:3000]:
        ids = tokenizer.encode(line)
        assert tokenizer.decode(ids, errors="surrogateescape") == line
        if line.isprintable() and not any(name in line for name in MARKERS):
            compared += 1
            assert ids.tolist() == plain.encode(line, add_special_tokens=False).ids
    assert compared > 100
    assert tokenizer.encode("    ").tolist() == [core.token_to_id("    ")]
    assert tokenizer.kind == "json" and tokenizer.vocab_size == core.get_vocab_size()


def test_markers_are_no_text(core, folder):
    tokenizer = load_tokenizer(folder)
    assert dict(tokenizer.markers) == {name: core.token_to_id(name) for name in MARKERS}
    for text in ("".join(MARKERS), "<|open|>", "é <|sep|>[BOS]\udcff"):
        ids = tokenizer.encode(text)
        assert ids.size and not set(ids.tolist()) & set(tokenizer.markers.values())
        assert tokenizer.decode(ids, errors="surrogateescape") == text
    ids = [tokenizer.marker("<|open|>"), *tokenizer.encode("a"), tokenizer.marker("<|sep|>")]
    assert tokenizer.decode(ids) == "a" and tokenizer.decode(ids, markers=True) == "<|open|>a<|sep|>"


def test_a_stream_never_shows_half_a_character(folder, lines):
    tokenizer = load_tokenizer(folder)
    stream = tokenizer.stream()
    assert ["".join(map(stream.push, tokenizer.encode(text).tolist())) for text in ("🙂", "Ж")] == ["🙂", "Ж"]
    pieces = [stream.push(id) for id in tokenizer.encode("Ж").tolist()]
    assert pieces == ["", "Ж"]  # the character is two tokens here
    for line in lines[:500]:
        ids = tokenizer.encode(line)
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids.tolist())) + stream.finish() == tokenizer.decode(ids)


def test_identity_follows_the_file(core, folder):
    before = load_tokenizer(folder).identity
    changed = Tokenizer.from_str(core.to_str())
    changed.add_special_tokens(["<|more|>"])
    changed.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).identity != before


def test_text_that_becomes_a_marker_is_an_error(core, folder):
    """A vocabulary in which a marker's text is a word like any other, and is not split."""
    content = json.loads(core.to_str())
    content["model"]["ignore_merges"] = True
    content["pre_tokenizer"]["use_regex"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    with pytest.raises(
        ValueError, match=r"^tokenizer.json: the text '<\|open\|>' became the marker <\|open\|>, must become text$"
    ):
        tokenizer.encode("<|open|>")


def with_prefix_space(core):
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def lowercase(core):
    core.normalizer = normalizers.Lowercase()


def special_letter(core):
    core.add_special_tokens([AddedToken("b")])


@pytest.mark.parametrize(
    "change, wrong",
    [
        (with_prefix_space, r'text does not come back from its ids: "Ab c.*" became " Ab c.*'),
        (lowercase, r'text does not come back from its ids: "Ab c.*" became "ab c.*'),
        (special_letter, r".*must (become text|be bytes of text \(byte-level\))"),
    ],
)
def test_what_loses_text_is_refused(core, folder, change, wrong):
    changed = Tokenizer.from_str(core.to_str())
    change(changed)
    changed.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=rf"^{folder}/tokenizer.json: {wrong}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "content, wrong",
    [
        ("", r"cannot be read as JSON \(Expecting value.*\)"),
        ("[1]", r"found \[1\], must be a JSON object"),
        ("{}", r"is no tokenizer \(.+\)"),
        (Tokenizer(models.WordLevel({"a": 0}, "a")).to_str(), r"255 of the 256 bytes are no tokens, .*\(byte-level\)"),
        (
            Tokenizer(models.BPE({"▁a": 0}, [])).to_str(),
            r"'▁a' is not written in bytes; tokens must be bytes of text \(byte-level\)",
        ),
        (Tokenizer(models.BPE({}, [])).to_str(), r"256 of the 256 bytes are no tokens, .*"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, content, wrong):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/tokenizer.json: {wrong}$"):
        load_tokenizer(tmp_path)
