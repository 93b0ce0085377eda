"""Replies to conversations, as they are written."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from k3jax import chat
from k3jax.chat.encode import MEDIA_PAD
from k3jax.serve import sampling
from k3jax.serve.generate import generate_tokens, load_model, load_text
from k3jax.vision.image import file_size, preprocess


class Reply(NamedTuple):
    """A reply that is over.

    Attributes:
        message: as it goes into the conversation.
        faults: what is not in the right form, a line each.
        ended: id of the token that ended it; None where there were no more tokens to write.
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
            chat.ids(chat.encode([{"role": "user", "content": ""}], prefix=True), self.tokenizer)
        except ValueError as error:
            raise ValueError(f"{checkpoint}: no model for conversations: {error}") from None
        self.model, self.variables = load_model(checkpoint, experts, mxfp8_inputs)

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

        Image parts of the messages name files. Raises `ValueError`, one line, for what `chat.encode` and
        `generate_tokens` refuse, and for images where the model has no vision.
        """
        sampling.check(temperature, top_k, top_p)
        files = chat.images(messages)
        if files and self.cfg.vision is None:
            raise ValueError(f"images: found {len(files)}, must be none: this model has no vision")
        sizes = [file_size(file) for file in files]
        pieces = chat.encode(messages, tools, thinking, effort=effort, images=sizes, prefix=True)
        prompt, _ = chat.ids(pieces, self.tokenizer)
        if files and self.tokenizer.marker(MEDIA_PAD) != self.cfg.vision.media_placeholder_token_id:
            raise ValueError(
                f"media_placeholder_token_id={self.cfg.vision.media_placeholder_token_id}: must be the tokenizer's "
                f"{MEDIA_PAD}, {self.tokenizer.marker(MEDIA_PAD)}"
            )
        patches = [preprocess(file, self.cfg.vision) for file in files]
        parser = chat.Parser("think" if thinking else "response", self.tokenizer)
        found = generate_tokens(
            self.model,
            self.variables,
            prompt,
            max_tokens,
            temperature,
            top_k,
            top_p,
            seed,
            patches,
            stop_ids=self.tokenizer.stop_ids,
            ids=self.tokenizer.vocab_size,
        )
        ended = None
        while True:
            try:
                token = next(found)
            except StopIteration as stop:
                ended = stop.value
                break
            yield from parser.push_id(token)
            if parser.messages:  # a model that does not end its message would go on with the next one
                break
        if ended is not None:
            yield from parser.push_id(ended)
        yield from parser.finish()
        return Reply(parser.messages[0], parser.faults, ended)
