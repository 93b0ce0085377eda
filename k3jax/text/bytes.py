"""Tokens that are bytes."""

from __future__ import annotations

import hashlib

import numpy as np

from k3jax.text.base import Stream, Tokenizer, to_bytes
from k3jax.tokens import check_tokens


class ByteTokenizer(Tokenizer):
    """Token id = byte of the UTF-8 text; there are no markers. All but `stop_ids` needs no instance.

    >>> ByteTokenizer.decode(ByteTokenizer.encode("def f():"))
    'def f():'
    """

    kind = "bytes"
    vocab_size = 256
    identity = hashlib.sha256(kind.encode()).hexdigest()
    markers = {}
    _names = {}
    _tokens = [bytes([byte]) for byte in range(vocab_size)]

    def __init__(self, stop_ids: frozenset[int] = frozenset()):
        self.stop_ids = stop_ids

    @staticmethod
    def encode(text: str) -> np.ndarray:
        """Ids [T], int32. Command line bytes that are no UTF-8 (surrogates in `text`) stay those bytes."""
        return np.frombuffer(to_bytes(text), np.uint8).astype(np.int32)

    @staticmethod
    def decode(ids, markers: bool = False, errors: str = "replace") -> str:
        """Text of ids [T] in 0..255; raises ValueError for any other id."""
        ids = np.asarray(ids)
        check_tokens(ids, ByteTokenizer.vocab_size)
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors)

    @staticmethod
    def stream() -> Stream:
        return Stream(ByteTokenizer._tokens)

    @staticmethod
    def sizes() -> np.ndarray:
        return np.ones(ByteTokenizer.vocab_size, np.int32)
