"""What is learnt of documents, whole, cut and left out."""

import json
import random

import numpy as np
import pytest

from k3jax.data.encoding import Encoder, Encoding, open_tokenizer
from k3jax.data.sources import Document

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


def tag(name, **attributes):
    escaped = {key: str(value).replace("&", "&amp;").replace('"', "&quot;") for key, value in attributes.items()}
    return OPEN + name + "".join(f' {key}="{value}"' for key, value in escaped.items()) + SEP


def end(name):
    return CLOSE + name + SEP


def written(message, thinking):
    """What an assistant wrote behind the tags that were given to it."""
    text = message.get("reasoning_content", "") + end("think") + tag("response") if thinking else ""
    text += message["content"] + end("response")
    if calls := message.get("tool_calls"):
        text += tag("tools")
        for index, call in enumerate(calls, 1):
            text += tag("call", tool=call["function"]["name"], index=index)
            for key, value in json.loads(call["function"]["arguments"]).items():
                text += tag("argument", key=key, type="string" if isinstance(value, str) else "number") + str(value) + end("argument")
            text += end("call")
        text += end("tools")
    return text + end("message") + END


def chat(record):
    return Document("c.jsonl", 0, messages=record["messages"], tools=record.get("tools", ()))


def encoder(folder, seq_len, **settings):
    return Encoder(open_tokenizer(folder), Encoding(seq_len, **settings))


@pytest.mark.parametrize("thinking", [True, False])
def test_learnt_is_what_the_assistant_wrote_in_the_messages_that_fit(marked, conversation, thinking):
    draw, most = random.Random(thinking), 700
    encode, whole = encoder(marked, most - 1, thinking=thinking), encoder(marked, 10**6, thinking=thinking)
    decode, last = encode.tokenizer.decode, encode.tokenizer.marker(END)
    seen = {"whole": 0, "some": 0, "cut": 0}
    for _ in range(500):
        record = conversation(draw, most=draw.choice([60, 60, 900]))
        messages = record["messages"]
        texts = [written(message, thinking) if message["role"] == "assistant" else "" for message in messages]
        ((ids, learnt, size, _),) = whole(chat(record))
        assert decode(ids[learnt], markers=True) == "".join(texts) and size == len(decode(ids[learnt]).encode())

        *parts, rest = np.split(ids, np.flatnonzero(ids == last) + 1)
        head, parts = parts[: len(parts) - len(messages)], parts[len(parts) - len(messages) :]
        assert len(rest) == 0 and (bool(head) or not thinking)
        starts = [k for k, message in enumerate(messages) if message["role"] != "tool"]
        fitting = [k for k in starts if sum(map(len, head + parts[k:])) <= most]
        first = 0 if len(ids) <= most else min(fitting, default=len(messages) - 1)
        expected, text = np.concatenate(head + parts[first:])[:most], "".join(texts[first:])
        found = list(encode(chat(record)))
        if len(expected) == most and not fitting:
            seen["cut"] += 1
            assert not found or text.startswith(decode(found[0].ids[found[0].learnt], markers=True).rstrip("\ufffd"))
        else:
            seen["some" if first else "whole"] += 1
            assert decode(found[0].ids[found[0].learnt], markers=True) == text
        assert not found or np.array_equal(found[0].ids, expected)
    assert min(seen.values()) > 20, seen


def test_a_message_longer_than_a_row_is_learnt_from_its_beginning(marked):
    record = {"messages": [{"role": "user", "content": "u" * 50}, {"role": "assistant", "content": "a" * 400}]}
    encode = encoder(marked, 100, thinking=False)
    ((ids, learnt, size, _),) = encode(chat(record))
    assert len(ids) == 101 and encode.tokenizer.decode(ids[learnt]) == "a" * learnt.sum() and learnt.sum() > 50
    assert encode.tokenizer.decode(ids[~learnt], markers=True) == tag("message", role="assistant") + tag("response")
    assert list(encoder(marked, 100, thinking=False, long="skip")(chat(record))) == []


def test_a_conversation_without_a_learnt_token_is_counted(marked):
    tools = [{"function": {"name": "look", "description": "x" * 500}}]
    record = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "tools": tools}
    for long, reason in (("cut", "nothing learnt"), ("skip", "too long")):
        encode = encoder(marked, 300, long=long)
        assert list(encode(chat(record))) == [] and encode.skipped == {reason: 1}


def test_learn(marked):
    messages = [m for n in "12" for m in ({"role": "user", "content": "u" + n}, {"role": "assistant", "content": "a" + n})]
    for learn, text in (("assistant", "a1 a2"), ("last", "a2"), ("all", "u1 a1 u2 a2")):
        encode = encoder(marked, 1000, thinking=False, learn=learn)
        ((ids, learnt, *_),) = encode(chat({"messages": messages}))
        found = encode.tokenizer.decode(ids[learnt])
        assert [word for word in ("u1", "a1", "u2", "a2") if word in found] == text.split()


def test_texts_are_cut_so_that_every_token_is_a_target_once(marked):
    for folder, ending in ((None, []), (marked, [257])):
        encode = encoder(folder, 10)
        for length in (2, 10, 11, 12, 21, 22, 35):
            text = "".join(map(chr, range(65, 65 + length)))
            pieces = list(encode(Document("x", 0, text=text)))
            ids = encode.tokenizer.encode(text).tolist() + ending
            assert sum((piece.ids[1:].tolist() for piece in pieces), []) == ids[1:]
            assert all(piece.ids[0] == before.ids[-1] for before, piece in zip(pieces, pieces[1:]))
            assert all(piece.learnt.all() and len(piece.ids) <= 11 for piece in pieces)
            # Up to one of them, the bytes are those of the targets.
            assert abs(sum(piece.bytes for piece in pieces) - length) <= len(pieces)
    assert encode.skipped == {}
    encode = encoder(None, 10, long="skip")
    assert list(encode(Document("x", 0, text="a" * 12))) == [] and encode.skipped == {"too long": 1}
    assert list(encode(Document("x", 0, text="a"))) == [] and encode.skipped["too short"] == 1


@pytest.mark.parametrize(
    "messages, complaint",
    [
        ([{"role": "robot", "content": "x"}], "message 1: role: found 'robot'"),
        ([{"role": "user", "content": 3}], "message 1: content: found 3"),
        ([{"role": "user", "content": "x"}], "the conversation ends with a message of role user"),
    ],
)
def test_what_is_no_conversation_is_named(marked, tmp_path, messages, complaint):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n' + json.dumps({"messages": messages}))
    document = Document(str(tmp_path / "c.jsonl"), 14, messages=messages)
    with pytest.raises(ValueError) as error:
        list(encoder(marked, 100)(document))
    assert str(error.value).startswith(f"{tmp_path / 'c.jsonl'}:2: {complaint}")


def test_a_tokenizer_without_markers_is_named():
    with pytest.raises(ValueError, match=r"^marker <\|open\|>: this tokenizer \(bytes, 256 tokens\) has none"):
        list(encoder(None, 100)(chat({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]})))


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="no such folder; one with the files of a tokenizer"):
        open_tokenizer(tmp_path / "nowhere")
