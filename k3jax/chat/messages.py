"""What a conversation has to look like, and what its parts are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from k3jax import strict_json
from k3jax.paths import expand
from k3jax.text.base import to_bytes

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
IMAGES = ("image", "image_url")  # types of content parts


def check_messages(
    messages: Sequence[Message],
    tools: Sequence[dict] = (),
    where: str = "",
    *,
    training: bool = False,
    raw: bool = False,
) -> None:
    """Raises ValueError, in one line that begins with `where` ("file:line"), for what is no conversation.

    A message is a dictionary with "role" (system, developer, user, assistant or tool) and "content": text, or a list of
    {"type": "text", "text": ...} and {"type": "image_url", "image_url": ...} or {"type": "image", "image": ...}. An
    assistant's may have "reasoning_content" and "tool_calls", whose entries are
    {"id", "function": {"name", "arguments"}}; a tool's names its call by "tool_call_id", its tool by "tool", or comes
    in the order of the calls; a system's may have "tools" instead of content.

    Args:
        training: the conversation has to end with an assistant's message.
        raw: arguments may be text that is no JSON, as a model may have written them.

    Example:
        >>> check_messages([{"role": "robot", "content": "hi"}], where="chats.jsonl:7")
        Traceback (most recent call last):
        ValueError: chats.jsonl:7: message 1: role: found 'robot', must be system, developer, user, assistant or tool
    """
    try:
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise _Wrong(f"messages: found {_short(messages)}, must be a list of at least one")
        _check_tools("tools", tools or ())
        for number, message in enumerate(messages, 1):
            try:
                _check_message(message, raw)
            except _Wrong as error:
                raise _Wrong(f"message {number}: {error}") from None
        in_order(messages)
        if training and messages[-1]["role"] != "assistant":
            raise _Wrong(
                f"the conversation ends with a message of role {messages[-1]['role']}, must end with an assistant's"
            )
    except _Wrong as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def function(call: dict) -> dict:
    """Name and arguments of a call or of a tool, which may be written with or without "function" around them."""
    return call.get("function", call)


def arguments(call: dict) -> dict | str | None:
    """Arguments of a call: an object, the text where that is no JSON, or None where they are anything else."""
    found = function(call).get("arguments")
    if found is None or isinstance(found, str) and not found.strip():
        return {}
    if isinstance(found, str):
        try:
            found = strict_json.loads(found)
        except ValueError:
            return found
    return found if isinstance(found, dict) else None


def parts(content: str | list | None) -> list[dict]:
    """Content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def images(messages: Sequence[Message]) -> list:
    """What the image parts of `messages` name (paths, addresses), in the order in which `encode` writes them.

    >>> images([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}])
    ['a.png']
    """
    found = []
    for index, _ in in_order(messages):
        found += [image_name(part) for part in parts(messages[index].get("content")) if part["type"] in IMAGES]
    return found


def image_name(part: dict) -> Any:
    """What an image part names."""
    named = part.get(part["type"])
    return named["url"] if isinstance(named, dict) and "url" in named else named


def image_file(name: Any, folder: str) -> str:
    """Path of the file with a name that is relative to `folder`. Raises ValueError for an address, image data, and what is no name.

    >>> image_file("a.png", "pictures")
    'pictures/a.png'
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name or re.match(r"data:|\w+://", name):
        raise ValueError(f"found image {name!r:.60}, must be the name of a file here")
    return os.path.join(folder, expand(name))


def in_order(messages: Sequence[Message]) -> list[tuple[int, tuple[str, int] | None]]:
    """For every message of the prompt its place in `messages` and, of a tool's, (tool's name, number of the result).

    Tool messages in a row that all name calls of the assistant's message before them come in the order of the calls.
    Raises ValueError for a result that belongs to no tool.
    """
    order: list[tuple[int, tuple[str, int] | None]] = []
    calls: list[dict] = []
    number = 0  # results since the calls
    for is_tool, group in groupby(range(len(messages)), key=lambda place: messages[place]["role"] == "tool"):
        if not is_tool:
            for place in group:
                if messages[place]["role"] == "assistant":
                    calls, number = messages[place].get("tool_calls") or [], 0
                order.append((place, None))
            continue
        run = list(group)
        positions = {call["id"]: position for position, call in reversed(list(enumerate(calls))) if call.get("id")}
        matched = {place: positions.get(messages[place].get("tool_call_id")) for place in run}
        if None not in matched.values():
            run.sort(key=matched.get)
        for place in run:
            name = _tool_name(messages[place], calls, matched[place], number)
            if name is None:
                raise _Wrong(
                    f"message {place + 1}: found the result of no call, must name one (tool_call_id) or its tool (tool)"
                )
            number += 1
            order.append((place, (name, number)))
    return order


def _tool_name(message: Message, calls: Sequence[dict], position: int | None, number: int) -> str | None:
    named = message.get("tool") or message.get("name")
    if position is None and (named or number >= len(calls)):
        return named or None
    return function(calls[number if position is None else position])["name"]


class _Wrong(ValueError):
    """What is wrong, without where."""


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_tools(key: str, tools) -> None:
    if not isinstance(tools, (list, tuple)):
        raise _Wrong(f"{key}: found {_short(tools)}, must be a list")
    for number, tool in enumerate(tools, 1):
        named = function(tool) if isinstance(tool, dict) else None
        if not isinstance(named, dict) or not isinstance(named.get("name"), str) or not named["name"]:
            raise _Wrong(f'{key}: entry {number}: found {_short(tool)}, must be {{"function": {{"name": ...}}}}')
        _check_json(f"{key}: entry {number}", tool)


def _check_message(message, raw: bool) -> None:
    if not isinstance(message, dict):
        raise _Wrong(f"found {_short(message)}, must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _Wrong(f"role: found {_short(role)}, must be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    for key in ("name", "tool", "tool_call_id"):
        _check_text(key, message.get(key) or "")
    if message.get("tools") is not None:
        if role not in ("system", "developer"):
            raise _Wrong(f"tools: found with role {role}, must be in a message of role system")
        _check_tools("tools", message["tools"])
    may_be_empty = role == "assistant" or bool(message.get("tools"))
    _check_content(message.get("content"), may_be_empty, with_images=role != "assistant")
    for key in ("reasoning_content", "tool_calls"):
        if role != "assistant" and message.get(key):
            raise _Wrong(f"{key}: found with role {role}, must be in a message of role assistant")
    if role == "assistant":
        _check_text("reasoning_content", message.get("reasoning_content") or "")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise _Wrong(f"tool_calls: found {_short(calls)}, must be a list")
        for number, call in enumerate(calls, 1):
            _check_call(f"tool_calls: entry {number}", call, raw)


def _check_text(key: str, value) -> None:
    if not isinstance(value, str):
        raise _Wrong(f"{key}: found {_short(value)}, must be text")
    try:
        to_bytes(value)
    except ValueError as error:
        raise _Wrong(f"{key}: {error}") from None


def _check_content(content, may_be_empty: bool, with_images: bool) -> None:
    types = ("text", *IMAGES) if with_images else ("text",)
    if isinstance(content, str):
        return _check_text("content", content)
    if content is None and may_be_empty:
        return None
    if not isinstance(content, list):
        raise _Wrong(f"content: found {_short(content)}, must be text or a list of parts")
    for number, part in enumerate(content, 1):
        if not isinstance(part, dict) or part.get("type") not in types:
            raise _Wrong(
                f"content: part {number}: found {_short(part)}, must be an object of type {' or '.join(types)}"
            )
        if part["type"] == "text":
            _check_text(f"content: part {number}: text", part.get("text"))
        elif part.get(part["type"]) is None:
            raise _Wrong(f"content: part {number}: found {_short(part)}, must name an image ({part['type']})")
    return None


def _check_call(key: str, call, raw: bool) -> None:
    named = function(call) if isinstance(call, dict) else None
    if not isinstance(named, dict) or not isinstance(named.get("name"), str) or not named["name"]:
        raise _Wrong(f'{key}: found {_short(call)}, must be {{"function": {{"name": ..., "arguments": ...}}}}')
    _check_text(f"{key}: name", named["name"])
    if not isinstance(call.get("id") or "", str):
        raise _Wrong(f"{key}: id: found {_short(call['id'])}, must be text")
    found = arguments(call)
    if isinstance(found, str) and raw:
        return _check_text(f"{key}: arguments", found)
    key += f": arguments of {named['name']}"
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise _Wrong(f"{key}: found {_short(named['arguments'])}, must be a JSON object or its text")
    return _check_json(key, found)


def _check_json(key: str, value) -> None:
    try:
        _check_text(key, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, _Wrong):
            raise
        raise _Wrong(f"{key}: found {_short(value)}, must be JSON ({error})") from None
