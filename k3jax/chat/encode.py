"""Conversations as the released chat format (XTML) writes them, in pieces that know whether they are learnt.

    prompt    := [tool-declare] [thinking-effort] message* [tool-choice] [response-format] [prefix]
    message   := tag(message, role, ...) content end(message) <|end_of_msg|>
    assistant := tag(message, role="assistant") [think] response [tools] end(message) <|end_of_msg|>
    tag(name, key=value ...) := <|open|> name (' ' key '="' value '"')* <|sep|>
    end(name) := <|close|> name <|sep|>

Markers are typed: only a piece with `marker` becomes a special id, and no text can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from k3jax.chat.messages import IMAGES, Message, arguments, check_messages, function, in_order, parts
from k3jax.chat.messages import images as images_of
from k3jax.text.base import Tokenizer

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
EFFORTS = ("low", "medium", "high", "max")
LEARN = ("assistant", "last", "all")

_EFFORT = """\
`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), \
supported values include `low`, `medium`, `high`, and `max`.
Now the system is invoked with `thinking_effort={}`."""
_TOOLS = """\
# Tools
Here are the available tools, described in JSONSchema.

```json
{}
```"""
_MORE_TOOLS = """\
## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

```json
{}
```"""
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
    "auto": None,
    None: None,
}
_JSON_OBJECT = """\
The system is invoked with `response_format={}`.
Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."""
_JSON_SCHEMA = """
The JSON data must match the following schema:
```json
{}
```"""


class Piece(NamedTuple):
    """Text that is tokenised alone, or a marker.

    Attributes:
        origin: whose words they are: "header" for tags that are given, "assistant.tag" for those the assistant writes,
            "assistant.think", "assistant.response", "assistant.call", "system", "user", "tool", "image", or what the
            format itself says: "tools", "effort", "choice", "format".
        message: place in the messages, -1 for what stands before them and their number for what stands behind; pieces
            of one message stand together.
    """

    text: str
    marker: bool
    learnt: bool
    origin: str
    message: int


def encode(
    messages: Sequence[Message],
    tools: Sequence[dict] = (),
    thinking: bool = True,
    *,
    effort: str | None = "max",
    tool_choice: str | None = None,
    response_format: dict | None = None,
    images: Sequence[tuple[int, int]] | None = None,
    prefix: bool = False,
    learn: str = "assistant",
) -> list[Piece]:
    """Pieces of a conversation.

    Learnt is what the assistant has to write itself: all of its message behind what `prefix` gives, to the marker that
    ends it.

    Args:
        messages: as `check_messages` says; arguments that are no JSON are written as they are.
        thinking: with a think channel in every assistant's message, else in none.
        effort: "low", "medium", "high" or "max", said with `thinking`; None says nothing.
        tool_choice: "auto", "required" or "none".
        response_format: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}} or
            {"type": "text"}.
        images: (width, height) of every image part, as `images(messages)` orders them; without, an image is a bare
            <|media_pad|>.
        prefix: ends with the beginning of an assistant's message, for generation.
        learn: "assistant" (every message of the assistant), "last" (its last one) or "all" (everything but images).

    Raises:
        ValueError: in one line; what `check_messages` raises, or another number of images.

    Example:
        >>> text(encode([{"role": "user", "content": "Hi"}], thinking=False))
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
    """
    check_messages(messages, tools, raw=True)
    for key, value, allowed in (
        ("effort", effort, (*EFFORTS, None)),
        ("tool_choice", tool_choice, _CHOICES),
        ("learn", learn, LEARN),
    ):
        if not (value is None or isinstance(value, str)) or value not in allowed:
            raise ValueError(f"{key}: found {value!r}, must be one of {', '.join(map(str, allowed))}")
    count = len(images_of(messages))
    if images is not None and len(images) != count:
        raise ValueError(f"images: found {len(images)}, must be {count}: one for each image part of the messages")
    assistants = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    learnt = set(assistants[-1:] if learn == "last" else assistants)

    out = _Writer(iter(images) if images is not None else None, everything=learn == "all")
    if tools:
        out.internal("tool-declare", "tools", _TOOLS.format(_compact(tools)))
    if thinking and effort:
        out.internal("thinking-effort", "effort", _EFFORT.format(effort))
    for place, result in in_order(messages):
        out.message = place
        message = messages[place]
        if message["role"] == "assistant":
            _write_assistant(out, message, thinking, place in learnt)
        elif message.get("tools"):
            out.internal("tool-declare", "tools", _MORE_TOOLS.format(_compact(message["tools"])))
        else:
            role = "system" if message["role"] == "developer" else message["role"]
            out.tag("message", role=role, **({"tool": result[0], "index": result[1]} if result else _named(message)))
            out.content(message.get("content"), role)
            out.end_message()
    out.message = len(messages)
    if said := _CHOICES[tool_choice]:
        out.internal("tool-choice", "choice", said)
    if said := _format(response_format):
        out.internal("response-format", "format", said)
    if prefix:
        out.tag("message", role="assistant")
        out.tag("think" if thinking else "response")
    return out.pieces


def ids(pieces: Sequence[Piece], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(ids [T] int32, learnt [T] bool): the pieces' ids one after the other, each piece tokenised alone."""
    found = [[tokenizer.marker(piece.text)] if piece.marker else tokenizer.encode(piece.text) for piece in pieces]
    lengths = [len(each) for each in found]
    learnt = np.repeat(np.asarray([piece.learnt for piece in pieces], bool), lengths)
    return np.concatenate(found, dtype=np.int32) if found else np.empty(0, np.int32), learnt


def text(pieces: Sequence[Piece]) -> str:
    """What the pieces say, markers as their names."""
    return "".join(piece.text for piece in pieces)


def by_message(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces of every message together, in their order; the first and the last group may be of none."""
    return [list(group) for _, group in groupby(pieces, key=lambda piece: piece.message)]


class _Writer:
    """Pieces, as they are written."""

    def __init__(self, sizes: Iterator[tuple[int, int]] | None, everything: bool):
        self.pieces: list[Piece] = []
        self.message = -1
        self.written = self.learnt = False  # by the assistant; of that, learnt (with `everything` all is, but images)
        self._sizes, self._everything = sizes, everything

    def put(self, text: str, origin: str, marker: bool = False) -> None:
        if text:
            learnt = (self.learnt or self._everything) and origin != "image"
            self.pieces.append(Piece(text, marker, learnt, origin, self.message))

    def tag(self, name: str, /, **attributes) -> None:
        origin = self._tag_origin
        self.put(OPEN, origin, marker=True)
        self.put(name, origin)
        for key, value in attributes.items():
            value = str(value).replace("&", "&amp;").replace('"', "&quot;")
            for part in (f" {key}", '="', value, '"'):
                self.put(part, origin)
        self.put(SEP, origin, marker=True)

    def end(self, name: str) -> None:
        self.put(CLOSE, self._tag_origin, marker=True)
        self.put(name, self._tag_origin)
        self.put(SEP, self._tag_origin, marker=True)

    def end_message(self) -> None:
        self.end("message")
        self.put(END, self._tag_origin, marker=True)

    def internal(self, type_: str, origin: str, body: str) -> None:
        self.tag("message", role="system", type=type_)
        self.put(body.strip(), origin)
        self.end_message()

    def content(self, content: str | list | None, origin: str) -> None:
        for part in parts(content):
            if part["type"] not in IMAGES:
                self.put(part["text"], origin)
            elif self._sizes is None:
                self.put(MEDIA_PAD, "image", marker=True)
            else:
                width, height = next(self._sizes)
                self.put(MEDIA_BEGIN, "image", marker=True)
                self.put(f"image {width}x{height}", "image")
                for name in (MEDIA_CONTENT, MEDIA_PAD, MEDIA_END):
                    self.put(name, "image", marker=True)

    @property
    def _tag_origin(self) -> str:
        return "assistant.tag" if self.written else "header"


def _write_assistant(out: _Writer, message: Message, thinking: bool, learnt: bool) -> None:
    out.tag("message", role="assistant", **_named(message))
    out.tag("think" if thinking else "response")
    out.written, out.learnt = True, learnt
    if thinking:
        out.put(message.get("reasoning_content") or "", "assistant.think")
        out.end("think")
        out.tag("response")
    out.content(message.get("content"), "assistant.response")
    out.end("response")
    calls = message.get("tool_calls") or []
    if calls:
        out.tag("tools")
        for index, call in enumerate(calls, 1):
            out.tag("call", tool=function(call)["name"], index=index)
            found = arguments(call)
            if isinstance(found, str):
                out.tag("json", type="object")
                out.put(found, "assistant.call")
                out.end("json")
            else:
                for key, value in found.items():
                    out.tag("argument", key=key, type=_type(value))
                    out.put(
                        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), "assistant.call"
                    )
                    out.end("argument")
            out.end("call")
        out.end("tools")
    out.end_message()
    out.written = out.learnt = False


def _named(message: Message) -> dict[str, str]:
    return {"name": message["name"]} if message.get("name") else {}


def _type(value) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


def _format(response_format: dict | None) -> str | None:
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return _JSON_OBJECT.format(kind)
    schema = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict):
        raise ValueError(
            f'response_format: found {response_format!r:.60}, must be {{"type": "json_object"}}, '
            '{"type": "json_schema", "json_schema": {"schema": ...}} or {"type": "text"}'
        )
    return _JSON_OBJECT.format(kind) + _JSON_SCHEMA.format(_compact(schema.get("schema", schema)))


def _compact(value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
