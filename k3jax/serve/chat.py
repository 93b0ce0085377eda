"""Replies to conversations, as they are written."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from k3jax import chat
from k3jax.chat.encode import CLOSE, END, MEDIA_PAD, OPEN, SEP
from k3jax.nn.model import K3
from k3jax.serve import sampling
from k3jax.serve.generate import fit_prompt, generate_tokens, load_model, load_text
from k3jax.vision.image import file_size, preprocess


class Reply(NamedTuple):
    """A reply that is over.

    Attributes:
        message: as it goes into the conversation.
        faults: what is not in the right form, a line each.
        ended: id of the token that ended it; None where it was cut off.
    """

    message: chat.Message
    faults: list[str]
    ended: int | None


class Chat:
    """A model and its tokenizer, for conversations.

    Raises:
        ValueError: no checkpoint, or one whose tokenizer has no markers of the chat format.

    Example:
        >>> for delta in Chat("runs/chat/run").reply([{"role": "user", "content": "What does json.loads do?"}]):
        ...     print(delta.text, end="")
    """

    def __init__(self, checkpoint: str | Path, experts: str = "packed", mxfp8_inputs: bool = True):
        self.cfg, self.tokenizer, _ = load_text(checkpoint)
        try:
            for name in (OPEN, CLOSE, SEP, END):
                self.tokenizer.marker(name)
        except ValueError as error:
            raise ValueError(f"{checkpoint}: no model for conversations: {error}") from None
        self._stored = checkpoint, experts, mxfp8_inputs
        self._loaded: tuple[K3, dict] | None = None

    def load(self) -> tuple[K3, dict]:
        """(model, variables), read once: now, or for the first reply."""
        if self._loaded is None:
            self._loaded = load_model(*self._stored)
        return self._loaded

    def reply(
        self,
        messages: Sequence[chat.Message],
        tools: Sequence[dict] = (),
        thinking: bool = True,
        effort: str | None = "max",
        max_tokens: int = 1000,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Generator[chat.Delta, None, Reply]:
        """Yields what the assistant writes next, and returns the whole.

        Image parts of the messages name files. The reply ends with its end marker or any of the tokenizer's `stop_ids`,
        after `max_tokens`, or where the model has no more positions.

        Raises:
            ValueError: one line, before weights are read: what `chat.encode` refuses, images that cannot be read or seen, or
                a conversation that leaves no position for a reply.
        """
        sampling.check(temperature, top_k, top_p)
        chat.check_messages(messages, tools, raw=True)
        files = chat.images(messages)
        pieces = chat.encode(messages, tools, thinking, effort=effort, images=self.sizes(files), prefix=True)
        prompt, _ = chat.ids(pieces, self.tokenizer)
        patches = [preprocess(file, self.cfg.vision) for file in files]
        tokens = fit_prompt(self.cfg, prompt, [image.grid for image in patches]).size
        room = self.cfg.max_position_embeddings - tokens
        if room < 1:
            raise ValueError(
                f"messages: found {tokens} tokens, must be fewer than max_position_embeddings={self.cfg.max_position_embeddings}"
            )
        end = self.tokenizer.marker(END)
        stop_ids = self.tokenizer.stop_ids | {end}
        drawn = min(max_tokens, room), temperature, top_k, top_p, seed, patches, stop_ids, self.tokenizer.vocab_size
        parser, ended = chat.Parser("think" if thinking else "response", self.tokenizer), None
        for token in generate_tokens(*self.load(), prompt, *drawn):
            ended = token if token in stop_ids else None
            if ended in (None, end):  # any other is no part of the reply
                yield from parser.push_id(token)
            if parser.messages:  # over, or the model went on with a message of its own
                break
        yield from parser.finish()
        message, more = _encodable(parser.messages[0])
        return Reply(message, [*parser.faults, *more], ended)

    def sizes(self, files: Sequence[str | Path]) -> list[tuple[int, int]]:
        """(width, height) of images; ValueError, one line, for a file that is none, and where the model sees no images."""
        vision = self.cfg.vision
        if files and vision is None:
            raise ValueError(f"images: found {len(files)}, must be none: this model has no vision")
        if files and (placeholder := self.tokenizer.marker(MEDIA_PAD)) != vision.media_placeholder_token_id:
            raise ValueError(
                f"media_placeholder_token_id: found {vision.media_placeholder_token_id}, must be the tokenizer's "
                f"{MEDIA_PAD}, {placeholder}"
            )
        return [file_size(file) for file in files]


def _encodable(message: chat.Message) -> tuple[chat.Message, list[str]]:
    """The message without calls that `chat.encode` would refuse, such as one without a tool's name, and a fault for each."""
    calls, faults = [], []
    for number, call in enumerate(message.get("tool_calls", ()), 1):
        try:
            chat.check_messages([{"role": "assistant", "tool_calls": [call]}], raw=True)
            calls.append(call)
        except ValueError as error:
            faults.append(f"message 1: call {number} is left out: {error}")
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return kept | ({"tool_calls": calls} if calls else {}), faults
