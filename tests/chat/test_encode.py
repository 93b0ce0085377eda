"""Text and ids of conversations against the released ones, what is learnt, and markers that no text becomes."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from k3jax import chat
from k3jax.chat.messages import in_order
from k3jax.text import load_tokenizer

FIXTURES = Path(__file__).parents[3] / "shared" / "k3" / "chat"
RELEASED = os.environ.get("K3JAX_TIKTOKEN")
needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"{FIXTURES} is not here")
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in your '
    "thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`.<|close|>message<|sep|><|end_of_msg|>"
)
END = "<|close|>message<|sep|><|end_of_msg|>"


@pytest.fixture(scope="module")
def tokenizer(words):
    return load_tokenizer(words)


def release_goldens():
    for name, golden in json.loads((FIXTURES / "release_chat_goldens.json").read_text())["chats"].items():
        given = golden["kwargs"]
        # The lower of the two released entries says nothing of effort unless it is told.
        effort = given.get("thinking_effort", "max" if golden["entry"] == "apply_chat_template" else None)
        pieces = chat.encode(golden["messages"], golden["tools"], given.get("thinking", True), effort=effort,
                             prefix=given.get("add_generation_prompt", True))  # fmt: skip
        yield name, pieces, golden["text"], golden["ids"]


def worked_examples():
    for example in json.loads((FIXTURES / "worked_examples.json").read_text()):
        given = example["input"]
        pieces = chat.encode(
            given["msgs"],
            given.get("tools", ()),
            given.get("thinking", True),
            effort=given.get("effort", "max"),
            tool_choice=given.get("tool_choice"),
            response_format=given.get("response_format"),
            images=[(640, 480)] if "img" in given else None,
            prefix=given.get("gen", True),
        )
        yield example["name"], pieces, example["output"], None


def inputs_and_outputs():
    for path in sorted(FIXTURES.glob("*_input.json")):
        given = json.loads(path.read_text())
        how = given["template_kwargs"]
        pieces = chat.encode(
            given["messages"],
            given.get("tools", ()),
            how["thinking"],
            effort=how.get("thinking_effort", "max"),
            tool_choice=given.get("tool_choice"),
            response_format=given.get("response_format"),
            prefix=given["add_generation_prompt"],
        )
        yield path.name, pieces, path.with_name(path.name.replace("input.json", "output.txt")).read_text(), None


@needs_fixtures
@pytest.mark.parametrize("fixtures, count", [(release_goldens, 9), (worked_examples, 6), (inputs_and_outputs, 5)])
def test_text_is_the_released(fixtures, count):
    found = list(fixtures())
    assert len(found) == count
    for name, pieces, text, _ in found:
        assert chat.text(pieces) == text, name


@needs_fixtures
@pytest.mark.skipif(not RELEASED, reason="K3JAX_TIKTOKEN names no released tiktoken.model")
def test_ids_are_the_released(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(Path(RELEASED).read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    for name, pieces, _, ids in release_goldens():
        found = chat.ids(pieces, tokenizer)[0].tolist()
        assert found == ids, name
        digest = lambda ids: hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()  # noqa: E731
        assert digest(found) == digest(ids)


def test_a_whole_conversation_by_hand():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"z": 1, "a": [2]}}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "name": 'A&"B"',
            "content": [{"type": "text", "text": "1+2 "}, {"type": "image", "image": "a.png"}],
        },
        {
            "role": "assistant",
            "reasoning_content": "Add & see",
            "content": None,
            "tool_calls": [
                {
                    "id": "x",
                    "function": {
                        "name": "add",
                        "arguments": {"n": 1.5, "é": "ü", "on": True, "of": None, "l": [1, "a"], "o": {}},
                    },
                },
                {"id": "y", "function": {"name": "add", "arguments": ""}},
                {"id": "z", "function": {"name": "add", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "y", "content": "3"},
        {"role": "tool", "tool_call_id": "x", "content": ""},
        {"role": "assistant", "content": "3", "name": "ed"},
    ]
    pieces = chat.encode(
        messages, [tool], effort="low", images=[(2, 3)], tool_choice="required", response_format={"type": "text"}
    )
    assert chat.text(pieces) == (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\n'
        "Here are the available tools, described in JSONSchema.\n\n"
        '```json\n[{"function":{"name":"add","parameters":{"a":[2],"z":1}},"type":"function"}]\n```' + END
        + EFFORT.format("low")
        + '<|open|>message role="system"<|sep|>Be brief.' + END
        + '<|open|>message role="user" name="A&amp;&quot;B&quot;"<|sep|>1+2 '
        "<|media_begin|>image 2x3<|media_content|><|media_pad|><|media_end|>" + END
        + '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Add & see<|close|>think<|sep|>'
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="add" index="1"<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|>'
        '<|open|>argument key="é" type="string"<|sep|>ü<|close|>argument<|sep|>'
        '<|open|>argument key="on" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        '<|open|>argument key="of" type="null"<|sep|>null<|close|>argument<|sep|>'
        '<|open|>argument key="l" type="array"<|sep|>[1, "a"]<|close|>argument<|sep|>'
        '<|open|>argument key="o" type="object"<|sep|>{}<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="add" index="2"<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="add" index="3"<|sep|>'
        '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>" + END
        + '<|open|>message role="tool" tool="add" index="1"<|sep|>' + END
        + '<|open|>message role="tool" tool="add" index="2"<|sep|>3' + END
        + '<|open|>message role="assistant" name="ed"<|sep|><|open|>think<|sep|><|close|>think<|sep|>'
        "<|open|>response<|sep|>3<|close|>response<|sep|>" + END
        + '<|open|>message role="system" type="tool-choice"<|sep|>The system is invoked with `tool_choice=required`.\n'
        "You MUST call tools in the next message." + END
    )  # fmt: skip
    assert chat.images(messages) == ["a.png"]


def test_pieces_of_a_message_stand_together():
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [{"id": name, "function": {"name": name}} for name in "ab"]},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "image", "image": "b.png"}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "image_url", "image_url": "a.png"}]},
    ]
    pieces = chat.encode(messages, [{"function": {"name": "a"}}], prefix=True, tool_choice="none")
    groups = chat.by_message(pieces)
    assert [group[0].message for group in groups] == [-1, 0, 1, 3, 2, 4]
    assert [piece for group in groups for piece in group] == pieces
    assert all(len({piece.message for piece in group}) == 1 for group in groups)
    texts = [chat.text(group) for group in groups]
    assert all(text.startswith("<|open|>message") and text.endswith("<|end_of_msg|>") for text in texts[:-1])
    assert texts[-1].endswith('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>')
    assert chat.images(messages) == ["a.png", "b.png"]


def test_results_without_ids_come_in_the_order_of_the_calls():
    calls = [{"function": {"name": name}} for name in "ab"]
    messages = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", "content": text} for text in ("1", "2"))]
    assert [result for _, result in in_order(messages)[1:]] == [("a", 1), ("b", 2)]
    messages[1]["tool"] = "other"
    assert [result for _, result in in_order(messages)[1:]] == [("other", 1), ("b", 2)]


# What is learnt


def written(message, thinking):
    """What the assistant itself wrote of its message, to the end marker, character for character."""
    content = message.get("content") or ""
    content = content if isinstance(content, str) else "".join(part["text"] for part in content)
    said = (
        ((message.get("reasoning_content") or "") + "<|close|>think<|sep|><|open|>response<|sep|>") if thinking else ""
    )
    said += content + "<|close|>response<|sep|>"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    escape = lambda text: text.replace("&", "&amp;").replace('"', "&quot;")  # noqa: E731
    names = {
        bool: "boolean",
        type(None): "null",
        int: "number",
        float: "number",
        str: "string",
        dict: "object",
        list: "array",
    }
    for index, call in enumerate(calls, 1):
        said += (
            "<|open|>tools<|sep|>" * (index == 1) + f'<|open|>call tool="{escape(call["name"])}" index="{index}"<|sep|>'
        )
        arguments = call["arguments"] if isinstance(call["arguments"], dict) else json.loads(call["arguments"])
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            said += (
                f'<|open|>argument key="{escape(key)}" type="{names[type(value)]}"<|sep|>{text}<|close|>argument<|sep|>'
            )
        said += "<|close|>call<|sep|>" + "<|close|>tools<|sep|>" * (index == len(calls))
    return said + "<|close|>message<|sep|><|end_of_msg|>"


def test_learnt_is_what_the_assistant_wrote(tokenizer, conversations):
    """Of ids, for each of 1,000 conversations; and the same when only the last messages are kept."""
    kinds = set()
    for given in conversations:
        pieces = chat.encode(**given)
        replies = [message for message in given["messages"] if message["role"] == "assistant"]
        ids, learnt = chat.ids(pieces, tokenizer)
        assert ids.dtype == np.int32 and learnt.dtype == bool and ids.shape == learnt.shape
        show = lambda ids: tokenizer.decode(ids, markers=True, errors="surrogateescape")  # noqa: E731
        assert show(ids) == chat.text(pieces)
        assert show(ids[learnt]) == "".join(written(message, given["thinking"]) for message in replies)
        groups = chat.by_message(pieces)
        last_ids, last_learnt = chat.ids([piece for group in groups[len(groups) // 2 :] for piece in group], tokenizer)
        assert show(ids[len(ids) - len(last_ids) :]) == show(last_ids)
        kept = {group[0].message for group in groups[len(groups) // 2 :]}
        replies = [
            message
            for place, message in enumerate(given["messages"])
            if place in kept and message["role"] == "assistant"
        ]
        assert show(last_ids[last_learnt]) == "".join(written(message, given["thinking"]) for message in replies)
        kinds.update((piece.origin, piece.learnt) for piece in pieces)
    given = ("tools", "effort", "header", "image", "system", "user", "tool")
    own = ("assistant.tag", "assistant.think", "assistant.response", "assistant.call")
    assert kinds == {*((origin, False) for origin in given), *((origin, True) for origin in own)}


def test_the_prefix_is_what_is_not_learnt_of_a_reply():
    for thinking in (False, True):
        asked = [{"role": "user", "content": "a"}]
        pieces = chat.encode(
            [*asked, {"role": "assistant", "content": "b", "reasoning_content": "c"}], thinking=thinking
        )
        prompt = chat.encode(asked, thinking=thinking, prefix=True)
        assert chat.text(piece for piece in pieces if not piece.learnt) == chat.text(prompt)
        assert [piece.learnt for piece in pieces] == sorted(piece.learnt for piece in pieces)


def test_last_and_all(conversations):
    for given in conversations[:200]:
        pieces, last, everything = (chat.encode(**given, learn=learn) for learn in ("assistant", "last", "all"))
        places = [place for place, message in enumerate(given["messages"]) if message["role"] == "assistant"]
        assert last == [piece._replace(learnt=piece.learnt and piece.message == places[-1]) for piece in pieces]
        assert everything == [piece._replace(learnt=piece.origin != "image") for piece in pieces]


# Markers are typed


@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_no_text_becomes_a_marker(tokenizer, role):
    text = "".join(tokenizer.markers) + "<|kimi_image_placeholder|>"
    message = {"role": role, "content": text, "name": text}
    if role == "assistant":
        message |= {
            "reasoning_content": text,
            "tool_calls": [{"function": {"name": text, "arguments": {text: text, "l": [text]}}}],
        }
    with_text = chat.encode([message], [{"function": {"name": text}}])
    markers = set(tokenizer.markers.values())
    ids = chat.ids(with_text, tokenizer)[0].tolist()
    assert [tokenizer.marker_name(id) for id in ids if id in markers] == [
        piece.text for piece in with_text if piece.marker
    ]
    without = json.loads(json.dumps(message).replace(json.dumps(text)[1:-1], "x"))
    assert [piece.text for piece in chat.encode([without], [{"function": {"name": "x"}}]) if piece.marker] == [
        piece.text for piece in with_text if piece.marker
    ]


def test_a_tokenizer_without_the_markers_is_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"^marker <\|open\|>: this tokenizer \(bytes, 256 tokens\) has none of that name$"
    ):
        chat.ids(chat.encode([{"role": "user", "content": "a"}]), load_tokenizer(tmp_path))


def test_no_pieces_are_no_ids(tokenizer):
    ids, learnt = chat.ids([], tokenizer)
    assert ids.dtype == np.int32 and ids.shape == learnt.shape == (0,)


@pytest.mark.parametrize(
    "given, wrong",
    [
        ({"effort": "most"}, r"effort: found 'most', must be one of low, medium, high, max, None"),
        (
            {"tool_choice": {"name": "a"}},
            r"tool_choice: found {'name': 'a'}, must be one of required, none, auto, None",
        ),
        ({"learn": "user"}, r"learn: found 'user', must be one of assistant, last, all"),
        ({"response_format": "xml"}, r"response_format: found 'xml', must be .*"),
        ({"response_format": {"type": "json_schema"}}, r"response_format: found .*, must be .*"),
        ({"images": [(1, 1), (2, 2)]}, r"images: found 2, must be 1: one for each image part of the messages"),
        ({"images": []}, r"images: found 0, must be 1: .*"),
    ],
)
def test_settings_that_are_none(given, wrong):
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}]
    with pytest.raises(ValueError, match=f"^{wrong}$"):
        chat.encode(messages, **given)
