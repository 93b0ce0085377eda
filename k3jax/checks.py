"""What a value is checked for: that it is of the type a field declares, and that devices can hold it. Nothing here imports JAX."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

LARGEST = 2**31 - 1  # what is counted on devices is counted in int32
_SINGLE = 2.0**-149, (2 - 2.0**-23) * 2.0**127  # smallest and largest positive float32


def is_instance(value: Any, hint: Any) -> bool:
    """Whether a value is of the type a field's annotation names; integers are numbers, a bool is neither."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(is_instance(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        kinds = args[:1] * len(value) if args[-1] is Ellipsis and isinstance(value, tuple) else args
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(is_instance, value, kinds))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def describe_type(hint: Any) -> str:
    """The type a field's annotation names, as an error message says it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe_type, args))
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        count = "values" if args[-1] is Ellipsis else f"{len(args)} values"
        return f"a tuple of {count}, each {describe_type(args[0])}"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "text", types.NoneType: "None"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def beyond(value: Any) -> str | None:
    """What would be right of a number that its type on the devices, int32 or float32, does not hold; NaN is none."""
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"from -{LARGEST} to {LARGEST}"
    if isinstance(value, float) and value and not _SINGLE[0] <= abs(value) <= _SINGLE[1]:
        return "a finite number that float32 can hold"
    return None


def shown(value: Any, write: Callable[[Any], str] = str) -> str:
    """A value in a message, not longer than a line can take."""
    try:
        text = write(value)
    except ValueError:  # Python does not write numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_type(key: str, value: Any, hint: Any) -> None:
    """Refuses a value that is not of the type declared, or beyond its range."""
    if not is_instance(value, hint):
        raise ValueError(f"{key}: found {shown(value, repr)}, must be {describe_type(hint)}")
    for number in value if isinstance(value, tuple) else (value,):
        if right := beyond(number):
            raise ValueError(f"{key}: found {shown(number)}, must be {right}")


def check_object(key: str, value: Any) -> None:
    """Refuses what is no JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{key}: found {value!r:.60}, must be a JSON object")
