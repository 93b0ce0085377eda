"""Which numbers are tokens of a vocabulary. Nothing here imports JAX."""

from __future__ import annotations

import numpy as np


def check_tokens(tokens, vocab_size: int, where=None, name: str = "token") -> None:
    """Raises ValueError naming the first id of `tokens` (integers, any shape) that is not in 0..vocab_size-1.

    `where`: of the same shape; ids are looked at where it is true.

    >>> check_tokens([[1, 300]], 256)
    Traceback (most recent call last):
    ValueError: token id 300 at position [0, 1] is outside the vocabulary of 256: ids run from 0 to 255
    """
    tokens = np.asarray(tokens)
    outside = (tokens < 0) | (tokens >= vocab_size)
    places = np.argwhere(outside if where is None else outside & np.asarray(where, bool))
    if len(places):
        place = places[0].tolist()
        raise ValueError(f"{name} id {tokens[tuple(place)]} at position {place} is outside the vocabulary of "
                         f"{vocab_size}: ids run from 0 to {vocab_size - 1}")
