"""The parser inverts the encoder at any split, and takes anything."""

import json
import random
import re

import pytest

from k3jax import chat
from k3jax.text import load_tokenizer
from k3jax.text.ranks import write_ranks

MARKERS = (
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
TEXTS = (
    *("message", ' role="assistant"', ' role="user"', 'message role="assistant"', "think", "response", "tools", "call"),
    *("argument", "json", 'argument key="k" type="string"', 'argument key="n" type="number"', ' tool="f" index="1"'),
    *(' key="k"', ' type="number"', ' type="string"', ' type="object"', ' content="x" tool_calls="y"'),
    *("4", '{"a": 1}', "[" * 2000, '"', "\\", "é\n", " ", ""),
)


def parse(events, begins=None):
    """(messages, faults, all deltas) of (text, marker) events."""
    parser = chat.Parser(begins)
    deltas = [delta for text, marker in events for delta in parser.push(text, marker)]
    deltas += parser.finish()
    return parser.messages, parser.faults, deltas


def joined(deltas):
    """Deltas of one kind that follow each other as one."""
    out = []
    for delta in deltas:
        if out and out[-1][0] == delta.kind and out[-1][2] == delta.call and delta.kind not in ("message", "call"):
            out[-1] = (delta.kind, out[-1][1] + delta.text, delta.call)
        else:
            out.append(tuple(delta))
    return out


def replay(deltas):
    """Messages as one who sees only the deltas has them."""
    messages = []
    for kind, text, call in deltas:
        if kind == "message":
            messages.append({"role": text, "content": ""})
        elif kind == "call":
            messages[-1].setdefault("tool_calls", []).append({"function": {"name": text, "arguments": ""}})
            assert call == len(messages[-1]["tool_calls"]) - 1
        elif kind == "arguments":
            messages[-1]["tool_calls"][call]["function"]["arguments"] += text
        else:
            messages[-1][kind] = messages[-1].get(kind, "") + text
    return messages


def check_deltas(messages, deltas):
    replayed = replay(deltas)
    assert len(replayed) == len(messages)
    for shown, message in zip(replayed, messages, strict=True):
        for call, parsed in zip(shown.get("tool_calls", ()), message.get("tool_calls", ()), strict=True):
            arguments = parsed["function"]["arguments"]
            text = call["function"]["arguments"]
            assert text == arguments if isinstance(arguments, str) else json.loads(text) == arguments
            call["function"]["arguments"] = arguments
        content = message["content"]
        content = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        attributes = {key: message[key] for key in ("name", "tool", "type") if key in message}
        assert shown | attributes == message | {"content": content}


def events_of(pieces):
    return [(piece.text, piece.marker) for piece in pieces]


def count_images(messages):
    parts = (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])
    return sum(part["type"] != "text" for part in parts)


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory):
    """A tokenizer whose every token is a byte or a marker."""
    folder = tmp_path_factory.mktemp("bytes")
    write_ranks(folder, [bytes([byte]) for byte in range(256)])
    return load_tokenizer(folder)


def test_parsing_inverts_encoding(words, conversations, as_parsed):
    """Through ids, for every message of the assistant in 1,000 conversations; the other messages come back, too."""
    tokenizer = load_tokenizer(words)
    for given in conversations:
        pieces = [piece._replace(text=piece.text.replace("\udcff", "?")) for piece in chat.encode(**given)]
        messages = json.loads(json.dumps(given["messages"], ensure_ascii=False).replace("\udcff", "?"))
        parser = chat.Parser(tokenizer=tokenizer)
        deltas = [delta for id in chat.ids(pieces, tokenizer)[0].tolist() for delta in parser.push_id(id)]
        deltas += parser.finish()
        parsed = parser.messages
        assert parser.faults == []
        check_deltas(parsed, deltas)
        replies = [message for message in messages if message["role"] == "assistant"]
        assert [message for message in parsed if message["role"] == "assistant"] == [
            as_parsed(reply, given["thinking"]) for reply in replies
        ]
        roles = {"user": "user", "tool": "tool"}
        for role in roles:
            assert sum(message["role"] == role for message in parsed) == sum(
                message["role"] == role for message in messages
            )
        assert count_images(parsed) == count_images(messages)


def test_a_reply_behind_its_prefix(conversations, as_parsed):
    """What is learnt of the last message, read behind what the prefix gives, with its end marker or without."""
    for given in conversations:
        pieces = chat.encode(**given, learn="last")
        reply = next(message for message in reversed(given["messages"]) if message["role"] == "assistant")
        expected = as_parsed({key: value for key, value in reply.items() if key != "name"}, given["thinking"])
        events = events_of(piece for piece in pieces if piece.learnt)
        for events in (events, events[:-1]):
            messages, faults, deltas = parse(events, "think" if given["thinking"] else "response")
            assert (messages, faults) == ([expected], [])
            check_deltas(messages, [chat.Delta("message", "assistant"), *deltas])


def splits(pieces):
    """Every way to cut the stream in two inside a text, and all of it character by character."""
    events = events_of(pieces)
    for i, (text, marker) in enumerate(events):
        for cut in range(1, 0 if marker else len(text)):
            yield [*events[:i], (text[:cut], False), (text[cut:], False), *events[i + 1 :]]
    yield [(part, marker) for text, marker in events for part in ([text] if marker else text)]


def pieces_of(text):
    """Pieces of a stream written with the names of its markers."""
    parts = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    return [chat.Piece(part, part in MARKERS, False, "", 0) for part in parts if part]


def test_every_split_is_the_same(conversations, shared_chats):
    chats = [chat.encode(**given) for given in sorted(conversations, key=lambda given: len(str(given)))[300:310]]
    for pieces in [*chats, *map(pieces_of, shared_chats)]:
        messages, faults, deltas = parse(events_of(pieces))
        expected = messages, faults, joined(deltas)
        check_deltas(messages, deltas)
        for events in splits(pieces):
            messages, faults, deltas = parse(events)
            assert (messages, faults, joined(deltas)) == expected


def test_characters_cut_into_tokens(byte_tokens, conversations):
    """Tokens that are single bytes give the same as whole texts, and bytes that are no UTF-8 become U+FFFD."""
    for given in conversations[:100]:
        pieces = chat.encode(**given)
        expected, faults, deltas = parse([(piece.text.replace("\udcff", "\ufffd"), piece.marker) for piece in pieces])
        parser = chat.Parser(tokenizer=byte_tokens)
        found = [delta for id in chat.ids(pieces, byte_tokens)[0].tolist() for delta in parser.push_id(id)]
        found += parser.finish()
        assert (parser.messages, parser.faults, joined(found)) == (expected, faults, joined(deltas))


def test_every_cut_is_a_beginning(conversations, shared_chats):
    """A stream that ends anywhere gives the messages of the whole up to there."""
    chats = [chat.encode(**given) for given in sorted(conversations, key=lambda given: len(str(given)))[200:206]]
    for pieces in [*chats, *map(pieces_of, shared_chats[6:8])]:
        events = [(part, marker) for text, marker in events_of(pieces) for part in ([text] if marker else text)]
        whole = parse(events)[0]
        for end in range(len(events)):
            messages, faults, deltas = parse(events[:end])
            check_deltas(messages, deltas)
            assert messages[:-1] == whole[: max(0, len(messages) - 1)]
            if (
                messages
                and isinstance(messages[-1]["content"], str)
                and isinstance(whole[len(messages) - 1]["content"], str)
            ):
                assert whole[len(messages) - 1]["content"].startswith(messages[-1]["content"])
            over = (
                [("<|end_of_msg|>", True)],
                [("<|close|>", True), *((letter, False) for letter in "message"), ("<|sep|>", True)],
            )
            assert bool(faults) != (end == 0 or any(events[:end][-len(last) :] == last for last in over))


def test_any_tokens_at_all():
    """10,000 random streams: no exception, the same however their texts are split, and deltas that tell the whole."""
    rng = random.Random(2)
    kinds = set()
    for n in range(10_000):
        markers = MARKERS if n % 2 else MARKERS[:4]
        events = [
            (rng.choice(markers), True) if rng.random() < 0.5 else (rng.choice(TEXTS), False)
            for _ in range(rng.randint(0, 60))
        ]
        begins = rng.choice((None, "think", "response"))
        messages, faults, deltas = parse(events, begins)
        split = [
            (part, marker)
            for text, marker in events
            for part in ((text,) if marker else (text[:1], text[1:3], text[3:]))
        ]
        again = parse(split, begins)
        assert (messages, faults, joined(deltas)) == (*again[:2], joined(again[2]))
        check_deltas(messages, ([chat.Delta("message", "assistant")] if begins else []) + deltas)
        assert all(
            isinstance(message["content"], (str, list)) and isinstance(message["role"], str) for message in messages
        )
        assert not any("\n" in fault for fault in faults)
        kinds.update(delta.kind for delta in deltas)
    assert kinds == {"message", "reasoning_content", "content", "call", "arguments"}


# What is not in the right form, and what becomes of it


def reply(text, begins="response"):
    return parse(events_of(pieces_of(text)), begins)


END = "<|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize(
    "text, message, faults",
    [
        ("Hi<|close|>response<|sep|>" + END, {"content": "Hi"}, []),
        ("Hi", {"content": "Hi"}, ["it is cut off in response"]),
        ("Hi<|close|>respo", {"content": "Hi"}, ["a tag that does not end: 'respo'", "it is cut off in response"]),
        ("Hi<|end_of_msg|>", {"content": "Hi"}, ["it is cut off in response"]),
        ("Hi<|close|>response<|sep|>", {"content": "Hi"}, ["its end is missing"]),
        ("Hi" + END, {"content": "Hi"}, ["response does not end before the message"]),
        ("a<|open|>b<|sep|>c<|close|>b<|sep|>d<|close|>response<|sep|>" + END, {"content": "acd"},
         ["tag b where none can be", "the end of 'b', which is not open"]),
        ("a<|sep|>b<|close|>response<|sep|>" + END, {"content": "ab"}, ["marker <|sep|> where none can be"]),
        ("a<|media_pad|><|reserved_token_7|>b<|close|>response<|sep|>" + END, {"content": "a<|reserved_token_7|>b"},
         ["marker <|media_pad|> where none can be"]),
        ("a<|open|><|open|>think<|sep|>b<|close|>think<|sep|>" + END, {"content": "a", "reasoning_content": "b"},
         ["a tag that does not end: ''", "response does not end before think", "think after response"]),
        ("a<|open|>=<|sep|>b<|close|>response<|sep|>" + END, {"content": "ab"}, ["a tag that is none: '='"]),
        ("a<|close|>response<|sep|>b" + END, {"content": "a"}, ["text outside of every channel"]),
    ],
)  # fmt: skip
def test_replies_out_of_form(text, message, faults):
    messages, found, _ = reply(text)
    assert messages == [{"role": "assistant", **message}]
    assert found == [f"message 1: {fault}" for fault in faults]


def argument(kind, text):
    return f'<|open|>argument key="a" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'


def raw(text):
    return f'<|open|>json type="object"<|sep|>{text}<|close|>json<|sep|>'


CALL = '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'


@pytest.mark.parametrize(
    "inside, arguments, faults",
    [
        (argument("number", "4"), {"a": 4}, []),
        (argument("number", "true"), {"a": "true"}, ["argument 'a' is no number: 'true'"]),
        (argument("boolean", "1"), {"a": "1"}, ["argument 'a' is no boolean: '1'"]),
        (argument("object", '{"b'), {"a": '{"b'}, ["argument 'a' is no object: '{\"b'"]),
        (argument("null", ""), {"a": ""}, ["argument 'a' is no null: ''"]),
        ('<|open|>argument key="a"<|sep|>4<|close|>argument<|sep|>', {"a": "4"},
         ["an argument has not both its key and its type: {'key': 'a'}"]),
        (raw('{"a": 4}'), {"a": 4}, []),
        (raw("[4]"), "[4]", ["arguments that are no JSON object: '[4]'"]),
        (raw("{}") + '<|open|>argument key="a" type="null"<|sep|>', {}, ["tag argument where none can be"]),
        ("", {}, []),
    ],
)  # fmt: skip
def test_arguments_are_typed(inside, arguments, faults):
    messages, found, deltas = reply(f"{CALL}{inside}<|close|>call<|sep|><|close|>tools<|sep|>" + END)
    assert messages[0]["tool_calls"] == [{"function": {"name": "f", "arguments": arguments}}]
    assert found == [f"message 1: {fault}" for fault in faults]
    text = "".join(delta.text for delta in deltas if delta.kind == "arguments")
    assert (text if isinstance(arguments, str) else json.loads(text)) == arguments


def test_deltas_come_as_soon_as_they_can():
    parser = chat.Parser("think")
    stream = (
        f"So<|close|>think<|sep|><|open|>response<|sep|>H{CALL}"
        '<|open|>argument key="s" type="string"<|sep|>"<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
    )
    events = events_of(pieces_of(stream))
    seen = [(delta.kind, delta.text) for text, marker in events for delta in parser.push(text, marker)]
    arguments = ['{"s": ', '"', '\\"', '"', ', "n": ', "1", "}"]
    assert seen == [
        ("reasoning_content", "So"),
        ("content", "H"),
        ("call", "f"),
        *(("arguments", text) for text in arguments),
    ]


def test_begins_is_a_channel():
    with pytest.raises(ValueError, match="^begins: found 'tools', must be think, response or None$"):
        chat.Parser("tools")
