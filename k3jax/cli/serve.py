"""`python -m k3jax generate`, `chat` and `evaluate`: what needs a model that has been trained."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from k3jax import runtime
from k3jax.cli.options import at_least, check
from k3jax.paths import check_kind, read_text
from k3jax.values import AnyText, PathText, Seed

Images = tyro.conf.UseAppendAction[tuple[PathText, ...]]


@dataclass(frozen=True, kw_only=True)
class _Model:
    """A model, and how it runs."""

    checkpoint: Positional[PathText]
    """Checkpoint of a run or an import, or folder of the released layout."""
    experts: Literal["packed", "dequantized"] = "packed"
    """How the routed experts are held in memory: 4-bit, or as ordinary numbers."""
    mxfp8_inputs: bool = True
    """Round expert inputs to MXFP8, as quantisation-aware training does."""


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """How tokens are drawn."""

    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this much probability."""
    seed: Seed = 0
    """Seed of the draws."""

    def check(self, max_tokens: int) -> None:
        from k3jax.serve.sampling import ranges

        drawn = ranges(self.temperature, self.top_k, self.top_p)
        check(
            *at_least(1, max_tokens=max_tokens),
            *((name.replace("_", "-"), *rest) for name, *rest in drawn),
        )

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "seed")}


@dataclass(frozen=True, kw_only=True)
class Generate(_Drawn, _Model):
    """Continue a prompt with a trained or released model. On stderr: the token that ended it, if one did."""

    prompt: AnyText
    """Text to continue. Each <image> in it stands for one of the images; without any they come first."""
    image: Images = ()
    """Image file; again for each further one."""
    max_tokens: int = 200
    """Most tokens to write."""

    def run(self) -> None:
        some = bool(self.prompt or self.image)
        check(("prompt", self.prompt, some, "at least one character, where there is no image"))
        self.check(self.max_tokens)
        for path in (self.checkpoint, *self.image):
            check_kind(path)
        runtime.setup()
        from k3jax.serve import generate

        options = {"experts": self.experts, "mxfp8_inputs": self.mxfp8_inputs, "images": self.image}
        pieces = generate.generate_text(self.checkpoint, self.prompt, self.max_tokens, **self.options, **options)
        ended = _shown(pieces, lambda piece: print(piece, end="", flush=True))
        print()
        if ended is not None:
            sys.stdout.flush()
            print(f"ended by {ended}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Chat(_Drawn, _Model):
    """Talk with a model in the terminal, or let it reply to a conversation in a file.

    Ctrl-C ends a reply, and at the prompt the conversation, as the end of the input does. Where the model calls a tool, its
    result is asked for.
    """

    messages: PathText | None = None
    """JSON file of a conversation to reply to: a list of messages, or an object with `messages` and `tools`."""
    tools: PathText | None = None
    """JSON file with a list of the tools that the model may call."""
    image: Images = ()
    """Image file that goes with the first message; again for each further one."""
    thinking: bool = True
    """Whether the model thinks before it answers."""
    effort: Literal["low", "medium", "high", "max"] = "max"
    """How much it is asked to think."""
    as_json: bool = False
    """Print the reply to `messages` as JSON."""
    max_tokens: int = 1000
    """Most tokens of a reply."""

    def run(self) -> None:
        self.check(self.max_tokens)
        alone = "left out without --messages" if self.messages is None else "left out beside --messages, which names its own"
        check(
            ("as-json", self.as_json, not self.as_json or self.messages is not None, alone),
            ("image", ",".join(self.image), not self.image or self.messages is None, alone),
        )
        for path in (self.checkpoint, *self.image):
            check_kind(path)
        messages, tools = _conversation(self.messages, self.tools)
        for image in self.image:
            _check_file(image, image)
        runtime.setup()
        from k3jax.serve import chat

        model = chat.Chat(self.checkpoint, self.experts, self.mxfp8_inputs)
        options = {"thinking": self.thinking, "effort": self.effort, "max_tokens": self.max_tokens, **self.options}
        if messages:
            show = None if self.as_json else _Screen()
            reply = _shown(model.reply(messages, tools, **options), show or (lambda delta: None))
            print(json.dumps(reply.message, ensure_ascii=False) if self.as_json else "", flush=True)
            _tell(reply)
            return
        self._talk(model, tools, options)

    def _talk(self, model, tools: list, options: dict) -> None:
        messages: list[dict] = []
        images = [{"type": "image", "image": path} for path in self.image]
        for text in _asked(messages):
            if messages and messages[-1].get("tool_calls"):
                names = [call["function"]["name"] for call in messages[-1]["tool_calls"]]
                messages += [{"role": "tool", "tool": name, "content": said} for name, said in zip(names, text, strict=True)]
            else:
                (said,) = text
                messages.append({"role": "user", "content": [*images, {"type": "text", "text": said}] if images else said})
                images = []
            try:
                reply = _shown(model.reply(messages, tools, **options), _Screen())
            except KeyboardInterrupt:
                print("\ninterrupted: the last message was not answered, and is forgotten", file=sys.stderr)
                while messages and messages[-1]["role"] != "assistant":
                    messages.pop()
                if messages and messages[-1].get("tool_calls"):
                    del messages[-1]["tool_calls"]  # nobody asks for their results again
                continue
            print(flush=True)
            _tell(reply)
            messages.append(reply.message)


def _asked(messages: list[dict]) -> Iterator[list[str]]:
    """What is typed: a message, or the results of the calls that the last of `messages` made; until Ctrl-C or the end."""
    terminal = sys.stdin.isatty()
    while True:
        calls = messages[-1].get("tool_calls") if messages else None
        prompts = [f"result of {call['function']['name']}> " for call in calls] if calls else ["> "]
        try:
            said = [input(prompt if terminal else "") for prompt in prompts]
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return
        if calls or said[0].strip():
            yield said


class _Screen:
    """Shows a reply as it comes: in a terminal reasoning is dim and calls are cyan, elsewhere a line begins with what it is."""

    _NAMES = {"reasoning_content": "thinking", "content": "answer", "call": "call", "arguments": "call"}
    _COLOURS = {"thinking": "\x1b[2m", "answer": "", "call": "\x1b[36m"}

    def __init__(self):
        self._color, self._at = sys.stdout.isatty(), ""

    def __call__(self, delta) -> None:
        from k3jax.text import printable

        name = self._NAMES.get(delta.kind)
        if name is None:
            return
        text = printable(delta.text)
        if name != self._at or delta.kind == "call":
            begin = "\n" if self._at else ""
            begin += "" if self._color else f"[{name}] "
            text = begin + text + (" " if delta.kind == "call" else "")
        self._at = name
        colour = self._COLOURS[name] if self._color else ""
        print(f"{colour}{text}\x1b[0m" if colour else text, end="", flush=True)


def _shown(pieces, show) -> Any:
    """What a generator returns, when all that it gives has been shown."""
    while True:
        try:
            show(next(pieces))
        except StopIteration as stop:
            return stop.value


def _tell(reply) -> None:
    """What is to be said of a reply beside its words."""
    if reply.ended is None and reply.faults:
        print("not ended: --max-tokens were written, or it went on behind its end", file=sys.stderr)
    for fault in reply.faults:
        print(f"not in the right form: {fault}", file=sys.stderr)


def _conversation(file: str | None, tools_file: str | None) -> tuple[list, list]:
    """(messages, tools) of the files, checked. Raises ValueError, one line that names the file."""
    from k3jax import chat

    messages, tools = [], []
    if file is not None:
        found = _read(file)
        messages = found
        if isinstance(found, dict):
            messages, tools = found.get("messages"), found.get("tools") or []
    if tools_file is not None:
        if tools:
            raise ValueError(f"--tools {tools_file}: must be left out, {file} has tools")
        tools = _read(tools_file)
    if file is None:
        chat.check_messages([{"role": "user", "content": ""}], tools, tools_file or "")
        return [], tools
    chat.check_messages(messages, tools, file, raw=True)
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"{file}: the last message is of role {messages[-1]['role']}, must be of user or tool")
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] != "text":
                named = part[part["type"]]
                path = named["url"] if isinstance(named, dict) and "url" in named else named
                if not isinstance(path, str) or not path.strip():
                    raise ValueError(f"{file}: found image {named!r:.60}, must be the name of a file")
                path = os.path.join(os.path.dirname(file), os.path.expanduser(path))
                _check_file(path, f"{file}: image {path}")
                part[part["type"]] = path
    return messages, tools


def _read(file: str) -> Any:
    from k3jax import strict_json

    try:
        return strict_json.loads(read_text(file))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{file}: cannot be read as JSON ({reason})") from None


def _check_file(path: str, name: str) -> None:
    check_kind(path)
    if not Path(path).is_file():
        raise ValueError(f"{name}: no such file")


@dataclass(frozen=True, kw_only=True)
class Evaluate(_Model):
    """Losses on held-out data, by source, in nats a token and nats a byte of text."""

    data: tyro.conf.UseAppendAction[tuple[PathText, ...]] = ()
    """Source as in data.paths, all of whose documents are taken; again for each further one. None: what the run held out."""
    batch_size: int = 8
    """Rows at a time."""
    rows: int | None = None
    """About so many rows, spread evenly; by default all."""
    seq_len: int | None = None
    """Tokens of a row; by default those of the run or the corpus, else 4096 or what the model has."""
    learn: Literal["assistant", "last", "all"] | None = None
    """What counts of conversations: what the assistant has to produce, its last turn alone, or all; by default as of seq-len."""
    thinking: bool = True
    """Whether the reasoning in conversations is part of them, where it is one of those of the run or the corpus."""

    def run(self) -> None:
        given = {name: getattr(self, name) for name in ("seq_len", "learn") if getattr(self, name) is not None}
        given |= {} if self.thinking else {"thinking": False}
        alone = "left out without --data: what a run held out is as it was made"
        check(
            *at_least(1, batch_size=self.batch_size, rows=self.rows, seq_len=self.seq_len),
            *((name.replace("_", "-"), value, bool(self.data), alone) for name, value in given.items()),
        )
        check_kind(self.checkpoint)
        runtime.setup()
        from k3jax.serve.evaluate import evaluate

        scores = evaluate(
            self.checkpoint, self.data, self.batch_size, self.rows, self.experts, self.mxfp8_inputs, **given
        )
        rows = [("", "nats a token", "nats a byte", "tokens", "bytes")]
        for name, score in scores.items():
            rows.append((name, f"{score.loss:.4f}", f"{score.byte_loss:.4f}", f"{score.tokens:,}", f"{score.bytes:,}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        for first, *rest in rows:
            print("  ".join([first.ljust(widths[0]), *(x.rjust(w) for x, w in zip(rest, widths[1:]))]).rstrip())
