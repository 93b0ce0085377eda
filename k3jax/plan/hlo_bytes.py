"""Bytes that a compiled program reads and writes, loops counted as often as they run, from its HLO text.

The compiler's own count, `cost_analysis()["bytes accessed"]`, by the same rules, takes a loop's body once.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from k3jax.plan import hlo

# What moves nothing by itself.
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency get-dimension-size iota".split()
)
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "AsyncCollectiveDone")
_SLICES = ("dynamic-slice", "slice", "gather")
_ESTIMATE = re.compile(r'"bytes_accessed":"?(\d+)')
_PARAMETER = re.compile(r"(\d+)\)")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ARRAY = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")


class Access(NamedTuple):
    """bytes: read and written. hbm: of those, what lies in the device's main memory and not beside its cores."""

    bytes: int
    hbm: int

    def __add__(self, other: Access) -> Access:
        return Access(self.bytes + other.bytes, self.hbm + other.hbm)

    def times(self, n: int) -> Access:
        return Access(n * self.bytes, n * self.hbm)


_NONE = Access(0, 0)


def accessed(text: str, once: bool = False) -> Access:
    """Bytes that one run of a program accesses, on one device.

    A slice counts as what it takes, an update in place as what it writes, a kernel as what it says of itself. Of a
    conditional the most expensive branch counts, but for branches with a loop that does not say how often it runs:
    those hold what only an unbalanced load needs.

    Args:
        once: count loops once, as `cost_analysis` does.

    Example:
        >>> accessed(jax.jit(step).lower(state, batch).compile().as_text())
        Access(bytes=1536, hbm=1536)
    """
    computations, entry = hlo.parse(text)

    @cache
    def whole(name: str) -> Access | None:
        """None: a loop does not tell."""
        total, shapes = _NONE, {}
        for result, shape, kind, rest in computations[name]:
            shapes[result] = shape
            called = [whole(inner) for inner in hlo.called(rest)] if kind in ("call", "conditional", "async-start") else []
            if kind == "conditional":
                told = [branch for branch in called if branch is not None]
                total += max(told, default=_NONE)
            elif called:
                if None in called:
                    return None
                total = sum(called, total)
            elif kind == "while":
                trips = 1 if once else hlo.trip_count(computations, name, rest)
                body = whole(_BODY.search(rest)[1])
                if trips is None or body is None:
                    return None
                total += body.times(trips)
            else:
                total += _one(computations, shapes, shape, kind, rest)
        return total

    found = whole(entry)
    if found is None:
        raise ValueError("program: found a loop that does not say how often it runs")
    return found


def _one(computations, shapes, shape: str, kind: str, rest: str) -> Access:
    """Of one instruction."""
    if kind in _FREE or kind.endswith("-done"):
        return _NONE
    operands = [shapes[operand] for operand in hlo.operands(rest) if operand in shapes]
    if kind == "fusion":
        return _fusion(computations, _CALLS.search(rest)[1], operands, shape)
    if kind == "custom-call":
        if _TARGET.search(rest)[1] in _FREE_CALLS:
            return _NONE
        if told := _ESTIMATE.search(rest):
            return Access(int(told[1]), int(told[1]))
    if kind in ("copy-start", "slice-start"):  # (copy, original, ...) and ((original), slice, ...)
        made = _of(_ARRAY.findall(shape)[kind == "slice-start"])
        return made + Access(made.bytes, made.bytes if _of(operands[0]).hbm else 0)
    if kind in _SLICES:
        return _of(shape).times(2)
    if kind == "dynamic-update-slice":
        return _of(operands[1]).times(2)
    return sum(map(_of, operands), _of(shape))


def _fusion(computations, name: str, operands: list[str], shape: str) -> Access:
    """Of its operands what is used, and its result."""
    total = _NONE
    for operand, used in zip(operands, _uses(computations, name), strict=True):
        whole = _of(operand)
        share = whole.bytes if used is None else min(used, whole.bytes)
        total += Access(share, share if whole.hbm else 0)
    inside = {result: (form, kind, hlo.operands(rest)) for result, form, kind, rest in computations[name]}

    def written(name: str) -> int:
        form, kind, given = inside[name]
        if kind == "bitcast":
            return written(given[0])
        if kind == "tuple":
            return sum(map(written, given))
        return hlo.size(inside[given[1]][0] if kind == "dynamic-update-slice" else form)

    size = written(computations[name][-1][0])
    return total + Access(size, 0 if "S(1)" in shape else size)


def _uses(computations, name: str) -> list[int | None]:
    """Bytes that a fused computation uses of each parameter; None for all of it."""
    users, numbers = {}, {}
    for result, shape, kind, rest in computations[name]:
        if kind == "parameter":
            numbers[int(_PARAMETER.match(rest)[1])] = result
            continue
        for place, operand in enumerate(hlo.operands(rest)):
            users.setdefault(operand, []).append((result, shape, kind, rest, place))

    def used(value: str) -> int | None:
        total = 0
        for user, shape, kind, rest, place in users.get(value, ()):
            if kind == "bitcast":
                part = used(user)
            elif kind in _SLICES and place == 0:
                part = hlo.size(shape)
            elif kind == "dynamic-update-slice" and place == 0:
                part = 0  # written in place
            elif kind == "fusion":
                part = _uses(computations, _CALLS.search(rest)[1])[place]
            else:
                part = None
            if part is None:
                return None
            total += part
        return total

    return [used(numbers[number]) for number in sorted(numbers)]


def _of(shape: str) -> Access:
    """Of a value: all of it. Beside the cores is where its layout says S(1)."""
    total = hlo.size(shape)
    return Access(total, sum(hlo.size(part) for part in _ARRAY.findall(shape) if "S(1)" not in part))
