"""What every tokenizer can do, and decoding that never shows half a character."""

from __future__ import annotations

import abc
import codecs
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from k3jax.tokens import check_tokens

# Bytes that are no UTF-8 stand in a str as U+DC80..U+DCFF, as everywhere in Python (`surrogateescape`).
_ESCAPED_BYTES = re.compile("([\udc80-\udcff]+)")


def to_bytes(text: str) -> bytes:
    """UTF-8 of `text`, in which escaped bytes are those bytes. Raises ValueError for any other lone surrogate."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise ValueError(f"found half a character, {found}, at position {error.start}, must be whole ones") from None


def printable(text: str) -> str:
    """Characters that could steer a terminal as escapes: controls, direction marks, what has no meaning.

    Spaces of every width stay, and what joins or parts the letters and pictures beside it.

    >>> printable("\x1b[2J 👩\u200d💻")
    '\\x1b[2J 👩\u200d💻'
    """
    return "".join(c if _is_shown(c) else c.encode("unicode_escape").decode() for c in text)


def _is_shown(c: str) -> bool:
    return c.isprintable() or c in "\n\t\u200c\u200d" or unicodedata.category(c) == "Zs"


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Markers, such as `<|open|>`, are ids that text never becomes: `encode` of a marker's name gives the ids of that
    text.

    Attributes:
        kind: "bytes", "tiktoken" or "json".
        vocab_size: ids are below it.
        stop_ids: any of them ends generation.
        identity: SHA-256 over what decides the ids; equal identities give equal ids.
        markers: id of every marker by its name.
    """

    kind: str
    vocab_size: int
    stop_ids: frozenset[int] = frozenset()
    identity: str
    markers: Mapping[str, int]

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids [T], int32, of plain text. Bytes that are no UTF-8 (surrogates, as `os.fsdecode` makes) stay bytes."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray, markers: bool = False, errors: str = "replace") -> str:
        """Text of ids [T]. Markers are left out, or shown as their names with `markers`.

        Bytes that are no UTF-8 are shown as U+FFFD; with `errors="surrogateescape"` decode(encode(x)) = x for them,
        too. Raises ValueError for an id that is no token.
        """

    @abc.abstractmethod
    def stream(self) -> Stream:
        """A decoder of one id after the other, whose texts together are those of `decode`."""

    @abc.abstractmethod
    def sizes(self) -> np.ndarray:
        """Bytes of text of every id, int32 [vocab_size]; markers have 0."""

    def marker(self, name: str) -> int:
        """Id of a marker; ValueError for a name that none has."""
        if name not in self.markers:
            raise ValueError(
                f"marker {name}: this tokenizer ({self.kind}, {self.vocab_size} tokens) has none of that name"
            )
        return self.markers[name]

    def marker_name(self, id: int) -> str | None:
        """Name of the marker that `id` is, or None."""
        return self._names.get(id)

    def describe(self, id: int) -> str:
        """How a message names `id`: "<|end_of_msg|> (163586)", "'\\n' (10)", or "token (300)" where it is neither."""
        is_text = 0 <= id < self.vocab_size and id not in self._names
        text = self.decode([id]) if is_text else ""
        return f"{self.marker_name(id) or (repr(text) if text else 'token')} ({id})"


class Stream:
    """Decodes one id after the other; what is not yet a whole character waits.

    >>> stream = ByteTokenizer().stream()
    >>> [stream.push(id) for id in (97, 0xC3, 0xA9)]
    ['a', '', 'é']
    """

    def __init__(self, tokens: Sequence[bytes | None], errors: str = "replace"):
        """`tokens`: bytes of every id; None for what is no text."""
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, id: int) -> str:
        """Text that `id` completes. A marker has none, and ends the characters before it."""
        if not 0 <= id < len(self._tokens):
            check_tokens(id, len(self._tokens))  # which says so
        token = self._tokens[id]
        return self.finish() if token is None else self._decoder.decode(token)

    def finish(self) -> str:
        """What still waits, as U+FFFD; the stream can go on."""
        return self._decoder.decode(b"", True)


class TableTokenizer(Tokenizer):
    """Tokens that are bytes of text, with markers beside them. A subclass gives the ids of text that is whole UTF-8.

    Raises ValueError when one of the 256 bytes is no token.
    """

    def __init__(self, tokens: Sequence[bytes | None], markers: Mapping[str, int]):
        """`tokens`: bytes of every id; None for markers and for ids that are no token."""
        self._tokens, self.markers = tokens, markers
        self._names = {id: name for name, id in markers.items()}
        self.vocab_size = len(tokens)
        single = {token[0]: id for id, token in enumerate(tokens) if token is not None and len(token) == 1}
        missing = sorted(set(range(256)) - set(single))
        if missing:
            raise ValueError(f"{len(missing)} of the 256 bytes are no tokens, the first is {missing[0]}")
        self._byte_ids = [single[byte] for byte in range(256)]

    @abc.abstractmethod
    def _encode_whole(self, text: str) -> Iterable[int]: ...

    def encode(self, text: str) -> np.ndarray:
        if text.isascii():
            return np.asarray(self._encode_whole(text), np.int32)
        to_bytes(text)  # half a character is an error here, not inside a library
        ids = []
        for i, part in enumerate(_ESCAPED_BYTES.split(text)):
            # A byte that is no UTF-8 is a token of its own: no split rule says anything about it.
            ids += [self._byte_ids[byte] for byte in to_bytes(part)] if i % 2 else self._encode_whole(part)
        return np.asarray(ids, np.int32)

    def decode(self, ids, markers=False, errors="replace"):
        ids = np.asarray(ids)
        check_tokens(ids, self.vocab_size)
        texts, run = [], []
        for id in ids.tolist():
            token = self._tokens[id]
            if token is not None:
                run.append(token)
                continue
            texts.append(b"".join(run).decode("utf-8", errors))
            run.clear()
            if markers:
                texts.append(self._names.get(id, ""))
        texts.append(b"".join(run).decode("utf-8", errors))
        return "".join(texts)

    def stream(self):
        return Stream(self._tokens)

    def sizes(self):
        return np.array([len(token or b"") for token in self._tokens], np.int32)
