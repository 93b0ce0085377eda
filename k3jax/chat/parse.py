"""The chat format (XTML) read back, as it comes: any split of it, cut off anywhere, and anything else, too."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from k3jax import strict_json
from k3jax.chat.encode import CLOSE, END, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD, OPEN, SEP
from k3jax.chat.messages import Message, parts
from k3jax.text.base import Tokenizer

_ATTRIBUTE = re.compile(r' ([^\s="]+)="([^"]*)"')
_HEADER = re.compile(r'([^\s="]+)((?: [^\s="]+="[^"]*")*)')
_CHANNELS = ("think", "response", "tools")  # of an assistant's message, in order
_TEXTS = {"think": "reasoning_content", "response": "content"}
_TYPES = {"boolean": bool, "null": type(None), "number": (int, float), "object": dict, "array": list}


class Delta(NamedTuple):
    """What has just come.

    `kind` is "message" (text: its role), "reasoning_content" or "content" (text: the next of it), "call" (text: the
    tool's name) or "arguments" (text: the next of their JSON). `call`: which of the message's calls, from 0.
    """

    kind: str
    text: str
    call: int = 0


class Parser:
    """Reads messages from a stream of text and markers; `messages` has those that are over.

    No stream makes it fail. What does not follow the format is left out of the messages where it has no place in them,
    and said in `faults`, a line each; a reply in the right form leaves none.

    A message is {"role", "content"}; an assistant's has "reasoning_content" where it thought and "tool_calls" where it
    made some, each {"function": {"name", "arguments"}} with arguments as a typed object (or as text, where they are no
    JSON). Content with images is a list of parts.

    Args:
        begins: "think" or "response" where the stream goes on behind what `encode(..., prefix=True)` gave; None for
            whole messages.
        tokenizer: for `push_id`.

    Example:
        >>> parser = Parser("response")
        >>> parser.push("Hello"), parser.push("<|close|>", marker=True), parser.push("response")
        ([Delta(kind='content', text='Hello', call=0)], [], [])
        >>> parser.push("<|sep|>", marker=True), parser.finish(), parser.messages
        ([], [], [{'role': 'assistant', 'content': 'Hello'}])
    """

    def __init__(self, begins: str | None = None, tokenizer: Tokenizer | None = None):
        if begins not in (*_TEXTS, None):
            raise ValueError(f"begins: found {begins!r}, must be think, response or None")
        self.messages: list[Message] = []
        self.faults: list[str] = []
        self._tokenizer, self._stream = tokenizer, tokenizer and tokenizer.stream()
        self._out: list[Delta] = []
        self._tag: str | None = None  # the marker of a tag whose header is being read,
        self._header: list[str] = []  # and what came of it
        self._message: Message | None = None
        self._open: list[str] = []  # names of the tags that are open in an assistant's message
        self._seen: list[str] = []  # channels of it that were opened
        self._ended = False  # the message is closed but for its end marker
        self._text: list[str] = []  # of the channel, argument or content that is being read
        self._argument: dict[str, str] = {}  # its attributes
        self._form = ""  # how the call gives its arguments: "argument", "json" or not yet
        self._in_image = False  # text is part of an image's markers
        self._stray = False  # text without a place was said to be a fault since the last marker
        if begins:
            self._begin({"role": "assistant"})
            self._open_channel(begins)

    def push_id(self, id: int) -> list[Delta]:
        """Takes the next token of a stream; bytes that are no UTF-8 become U+FFFD."""
        name = self._tokenizer.marker_name(id)
        if name is None:
            return self.push(self._stream.push(id))
        return self.push(self._stream.finish()) + self.push(name, marker=True)

    def push(self, text: str, marker: bool = False) -> list[Delta]:
        """Takes the next text, or the next marker by its name. Returns what it adds to the messages."""
        self._out = []
        if marker:
            self._stray = False
            self._on_marker(text)
        elif text:
            self._on_text(text)
        return self._out

    def finish(self) -> list[Delta]:
        """Ends what is open: `messages` has all of them, the last of which may be cut off. Returns what that adds."""
        waiting = self.push(self._stream.finish()) if self._stream else []
        self._out = []
        self._drop_header()
        if self._message is not None:
            self._end()
        return waiting + self._out

    def _fault(self, what: str) -> None:
        self.faults.append(f"message {len(self.messages) + 1}: {what}")

    def _emit(self, kind: str, text: str) -> None:
        if text:
            self._out.append(Delta(kind, text, max(0, len(self._message.get("tool_calls", ())) - 1)))

    def _on_text(self, text: str) -> None:
        inside = self._open[-1] if self._open else None
        if self._tag is not None:
            self._header.append(text)
        elif inside in _TEXTS or self._is_content():
            if not self._in_image:
                self._text.append(text)
                self._emit(_TEXTS.get(inside, "content"), text)
        elif inside in ("argument", "json"):
            self._text.append(text)
            if inside == "json" or self._argument.get("type") == "string":
                self._emit("arguments", text if inside == "json" else _quoted(text)[1:-1])
        elif not self._stray:
            self._stray = True  # once between two markers, however the text between them is split
            self._fault("text outside of every channel")

    def _is_content(self) -> bool:
        """Whether text is the content of a message that has no channels."""
        return self._message is not None and self._message["role"] != "assistant" and not self._ended

    def _on_marker(self, name: str) -> None:
        if name == SEP and self._tag is not None:
            take, header = self._on_open if self._tag == OPEN else self._on_close, "".join(self._header)
            self._tag = None
            self._header.clear()
            take(header)
            return
        self._drop_header()
        if name in (OPEN, CLOSE):
            self._tag = name
        elif name == END and self._message is not None:
            self._end()
        elif name in (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END) and self._is_content():
            if name == MEDIA_PAD:
                self._keep_content()
                self._message["content"] = [*parts(self._message["content"]), {"type": "image"}]
            self._in_image = name == MEDIA_BEGIN
        else:
            self._fault(f"marker {name} where none can be")

    def _drop_header(self) -> None:
        if self._tag is not None:
            self._fault(f"a tag that does not end: {''.join(self._header)!r:.60}")
            self._tag = None
            self._header.clear()

    def _on_open(self, header: str) -> None:
        match = _HEADER.fullmatch(header)
        if not match:
            self._fault(f"a tag that is none: {header!r:.60}")
            return
        name = match[1]
        attributes = {
            key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(match[2])
        }
        if name == "message":
            if self._message is not None:
                self._end()
            if "role" not in attributes:
                self._fault("a message without role")
            self._begin({"role": "assistant", **attributes})
            return
        if self._message is None:
            self._fault(f"tag {name:.60} outside of a message")
            self._begin({"role": "assistant"})
        if (
            name not in (*_TEXTS, "tools", "call", "argument", "json")
            or self._message["role"] != "assistant"
            or self._ended
        ):
            self._fault(f"tag {name:.60} where none can be")
        elif name in ("argument", "json"):
            if self._open != ["tools", "call"] or self._form and (self._form, name) != ("argument", "argument"):
                self._fault(f"tag {name} where none can be")
            else:
                self._open_arguments(name, attributes)
        elif name == "call":
            self._close_to(1 if self._open[:1] == ["tools"] else 0, before="a call")
            if not self._open:
                self._fault("a call outside of tools")
                self._open_channel("tools")
            self._open_call(attributes)
        else:
            self._close_to(0, before=name)
            self._open_channel(name)

    def _on_close(self, name: str) -> None:
        if name == "message" and self._message is not None and not self._ended:
            self._close_to(0, before="the message")
            self._keep_content()
            self._ended = True
        elif name in self._open:
            self._close_to(self._open.index(name) + 1, before=name)
            self._close_last()
        else:
            self._fault(f"the end of {name!r:.60}, which is not open")

    def _close_to(self, depth: int, before: str) -> None:
        if len(self._open) > depth:
            self._fault(f"{self._open[-1]} does not end before {before}")
        while len(self._open) > depth:
            self._close_last()

    def _begin(self, attributes: dict[str, str]) -> None:
        kept = ("role", "name") if attributes["role"] == "assistant" else ("role", "name", "type", "tool")
        self._message = {key: attributes[key] for key in kept if key in attributes} | {"content": ""}
        self._seen, self._ended, self._in_image = [], False, False
        self._emit("message", self._message["role"])

    def _end(self) -> None:
        """The message is over: by its end marker, or because something else came or nothing more."""
        if not self._ended:
            self._fault(f"it is cut off in {self._open[-1]}" if self._open else "its end is missing")
            while self._open:
                self._close_last()
            self._keep_content()
        if self._message["role"] == "assistant" and "response" not in self._seen:
            self._fault("an assistant's message without response")
        self.messages.append(self._message)
        self._message = None

    def _open_channel(self, name: str) -> None:
        if self._seen and _CHANNELS.index(name) <= _CHANNELS.index(self._seen[-1]):
            self._fault(f"{name} after {self._seen[-1]}")
        self._seen.append(name)
        self._open.append(name)

    def _open_call(self, attributes: dict[str, str]) -> None:
        calls = self._message.setdefault("tool_calls", [])
        if not attributes.get("tool") or attributes.get("index") != str(len(calls) + 1):
            self._fault(f"call {len(calls) + 1} has not both its tool and its index")
        calls.append({"function": {"name": attributes.get("tool", ""), "arguments": {}}})
        self._form = ""
        self._open.append("call")
        self._out.append(Delta("call", attributes.get("tool", ""), len(calls) - 1))

    def _open_arguments(self, name: str, attributes: dict[str, str]) -> None:
        if name == "argument":
            if "key" not in attributes or attributes.get("type") not in ("string", *_TYPES):
                self._fault(f"an argument has not both its key and its type: {attributes!r:.60}")
            begins = ", " if self._form else "{"
            self._emit("arguments", f"{begins}{_quoted(attributes.get('key', ''))}: ")
            if attributes.get("type") == "string":
                self._emit("arguments", '"')
        self._form, self._argument = name, attributes
        self._open.append(name)

    def _close_last(self) -> None:
        name, text = self._open.pop(), "".join(self._text)
        self._text.clear()
        if name in _TEXTS and text:
            self._message[_TEXTS[name]] = self._message.get(_TEXTS[name], "") + text
        elif name == "argument":
            self._message["tool_calls"][-1]["function"]["arguments"][self._argument.get("key", "")] = self._typed(text)
        elif name == "json":
            value = _loads(text)
            if not isinstance(value, dict):
                self._fault(f"arguments that are no JSON object: {text!r:.60}")
            self._message["tool_calls"][-1]["function"]["arguments"] = value if isinstance(value, dict) else text
        elif name == "call" and self._form != "json":
            self._emit("arguments", "}" if self._form else "{}")

    def _typed(self, text: str):
        """The value of the argument that ends."""
        kind = self._argument.get("type")
        if kind == "string":
            self._emit("arguments", '"')
            return text
        value = _loads(text)
        if kind in _TYPES and isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean"):
            self._emit("arguments", text)
            return value
        if kind in _TYPES:
            self._fault(f"argument {self._argument.get('key', '')!r:.60} is no {kind}: {text!r:.60}")
        self._emit("arguments", _quoted(text))
        return text

    def _keep_content(self) -> None:
        text = "".join(self._text)
        self._text.clear()
        if text:
            content = self._message["content"]
            self._message["content"] = [*content, {"type": "text", "text": text}] if content else text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _loads(text: str):
    """Value of JSON text, or NotImplemented, which is of no type that JSON has."""
    try:
        return strict_json.loads(text)
    except ValueError:
        return NotImplemented
