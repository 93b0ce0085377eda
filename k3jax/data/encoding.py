"""Documents as tokens: what is learnt of them, and what becomes of those that are longer than a row."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from k3jax import chat
from k3jax.chat.encode import MEDIA_PAD
from k3jax.data.sources import Document
from k3jax.text import ByteTokenizer, Tokenizer, load_tokenizer
from k3jax.text.base import to_bytes
from k3jax.vision.image import checked_size, resized

END_OF_TEXT = "[EOS]"
"""A marker that ends a plain text, where the tokenizer has it."""


@dataclass(frozen=True)
class Encoding:
    """How documents become rows."""

    seq_len: int
    """Places of a row; a document of n tokens takes n - 1, one for every target."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """Of conversations: what the assistant has to produce, its last turn alone, or everything."""
    thinking: bool = True
    """Of conversations: whether reasoning is part of them."""
    long: Literal["cut", "skip"] = "cut"
    """What becomes of a document longer than a row: pieces of a text, the last messages of a conversation, or nothing."""
    patch: int = 14
    """Of images: pixels along a side of a patch,"""
    merge: tuple[int, int] = (2, 2)
    """and how many rows and columns of patches become one token; both as released."""


def open_tokenizer(folder: str | Path | None, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a folder, or bytes for None. Raises ValueError for a folder that is none, or more ids than `vocab_size`."""
    if folder is None:
        if vocab_size is not None and vocab_size < ByteTokenizer.vocab_size:
            raise ValueError(f"model.vocab_size={vocab_size}: must be at least {ByteTokenizer.vocab_size}, one token a byte")
        return ByteTokenizer()
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder; one with the files of a tokenizer was expected")
    return load_tokenizer(folder, vocab_size)


class ImageFile(NamedTuple):
    """An image of a row, which is read when a batch needs it."""

    path: str
    grid: tuple[int, int, int]  # frames, rows and columns of patches

    @property
    def patches(self) -> int:
        return math.prod(self.grid)


class Tokens(NamedTuple):
    """A document or a piece of one. Token t+1 is a target, weighted 1, where learnt[t+1]."""

    ids: np.ndarray  # int32 [n], as many placeholders for an image as it has tokens
    learnt: np.ndarray  # bool [n]
    bytes: int  # UTF-8 bytes of the learnt text
    images: tuple[ImageFile, ...] = ()  # in the order of their placeholders


class _Quick:
    """A tokenizer that knows the ids of short texts that it has met: tags are made of the same few words."""

    def __init__(self, tokenizer: Tokenizer):
        self.marker, self._long = tokenizer.marker, tokenizer.encode
        self._short = functools.lru_cache(4096)(tokenizer.encode)

    def encode(self, text: str) -> np.ndarray:
        return self._short(text) if len(text) <= 16 else self._long(text)


class Encoder:
    """Turns documents into pieces that fit a row each, and counts those left out, by reason, in `skipped`."""

    def __init__(self, tokenizer: Tokenizer, encoding: Encoding):
        self.tokenizer, self.encoding = tokenizer, encoding
        self.most = encoding.seq_len + 1  # tokens of a row that holds one document
        self.skipped: Counter[str] = Counter()
        self._quick = _Quick(tokenizer)
        end = tokenizer.markers.get(END_OF_TEXT)
        self._end = np.array([] if end is None else [end], np.int32)

    def __call__(self, document: Document) -> Iterator[Tokens]:
        """Raises ValueError, one line naming file and line, for messages that are no conversation."""
        pieces = self._text(document.text) if document.messages is None else self._chat(document)
        for tokens in pieces:
            if len(tokens.ids) < 2:
                self.skipped["too short"] += 1
            elif not tokens.learnt[1:].any():
                self.skipped["nothing learnt"] += 1
            else:
                yield tokens

    def _text(self, text: str) -> Iterator[Tokens]:
        ids = np.concatenate([self.tokenizer.encode(text), self._end])
        size = len(to_bytes(text))
        if len(ids) > self.most and self.encoding.long == "skip":
            self.skipped["too long"] += 1
            return
        # Each piece begins with the last token of the one before: every token but the first is a target once.
        for begin in range(0, max(len(ids) - 1, 1), self.encoding.seq_len):
            piece = ids[begin : begin + self.most]
            share = round(size * (begin + len(piece)) / len(ids)) - round(size * begin / len(ids)) if len(ids) else 0
            yield Tokens(piece, np.ones(len(piece), bool), share)

    def _chat(self, document: Document) -> Iterator[Tokens]:
        messages, tools = document.messages, document.tools
        try:
            chat.check_messages(messages, tools, training=True)
            images, sizes = self._images(os.path.dirname(document.file), chat.images(messages))
        except ValueError as error:
            raise ValueError(f"{document.where()}: {error}") from None  # finding the line takes a while
        pieces = chat.encode(messages, tools, self.encoding.thinking, learn=self.encoding.learn, images=sizes)
        whole = self._group(pieces, iter(images))
        if len(whole.ids) <= self.most:
            yield whole
        elif self.encoding.long == "skip":
            self.skipped["too long"] += 1
        else:
            rest = iter(images)
            groups = [(group[0].message, self._group(group, rest)) for group in chat.by_message(pieces)]
            kept = [tokens for _, tokens in self._last(groups, messages)]
            # Where they are longer than a row, it is tools and a last message, of the assistant: neither has images to be cut.
            ids, learnt = (np.concatenate([tokens[i] for tokens in kept])[: self.most] for i in (0, 1))
            yield Tokens(ids, learnt, sum(t.bytes for t in kept), tuple(image for t in kept for image in t.images))

    def _images(self, folder: str, names: Sequence) -> tuple[list[ImageFile], list[tuple[int, int]]]:
        """The images with these names, relative to `folder`, and their (width, height) in pixels; each is decoded once, to see that it can be."""
        images, sizes = [], []
        for name in names:
            path = os.path.abspath(chat.image_file(name, folder))
            sizes.append(checked_size(path))
            width, height = resized(*sizes[-1], self.encoding.patch, self.encoding.merge)[1]
            images.append(ImageFile(path, (1, height // self.encoding.patch, width // self.encoding.patch)))
        return images, sizes

    def _last(self, groups: list[tuple[int, Tokens]], messages: Sequence[dict]) -> list[tuple[int, Tokens]]:
        """What stands before the messages and as many of the last ones as fit, at least one."""
        head = [group for group in groups if group[0] < 0]
        room = self.most - sum(len(tokens.ids) for _, tokens in head)
        kept = first = len(groups)
        while first > len(head) and (room := room - len(groups[first - 1][1].ids)) >= 0:
            first -= 1
            # A tool's result stands behind its call, never first.
            if messages[groups[first][0]]["role"] != "tool":
                kept = first
        return head + groups[min(kept, len(groups) - 1) :]

    def _group(self, pieces: Sequence[chat.Piece], images: Iterator[ImageFile]) -> Tokens:
        """Takes from `images` those of the pieces."""
        ids, learnt = chat.ids(pieces, self._quick)
        size = sum(len(to_bytes(piece.text)) for piece in pieces if piece.learnt and not piece.marker)
        mine = tuple(next(images) for piece in pieces if piece.marker and piece.text == MEDIA_PAD)
        if mine:
            repeats = np.ones(len(ids), np.int64)
            repeats[ids == self.tokenizer.marker(MEDIA_PAD)] = [image.patches // math.prod(self.encoding.merge) for image in mine]
            ids, learnt = np.repeat(ids, repeats), np.repeat(learnt, repeats)
        return Tokens(ids, learnt, size, mine)
