"""What a setting of a run and a flag of a command may hold: how its text is read, and which values are in range.

Both follow from the type a field is declared with. `PathText`, `Seed` and `AnyText` are types for what a bare `str` or
`int` does not say. Nothing here imports JAX.
"""

from __future__ import annotations

import decimal
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from k3jax.checks import beyond, describe_type, is_instance, shown
from k3jax.paths import expand

LARGEST_SEED = 2**32 - 1  # JAX takes the lower 32 bits of a seed

_WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


@dataclass(frozen=True)
class Kind:
    """Values of one Python type: how they are read from text, and, where one does not fit, what would be right."""

    type: type
    read: Callable[[str], Any]
    unfit: Callable[[Any], str | None]

    def parse(self, text: str) -> Any:
        """The value that a text stands for. Raises `ValueError` saying what would be right."""
        try:
            value = self.read(text)
        except ValueError:
            raise ValueError(describe_type(self.type)) from None
        if right := self.unfit(value):
            raise ValueError(right)
        return value

    @property
    def metavar(self) -> str:
        return "{True,False}" if self.type is bool else self.type.__name__.upper()

    @property
    def flag(self) -> PrimitiveConstructorSpec:
        """How tyro reads and shows it."""
        return _flag(self.parse, self.metavar, self.type)


def _flag(read: Callable[[str], Any], metavar: str, hint: Any) -> PrimitiveConstructorSpec:
    def parsed(texts: list[str]) -> Any:
        try:
            return read(texts[0])
        except ValueError as error:
            raise ValueError(f"{shown(texts[0]) or repr('')}: must be {error}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=parsed,
        is_instance=lambda value: is_instance(value, hint),
        str_from_instance=lambda value: [str(value)],
    )


def whole(text: str) -> int:
    """The whole number that a text writes, such as 1000, 1_000 or 1e3; one beyond any use is cut down to 2^64.

    Example:
        >>> whole("1e3")
        1000
    """
    try:
        number = decimal.Decimal(text.strip())
    except decimal.InvalidOperation:
        raise ValueError(text) from None
    if not number.is_finite():
        raise ValueError(text)
    number = max(min(number, 2**64), -(2**64))  # 1e999999999 is not to be written out
    if number != int(number):
        raise ValueError(text)
    return int(number)


def truth(text: str) -> bool:
    """True or False, as people write them: true, yes, on, 1, false, no, off, 0, in any case."""
    try:
        return _WORDS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


_KINDS = {
    int: Kind(int, whole, beyond),
    float: Kind(float, float, beyond),
    bool: Kind(bool, truth, lambda value: None),
    str: Kind(str, str, lambda text: None if text else "text that is not empty"),
}
SEED = Kind(int, whole, lambda n: None if 0 <= n <= LARGEST_SEED else f"from 0 to {LARGEST_SEED}")
PATH = Kind(str, expand, lambda path: None if path.strip() and "\0" not in path else "the name of a file or folder")
ANY = Kind(str, str, lambda text: None)

Seed = Annotated[int, SEED, SEED.flag]
PathText = Annotated[str, PATH, PATH.flag]
AnyText = Annotated[str, ANY, ANY.flag]

FLAGS = ConstructorRegistry()  # tyro's rules for the bare types


@FLAGS.primitive_rule
def _(info) -> PrimitiveConstructorSpec | None:
    if kind := _KINDS.get(info.type):
        return kind.flag
    kinds = [kind for kind in map(_kind, typing.get_args(info.type)) if kind]
    if info.type_origin in (typing.Union, types.UnionType) and len(kinds) == 1:
        return _flag(functools.partial(parse, info.type), f"{{None}}|{kinds[0].metavar}", kinds[0].type | None)
    return None


def parse(hint: Any, text: str) -> Any:
    """The value of a field declared as `hint` that a text stands for; those of a tuple are separated by commas.

    `None` stands for a tuple without any, too. Raises `ValueError` saying what would be right.

    Example:
        >>> parse(tuple[int, ...], "1,2,1e3")
        (1, 2, 1000)
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        for choice in args:
            if text == str(choice):
                return choice
        raise ValueError(describe_type(hint))
    if origin in (typing.Union, types.UnionType):
        if types.NoneType in args and text == "None":
            return None
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        try:
            return parse(inner, text)
        except ValueError as error:
            raise ValueError(f"{error} or None") from None
    if origin is tuple:
        texts = [] if text == "None" and args[-1] is Ellipsis else text.split(",")
        if args[-1] is not Ellipsis and len(texts) != len(args):
            raise ValueError(f"{_tuple_of(args, describe_type(args[0]))} (separated by commas)")
        values = []
        for part in texts:
            try:
                values.append(parse(args[0], part))
            except ValueError as error:
                raise ValueError(f"{_tuple_of(args, error)}, found {shown(part)!r} (separated by commas)") from None
        return tuple(values)
    return _kind(hint).parse(text)


def unfit(hint: Any, value: Any) -> str | None:
    """What would be right, where `value` is not of the type a field is declared with, or beyond its range.

    Example:
        >>> unfit(float, math.inf)
        'a finite number that float32 can hold'
    """
    return _check_of(hint)(value)


@functools.cache  # a planner validates thousands of configurations
def _check_of(hint: Any) -> Callable[[Any], str | None]:
    """`unfit` of one declared type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        checks = tuple(map(_check_of, args))

        def check(value):
            wrong = [check(value) for check in checks]
            return None if None in wrong else " or ".join(wrong)

    elif origin is tuple:
        each, many = _check_of(args[0]), args[-1] is Ellipsis

        def check(value):
            if not isinstance(value, tuple) or not many and len(value) != len(args):
                return _tuple_of(args, describe_type(kind.type if (kind := _kind(args[0])) else args[0]))
            for entry in value:
                if wrong := each(entry):
                    return f"{_tuple_of(args, wrong)}, found {shown(entry)!r}"
            return None

    elif kind := _kind(hint):

        def check(value):
            if type(value) is not kind.type and not is_instance(value, kind.type):
                return describe_type(kind.type)
            return kind.unfit(value)

    else:

        def check(value):
            return None if is_instance(value, hint) else describe_type(hint)

    return check


def _kind(hint: Any) -> Kind | None:
    bare, *notes = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    return next((note for note in notes if isinstance(note, Kind)), _KINDS.get(bare))


def _tuple_of(args: tuple, each: object) -> str:
    return f"a tuple of {'values' if args[-1] is Ellipsis else f'{len(args)} values'}, each {each}"


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The types a dataclass' fields are declared with, kinds included."""
    return typing.get_type_hints(cls, include_extras=True)


def expand_paths(config: Any) -> None:
    """Puts home folders in place of `~` in every path of a frozen dataclass that is being made."""
    for name, hint in hints(type(config)).items():
        value = getattr(config, name)
        if value and _names_paths(hint):
            many = isinstance(value, tuple) and all(isinstance(entry, str) for entry in value)
            new = tuple(map(expand, value)) if many else expand(value) if isinstance(value, str) else value
            object.__setattr__(config, name, new)


@functools.cache
def _names_paths(hint: Any) -> bool:
    return _kind(hint) is PATH or any(map(_names_paths, typing.get_args(hint)))
