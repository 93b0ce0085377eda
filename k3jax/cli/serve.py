"""`python -m k3jax generate`, `chat` and `evaluate`: what needs a model that has been trained."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.conf import Positional

from k3jax import runtime, strict_json
from k3jax.cli.options import at_least, check
from k3jax.paths import check_kind, read_text
from k3jax.values import AnyText, PathText, Seed

Images = tyro.conf.UseAppendAction[tuple[PathText, ...]]
_FAULTS = 3  # of a reply that are named


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
        print(flush=True)
        if ended is not None:
            print(f"ended by {ended}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Chat(_Drawn, _Model):
    """Talk with a model in the terminal, or let it reply to a conversation in a file.

    Every line that is typed, or comes through a pipe, is a message. Ctrl-C ends a reply, and at the prompt the conversation,
    as the end of the input does. Where the model calls tools, their results are asked for.
    """

    messages: PathText | None = None
    """JSON file of a conversation to reply to: a list of messages, or an object with `messages` and `tools`."""
    tools: PathText | None = None
    """JSON file with a list of the tools that the model may call."""
    image: Images = ()
    """Image file that goes with the first message; again for each further one."""
    thinking: bool = True
    """Whether the model thinks before it answers: --thinking off, or --no-thinking, where it must not."""
    effort: Literal["low", "medium", "high", "max"] = "max"
    """How much it is asked to think."""
    as_json: bool = False
    """Print the reply to `messages` as JSON."""
    max_tokens: int = 1000
    """Most tokens of a reply; fewer where the model has no more positions."""

    def run(self) -> None:
        self.check(self.max_tokens)
        alone = "left out without --messages" if self.messages is None else "left out beside --messages, which names its own"
        check(
            ("as-json", self.as_json, not self.as_json or self.messages is not None, alone),
            ("image", ",".join(self.image), not self.image or self.messages is None, alone),
        )
        check_kind(self.checkpoint)
        for image in self.image:
            _check_file(image, f"--image {image}")
        messages, tools = _conversation(self.messages, self.tools)
        runtime.setup()
        from k3jax.serve.chat import Chat as Model

        model = Model(self.checkpoint, self.experts, self.mxfp8_inputs)
        options = {"thinking": self.thinking, "effort": self.effort, "max_tokens": self.max_tokens, **self.options}
        if messages:
            reply = _shown(model.reply(messages, tools, **options), (lambda delta: None) if self.as_json else _Screen())
            print(json.dumps(reply.message, ensure_ascii=False) if self.as_json else "", flush=True)
            _tell(reply, model.tokenizer)
        else:
            self._talk(model, tools, options)

    def _talk(self, model, tools: list, options: dict) -> None:
        messages: list[dict] = []
        asked = 0  # messages before the user's last one
        images = [{"type": "image", "image": path} for path in self.image]
        model.sizes(self.image)  # not when the first message has been typed: what is wrong, and to wait
        model.load()
        for texts in _typed(messages):
            if called := _called(messages):
                messages += [{"role": "tool", "tool": name, "content": text} for name, text in zip(called, texts, strict=True)]
            else:
                asked, (text,) = len(messages), texts
                content = text if messages or not images else [*images, {"type": "text", "text": text}]
                messages.append({"role": "user", "content": content})
            try:
                reply = _shown(model.reply(messages, tools, **options), _Screen())
            except KeyboardInterrupt:
                print("\ninterrupted: your last message, and what followed it, is forgotten", file=sys.stderr)
                del messages[asked:]
                continue
            print(flush=True)
            _tell(reply, model.tokenizer)
            messages.append(reply.message)


def _called(messages: list[dict]) -> list[str]:
    """Tools that the last message called."""
    return [call["function"]["name"] for call in messages[-1].get("tool_calls", ())] if messages else []


def _typed(messages: list[dict]) -> Iterator[list[str]]:
    """What is typed: a message, or the results of the calls that the last of `messages` made; until Ctrl-C or the end."""
    from k3jax.text import printable

    if sys.stdin is None:  # closed
        return
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and a history for `input`)
        print("Ctrl-C ends a reply, Ctrl-D the conversation", file=sys.stderr)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no text stay bytes, as on the command line
    while True:
        called = _called(messages)
        prompts = [f"result of {printable(name)}> " for name in called] or ["> "]
        try:
            texts = [_line(prompt if terminal else "") for prompt in prompts]
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print(file=sys.stderr)
            return
        if called or texts[0].strip():
            yield texts


def _line(prompt: str) -> str:
    if not sys.stdout.isatty():  # what goes into a file or a pipe is the replies alone
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)


class _Screen:
    """Shows a reply as it comes: with colours reasoning is dim and calls are cyan, else a line begins with what it is."""

    _NAMES = {"reasoning_content": "thinking", "content": "answer", "call": "call", "arguments": "call"}
    _COLOURS = {"thinking": "\x1b[2m", "answer": "", "call": "\x1b[36m"}

    def __init__(self):
        self._in_colour, self._at = runtime.shows_colours(), ""

    def __call__(self, delta) -> None:
        from k3jax.text import printable

        name = self._NAMES.get(delta.kind)
        if name is None:
            return
        text = printable(delta.text)
        colour = self._COLOURS[name] if self._in_colour else ""
        if colour:
            text = f"{colour}{text}\x1b[0m"
        if name != self._at or delta.kind == "call":
            text = ("\n" if self._at else "") + ("" if self._in_colour else f"[{name}] ") + text
        self._at = name
        print(text, end=" " if delta.kind == "call" else "", flush=True)


def _shown(pieces, show) -> Any:
    """What a generator returns, when all that it gives has been shown."""
    while True:
        try:
            show(next(pieces))
        except StopIteration as stop:
            return stop.value


def _tell(reply, tokenizer) -> None:
    """What is to be said of a reply beside its words, in at most one line; of one that is right, nothing."""
    from k3jax.chat.encode import END
    from k3jax.text import printable

    said = []
    if reply.ended is None:
        said.append("cut off: --max-tokens or the model's last position was reached, or it began another message")
    elif tokenizer.marker_name(reply.ended) != END:
        said.append(f"ended by {tokenizer.describe(reply.ended)}")
    if reply.faults:
        more = f"; and {len(reply.faults) - _FAULTS} more" if len(reply.faults) > _FAULTS else ""
        said.append(f"not in the right form: {'; '.join(reply.faults[:_FAULTS])}{more}")
    if said:
        print(printable("; ".join(said)), file=sys.stderr)


def _conversation(file: str | None, tools_file: str | None) -> tuple[list, list]:
    """(messages, tools) of the files, checked; no messages without a file. Raises ValueError, one line that names the file."""
    from k3jax import chat

    messages, tools = (None, []) if file is None else (_read(file), [])
    if isinstance(messages, dict):
        messages, tools = messages.get("messages"), messages.get("tools") or []
    if tools_file is not None:
        if tools:
            raise ValueError(f"--tools {tools_file}: must be left out, {file} has tools")
        tools = _read(tools_file)
        chat.check_messages([{"role": "user", "content": ""}], tools, tools_file)
    if file is None:
        return [], tools
    chat.check_messages(messages, tools, file)
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"{file}: the last message is of role {messages[-1]['role']}, must be of user or tool, to be replied to")
    for number, message in enumerate(messages, 1):
        for part in chat.parts(message.get("content")):
            if part["type"] != "text":
                _find_image(part, os.path.dirname(file), f"{file}: message {number}")
    return messages, tools


def _find_image(part: dict, folder: str, where: str) -> None:
    """Puts the path of the file that an image part names in its place."""
    from k3jax import chat

    try:
        part[part["type"]] = path = chat.image_file(chat.image_name(part), folder)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _check_file(path, f"{where}: image {path}")


def _read(file: str) -> Any:
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
