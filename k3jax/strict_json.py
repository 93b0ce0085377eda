"""JSON that says one thing only: no key twice, and no number that is none."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(text: str | bytes | bytearray) -> Any:
    """`json.loads` that also refuses, as `ValueError`, a key given twice, NaN and Infinity, and nesting without end.

    Bytes are UTF-8; a mark of their order before them, which some editors write, is left out.

    Example:
        >>> loads('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: a is listed twice
    """
    try:
        text = text.removeprefix("\ufeff") if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice} is listed twice")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")
