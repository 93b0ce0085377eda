"""Conversations: the prompt is what `chat.encode` gives, replies stream whole characters, what is wrong is said before weights are read."""

import contextlib
import dataclasses
import io
import json
import random
import re

import numpy as np
import pytest
from PIL import Image

from k3jax import chat, cli, runtime
from k3jax.cli.serve import _Screen
from k3jax.hf.synthesize import synthesize
from k3jax.serve.chat import Chat
from k3jax.serve.generate import generate_text
from k3jax.text import copy_tokenizer, load_tokenizer
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.convert import export_checkpoint, import_checkpoint

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
REPLY = {
    "reasoning_content": "They want 漢字 🙂.\nSo:",
    "content": "naïve 👩‍💻\n\n  café\t<|end_of_msg|>",
    "tool_calls": [
        {"function": {"name": "weather", "arguments": {"city": "Århus\n\"x\"", "days": [1, {"a": None}], "on": True}}},
        {"function": {"name": "time", "arguments": {}}},
    ],
}
SHOWN = (
    "[thinking] They want 漢字 🙂.\nSo:\n[answer] naïve 👩‍💻\n\n  café\t<|end_of_msg|>\n"
    '[call] weather {"city": "Århus\\n\\"x\\"", "days": [1, {"a": null}], "on": true}\n[call] time {}'
)


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "setup", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def take(generator):
    """(all that it yields, what it returns)."""
    found = []
    while True:
        try:
            found.append(next(generator))
        except StopIteration as stop:
            return found, stop.value


def picture(path, width=24, height=9):
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).save(path)
    return str(path)


# ---- prompts and replies -------------------------------------------------------------------------------------


CONVERSATIONS = [
    (HI, []),
    ([{"role": "system", "content": "Be brief. <|open|>"}, *HI], [WEATHER]),
    (
        [*HI, {"role": "assistant", **REPLY}, {"role": "tool", "tool": "weather", "content": "4 °C"},
         {"role": "tool", "tool": "time", "content": "noon"}],
        [WEATHER],
    ),
]  # fmt: skip


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("messages, tools", CONVERSATIONS)
def test_the_prompt_is_what_encode_gives(folder, says, written, messages, tools, thinking):
    asked = says(written({"content": "4"}, thinking))
    model = Chat(folder)
    deltas, reply = take(model.reply(messages, tools, thinking=thinking, effort="low", seed=3))
    pieces = chat.encode(messages, tools, thinking, effort="low", prefix=True)
    assert asked[0]["prompt"] == chat.ids(pieces, model.tokenizer)[0].tolist()
    assert (asked[0]["ids"], asked[0]["seed"]) == (2560, 3)
    assert reply.message == {"role": "assistant", "content": "4"} and reply.faults == []
    assert "".join(delta.text for delta in deltas if delta.kind == "content") == "4"


def test_a_reply_comes_as_it_is_written(folder, says, written):
    says(written(REPLY))
    model = Chat(folder)
    _, reply = take(model.reply(HI))
    assert reply.message == {"role": "assistant", **REPLY}
    assert (reply.faults, reply.ended) == ([], model.tokenizer.marker("<|end_of_msg|>"))


def test_images_of_a_conversation_are_seen(folder, says, written, tmp_path):
    asked = says(written({"content": "A cat"}))
    file = picture(tmp_path / "a.png")
    image = {"type": "image_url", "image_url": {"url": file}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}, {"type": "image", "image": file}]}]
    model = Chat(folder)
    take(model.reply(messages))
    pieces = chat.encode(messages, images=[(24, 9)] * 2, prefix=True)
    assert asked[0]["prompt"] == chat.ids(pieces, model.tokenizer)[0].tolist()
    assert [patches.grid for patches in asked[0]["images"]] == [asked[0]["images"][0].grid] * 2
    placeholder = model.cfg.vision.media_placeholder_token_id
    assert asked[0]["prompt"].count(placeholder) == 2


def test_any_tokens_are_a_reply_that_the_conversation_goes_on_with(folder, says):
    """Of what was written, all that `encode` takes is kept."""
    model = Chat(folder)
    draw = random.Random(0)
    words = ["think", "response", "tools", "call", 'call tool="a" index="1"', "json", 'argument key="x" type="object"', '"\\ud800"', "{}"]
    pieces = [model.tokenizer.encode(word).tolist() for word in words]
    markers = [[model.tokenizer.marker(name)] for name in ("<|open|>", "<|close|>", "<|sep|>")]
    piece = lambda: draw.choice((draw.choice(pieces), draw.choice(markers), [draw.randrange(2304)]))  # noqa: E731
    sequences = [[id for _ in range(draw.randint(0, 40)) for id in piece()] for _ in range(150)]
    says(*sequences)
    for _ in sequences:
        _, reply = take(model.reply(HI))
        chat.encode([*HI, reply.message, *HI], prefix=True)
        assert reply.faults  # none of them ends its message


def test_a_call_that_cannot_be_written_again_is_left_out(folder, says):
    model = Chat(folder)
    text = lambda value: model.tokenizer.encode(value).tolist()  # noqa: E731
    opened, closed, sep = (model.tokenizer.marker(name) for name in ("<|open|>", "<|close|>", "<|sep|>"))
    tag = lambda name: [opened, *text(name), sep]  # noqa: E731
    end = lambda name: [closed, *text(name), sep]  # noqa: E731
    body = [*tag('json type="object"'), *text('{"x": "\\ud800"}'), *end("json")]
    says([*end("think"), *tag("response"), *end("response"), *tag("tools"),
          *tag("call"), *end("call"), *tag('call tool="a" index="2"'), *body, *end("call"),
          *tag('call tool="b" index="3"'), *end("call"), *end("tools"), *end("message"), model.tokenizer.marker("<|end_of_msg|>")])  # fmt: skip
    _, reply = take(model.reply(HI))
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["b"]
    left = [fault for fault in reply.faults if "is left out" in fault]
    assert len(left) == 2 and "found half a character" in left[1]


# ---- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "<|end_of_msg|>"])
def test_any_stop_id_ends_a_reply_and_is_named(folder, says, written, capsys, name):
    tokenizer = load_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = [tokenizer.marker("[BOS]"), 2599]  # one that is beyond the tokenizer
    (folder / "config.json").write_text(json.dumps(config))
    newline = int(tokenizer.encode("\n")[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": newline}))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"eos_token": "[EOS]"}))
    ends = {
        "config.json": "[BOS]", "tokenizer_config.json": "[EOS]", "generation_config.json": "'\\n'", "<|end_of_msg|>": "<|end_of_msg|>",
    }[name]  # fmt: skip
    token = newline if ends == "'\\n'" else tokenizer.marker(ends)
    ids = tokenizer.encode("think").tolist()
    says([*ids, token, *ids], [*ids, token, *ids])
    _, reply = take(Chat(folder).reply(HI))
    assert reply.ended == token and reply.message["reasoning_content"] == "think"
    if name == "<|end_of_msg|>":  # of a reply alone
        return
    pieces, end = take(generate_text(folder, "I"))
    assert ("".join(pieces), end) == ("think", f"{ends} ({token})")
    says([*ids, token])
    assert cli.main(["generate", str(folder), "--prompt", "I"]) == 0
    assert capsys.readouterr() == ("think\n", f"ended by {ends} ({token})\n")
    (folder / "chat.json").write_text(json.dumps(HI))
    says([*ids, token])
    assert cli.main(["chat", str(folder), "--messages", str(folder / "chat.json")]) == 0
    assert capsys.readouterr().err.startswith(f"ended by {ends} ({token}); not in the right form: message 1: ")


def test_a_reply_that_is_cut_off(folder, says, written, capsys, seeing_cfg):
    (folder / "chat.json").write_text(json.dumps(HI))
    argv = ["chat", str(folder), "--messages", str(folder / "chat.json")]
    says(written(REPLY))
    assert cli.main([*argv, "--max-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "[thinking] The\n" and err.count("\n") == 1
    assert err.startswith("cut off: --max-tokens or the model's last position was reached") and "cut off in think" in err
    model = Chat(folder)
    again = [*written({"content": "4"})[:-1], *written({"content": "4"})]  # a second message instead of the end
    header = chat.ids(chat.encode(HI), model.tokenizer)[0].tolist()
    asked = says([*written({"content": "4"})[:-1], *header, *again])
    _, reply = take(model.reply(HI))
    assert reply.ended is None and reply.message["content"] == "4"
    # As many tokens as the model has positions for, behind the prompt.
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = len(asked[0]["prompt"]) + 3
    (folder / "config.json").write_text(json.dumps(config))
    asked = says(written(REPLY))
    take(Chat(folder).reply(HI))
    assert asked[-1]["max_tokens"] == 3


# ---- what is shown -------------------------------------------------------------------------------------------


def shown(pushes, capsys):
    parser, screen = chat.Parser("think"), _Screen()
    for text, marker in pushes:
        for delta in parser.push(text, marker):
            screen(delta)
    for delta in parser.finish():
        screen(delta)
    return capsys.readouterr().out


def reply_pieces():
    given = len(chat.encode(HI, prefix=True))
    return [(piece.text, piece.marker) for piece in chat.encode([*HI, {"role": "assistant", **REPLY}])[given:]]


def test_a_reply_is_shown_the_same_at_every_split(capsys, monkeypatch):
    pieces = reply_pieces()
    assert shown(pieces, capsys) == SHOWN
    for place, (text, marker) in enumerate(pieces):
        for cut in range(1, 0 if marker else len(text)):
            split = [*pieces[:place], (text[:cut], False), (text[cut:], False), *pieces[place + 1 :]]
            assert shown(split, capsys) == SHOWN
    monkeypatch.setattr(runtime, "shows_colours", lambda: True)
    single = [(part, marker) for text, marker in pieces for part in ([text] if marker else text)]
    assert single != pieces
    plain = [out.replace("\x1b[0m\x1b[2m", "").replace("\x1b[0m\x1b[36m", "") for out in (shown(pieces, capsys), shown(single, capsys))]
    assert plain[0] == plain[1]
    assert plain[0].startswith("\x1b[2mThey want 漢字 🙂.\nSo:\x1b[0m\nnaïve") and "\n\x1b[36mtime\x1b[0m " in plain[0]


def test_no_half_character_is_shown(folder, says, written, capsys, monkeypatch):
    """Every token of the reply is a byte."""
    tokenizer = load_tokenizer(folder)
    single = [tokenizer._byte_ids[byte] for text, marker in reply_pieces() if not marker for byte in text.encode()]
    assert len(single) > 100
    ids = [
        id
        for text, marker in reply_pieces()
        for id in ([tokenizer.marker(text)] if marker else [tokenizer._byte_ids[byte] for byte in text.encode()])
    ]
    (folder / "chat.json").write_text(json.dumps(HI))
    says(ids)
    pieces = []
    monkeypatch.setattr("builtins.print", lambda *text, end="\n", **_: pieces.append("".join(text) + end))
    assert cli.main(["chat", str(folder), "--messages", str(folder / "chat.json")]) == 0
    assert "".join(pieces) == SHOWN + "\n" and len(pieces) > 60 and not any("\ufffd" in piece for piece in pieces)


def test_a_reply_does_not_steer_the_terminal(capsys):
    assert shown([("\x1b[2J\x07a\u202eb\u00a0\u200dc", False)], capsys) == "[thinking] \\x1b[2J\\x07a\\u202eb\u00a0\u200dc"


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert not runtime.shows_colours()
    monkeypatch.setattr("sys.stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert runtime.shows_colours()
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not runtime.shows_colours()


def test_a_reply_as_json(folder, says, written, capsys):
    (folder / "chat.json").write_text("\ufeff" + json.dumps({"messages": HI, "tools": [WEATHER]}))
    asked = says(written(REPLY, thinking=False))
    argv = ["chat", str(folder), "--messages", str(folder / "chat.json"), "--as-json", "--thinking", "off"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"role": "assistant", **{key: value for key, value in REPLY.items() if key != "reasoning_content"}}
    pieces = chat.encode(HI, [WEATHER], thinking=False, prefix=True)
    assert asked[0]["prompt"] == chat.ids(pieces, load_tokenizer(folder))[0].tolist()


# ---- in the terminal -----------------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch):
    def lines(*texts):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in texts)))

    return lines


def test_a_conversation_goes_on_with_what_was_said(folder, says, written, typed, capsys, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    call = {"tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}] * 2}
    asked = says(written(call), written({"reasoning_content": "Cold.", "content": "4 °C"}), written({"content": "Bye"}))
    typed("Weather?", "4 °C", "", "  ", "thanks", "")
    image = picture(tmp_path / "a.png")
    assert cli.main(["chat", str(folder), "--tools", "tools.json", "--image", image]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out == (
        '[call] weather {"city": "Oslo"}\n[call] weather {"city": "Oslo"}\n[thinking] Cold.\n[answer] 4 °C\n[answer] Bye\n'
    )
    first = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Weather?"}]}]
    results = [{"role": "tool", "tool": "weather", "content": text} for text in ("4 °C", "")]
    second = [*first, {"role": "assistant", **call}, *results]
    third = [*second, {"role": "assistant", "reasoning_content": "Cold.", "content": "4 °C"}, {"role": "user", "content": "thanks"}]
    tokenizer = load_tokenizer(folder)
    for found, messages in zip(asked, (first, second, third), strict=True):
        pieces = chat.encode(messages, [WEATHER], images=[(24, 9)], prefix=True)
        assert found["prompt"] == chat.ids(pieces, tokenizer)[0].tolist()


def test_ctrl_c_in_a_reply_takes_the_last_message_back(folder, says, written, typed, capsys):
    call = {"tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    asked = says(
        [*written(REPLY)[:3], KeyboardInterrupt], written({"content": "1"}), written(call), [KeyboardInterrupt], written({"content": "3"})
    )  # fmt: skip
    typed("lost", "first", "lost, too", "sunny", "third")
    assert cli.main(["chat", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == "\ninterrupted: your last message, and what followed it, is forgotten\n" * 2
    assert out.endswith("[answer] 3\n")
    kept = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "1"}, {"role": "user", "content": "third"}]
    assert asked[-1]["prompt"] == chat.ids(chat.encode(kept, prefix=True), load_tokenizer(folder))[0].tolist()


@pytest.mark.parametrize("ends", [EOFError, KeyboardInterrupt])
def test_the_end_at_the_prompt_is_the_end(folder, says, monkeypatch, ends):
    def stop(_):
        raise ends

    says()
    monkeypatch.setattr("builtins.input", stop)
    assert cli.main(["chat", str(folder)]) == 0
    monkeypatch.setattr("sys.stdin", None)  # closed
    assert cli.main(["chat", str(folder)]) == 0


def test_bytes_that_are_no_text_stay_bytes(folder, says, written, monkeypatch):
    asked = says(written({"content": "1"}))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert cli.main(["chat", str(folder)]) == 0
    pieces = chat.encode([{"role": "user", "content": "a\udcff"}], prefix=True)
    assert asked[0]["prompt"] == chat.ids(pieces, load_tokenizer(folder))[0].tolist()


# ---- what is refused -----------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
CALL = lambda **call: [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]  # noqa: E731


@pytest.mark.parametrize(
    "content, says",
    [
        ([{"role": "robot", "content": "x"}], "chat.json: message 1: role: found 'robot', must be system, developer, user, "),
        ([{"role": "user", "content": 4}], "chat.json: message 1: content: found 4, must be text or a list of parts"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "chat.json: message 1: content: part 1: found {'type': 'audio'}"),
        (CALL(function={"arguments": "{}"}), "chat.json: message 2: tool_calls: entry 1: found {'function': {'arguments': "),
        (CALL(function={"name": "f", "arguments": "{x"}), "chat.json: message 2: tool_calls: entry 1: arguments of f: found '{x', must"),
        ([USER, {"role": "tool", "content": "4"}], "chat.json: message 2: found the result of no call"),
        ([USER, {"role": "assistant", "content": "x"}], "chat.json: the last message is of role assistant, must be of user or tool"),
        ([], "chat.json: messages: found [], must be a list of at least one"),
        ({"tools": []}, "chat.json: messages: found None, must be a list"),
        ({"messages": [USER], "tools": [{}]}, "chat.json: tools: entry 1: found {}, must be"),
        ('[{"role": "user"', "chat.json: cannot be read as JSON ("),
        ("[]\ufeff", "chat.json: cannot be read as JSON (Extra data"),
        (b"\xff[]", "chat.json: cannot be read as JSON ("),
        ([{"role": "user", "content": [{"type": "image", "image": "none.png"}]}], "chat.json: message 1: image none.png: no such file"),
        ([{"role": "user", "content": [{"type": "image", "image": 4}]}], "chat.json: message 1: found image 4, must be the name"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]}],
            "chat.json: message 1: found image 'https://a.b/c.png', must be the name of a file here",
        ),
        ([{"role": "user", "content": [{"type": "image", "image": "chat.json"}]}], "chat.json: not an image of a known format"),
        ([{"role": "user", "content": "x " * 5000}], "messages: found 5"),
    ],
)
def test_a_conversation_that_is_none_is_one_line_before_weights_are_read(folder, no_weights, refused, tmp_path, content, says):
    content = content if isinstance(content, (str, bytes)) else json.dumps(content)
    (tmp_path / "chat.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 5000
    (folder / "config.json").write_text(json.dumps(config))
    assert refused("chat", str(folder), "--messages", "chat.json").startswith(says)


@pytest.fixture
def refused(capsys):
    def run(*argv):
        assert cli.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err.removeprefix("error: ").rstrip("\n")

    return run


def test_flags_and_files_that_do_not_fit(folder, no_weights, refused, tmp_path):
    (tmp_path / "chat.json").write_text(json.dumps({"messages": HI, "tools": [WEATHER]}))
    (tmp_path / "tools.json").write_text('{"tools": []}')
    picture(tmp_path / "a.png")
    for line, says in (
        ("--as-json", "--as-json True: must be left out without --messages"),
        ("--messages chat.json --image a.png", "--image a.png: must be left out beside --messages"),
        ("--image none.png", "--image none.png: no such file"),
        ("--image chat.json", "chat.json: not an image of a known format"),
        ("--image chat.json --thinking=maybe", "--thinking=maybe: must be True or False"),
        ("--thinking maybe", "maybe: unknown argument"),
        ("--effort huge", "invalid choice 'huge'"),
        ("--messages none.json", "none.json: cannot be read as JSON (No such file or directory)"),
        ("--messages chat.json --tools tools.json", "--tools tools.json: must be left out, chat.json has tools"),
        ("--tools tools.json", "tools.json: tools: found {'tools': []}, must be a list"),
        ("--max-tokens 0", "--max-tokens 0: must be at least 1"),
        ("--temperature -1", "--temperature -1.0: must be 0 or more, and finite"),
    ):
        assert refused("chat", str(folder), *line.split()).startswith(says)


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda folder: (folder / "tiktoken.model").unlink(), ": found neither tiktoken.model nor tokenizer.json, must hold one: the model has"),
        (lambda folder: cut(folder / "tiktoken.model", 1005), "/tokenizer_config.json: added_tokens_decoder has id 2304, must be 124 to 379"),
        (lambda folder: (folder / "tiktoken.model").write_bytes(b"\xff\n"), "/tiktoken.model:1: found"),
        (lambda folder: cut(folder / "tokenizer_config.json", 99), "/tokenizer_config.json: cannot be read as JSON"),
        (lambda folder: (folder / "generation_config.json").write_text("[]"), "/generation_config.json: found [], must be a JSON object"),
        (lambda folder: resized(folder, 2559), ": its tokenizer (tiktoken) has 2560 ids, must have at most the model's vocab_size=2559"),
    ],
)
def test_a_tokenizer_that_is_none_of_the_models_is_one_line(folder, no_weights, refused, tmp_path, change, says):
    change(folder)
    (tmp_path / "chat.json").write_text(json.dumps(HI))
    for argv in (("chat", str(folder)), ("chat", str(folder), "--messages", "chat.json"), ("generate", str(folder), "--prompt", "x")):
        assert refused(*argv).startswith(f"{folder}{says}")


def resized(folder, vocab_size):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = vocab_size
    (folder / "config.json").write_text(json.dumps(config))


def test_models_that_cannot_hold_a_conversation(folder, no_weights, refused, tmp_path, tiny, library_words):
    file = picture(tmp_path / "a.png")
    messages = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    config = json.loads((folder / "config.json").read_text())
    argv = ("chat", str(folder), "--messages", "chat.json")
    (folder / "config.json").write_text(json.dumps(config | {"media_placeholder_token_id": 7}))
    assert re.fullmatch(r"media_placeholder_token_id: found 7, must be the tokenizer's <\|media_pad\|>, \d+", refused(*argv))
    says = "media_placeholder_token_id: found 7, must be a marker of its tokenizer (tiktoken, 2560 tokens): an id that no text becomes"
    assert refused("generate", str(folder), "--prompt", "x", "--image", file) == says
    copy_tokenizer(library_words, folder)
    assert re.fullmatch(r"marker <\|media_pad\|>: this tokenizer \(json, \d+ tokens\) has none of that name", refused(*argv))
    (folder / "config.json").write_text(json.dumps(tiny.to_hf()))
    for path in folder.glob("token*"):
        path.unlink()
    says = f"{folder}: no model for conversations: marker <|open|>: this tokenizer (bytes, 256 tokens) has none of that name"
    assert refused(*argv) == says
    copy_tokenizer(library_words, folder)
    (folder / "config.json").write_text(json.dumps(dataclasses.replace(tiny, vocab_size=300).to_hf()))
    for asked in (argv, ("chat", str(folder), "--image", file)):
        assert refused(*asked) == "images: found 1, must be none: this model has no vision"
    assert refused("generate", str(folder), "--prompt", "x", "--max-tokens", "1048576").startswith("max_tokens=1048576: found 1 tokens in")


# ---- the model itself ----------------------------------------------------------------------------------------


def inspect(folder):
    with contextlib.redirect_stdout(out := io.StringIO()):
        assert cli.main(["inspect", str(folder)]) == 0
    return out.getvalue()


def test_released_imported_and_exported_models_say_the_same(seeing_cfg, words, tmp_path):
    """An image and text to a model with padded vocabulary, of which only the tokenizer's ids are drawn."""
    released = tmp_path / "released"
    synthesize(seeing_cfg, released)
    copy_tokenizer(words, released)
    import_checkpoint(released, tmp_path / "imported", experts="packed")
    export_checkpoint(tmp_path / "imported", tmp_path / "exported")
    files = {path.name for path in words.iterdir()}
    for folder in ("imported", "exported"):
        assert all((tmp_path / folder / name).read_bytes() == (words / name).read_bytes() for name in files)
        assert "tokenizer   tiktoken, 2,560 ids, " in inspect(tmp_path / folder)
    assert "ended by <|end_of_msg|> (2306)" in inspect(released)
    image = {"type": "image", "image": picture(tmp_path / "a.png", 8, 8)}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]
    replies = [take(Chat(tmp_path / name).reply(messages, max_tokens=5, seed=1)) for name in ("released", "imported", "exported")]
    assert replies[0] == replies[1] == replies[2] and len(replies[0][0]) > 1


@pytest.mark.parametrize("kind", ["tiktoken", "json", "bytes"])
def test_a_run_has_the_tokenizer_beside_its_checkpoints(seeing_cfg, words, library_words, tmp_path, says, kind):
    """Without one its tokens are bytes, however many the model could have; its model's end tokens count."""
    source = {"tiktoken": words, "json": library_words, "bytes": None}[kind]
    cfg = dataclasses.replace(seeing_cfg, vision=None, eos_token_id=(10, 2599))
    meta = {"kind": "run", "model": cfg.to_hf(), "data": {"tokenizer": source and "/gone/since"}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, {"x": np.zeros(1)}, meta, wait=True)
    if source:
        copy_tokenizer(source, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.kind == kind
    ids = tokenizer.encode("Käse 🙂").tolist()
    for path in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "3"):
        asked = says([*ids, 10])
        pieces, ended = take(generate_text(path, "漢字"))
        assert ("".join(pieces), ended) == ("Käse 🙂", tokenizer.describe(10))
        assert asked[0]["prompt"] == tokenizer.encode("漢字").tolist() and asked[0]["ids"] == tokenizer.vocab_size
