"""What a compiled program communicates, read from its HLO text (`compiled.as_text()`)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

# Bytes a device sends of n bytes of operands, by the usual algorithm among R devices (rings, direct exchange).
SENT = {
    "all-gather": lambda n, R: n * (R - 1),
    "reduce-scatter": lambda n, R: n * (R - 1) // R,
    "all-reduce": lambda n, R: 2 * n * (R - 1) // R,
    "all-to-all": lambda n, R: n * (R - 1) // R,
    "ragged-all-to-all": lambda n, R: n * (R - 1) // R,
    "collective-permute": lambda n, R: n,
}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_SEVERAL_CALLED = re.compile(r"\b(?:branch_computations|called_computations)=\{(.*?)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_ALL = re.compile(r"replica_groups=\{\}|^(?!.*replica_groups)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")


class Collective(NamedTuple):
    """One collective operation: `sent` bytes a device in one execution, among the devices of one of `groups`.

    Devices are numbers in the order of the program's mesh. A `collective-permute` has its (source, target) pairs.
    """

    kind: str
    sent: int
    groups: tuple[tuple[int, ...], ...]

    def axes(self, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """Axes of `mesh` (name -> size, in order) along which the devices of a group differ."""
        places = np.unravel_index(np.asarray(self.groups), tuple(mesh.values()))
        return tuple(axis for axis, place in zip(mesh, places, strict=True) if (place != place[:, :1]).any())


def collectives(text: str) -> Counter[Collective]:
    """How often one run of a compiled program executes each collective that leaves the device.

    A loop's body counts as often as the loop runs. Of a conditional, the branch that sends the least counts:
    what is sent in any case.

    Raises:
        ValueError: a loop that runs in any case, communicates and does not say how often it runs.

    Example:
        >>> collectives(jax.jit(step).lower(state, batch).compile().as_text())
        Counter({Collective(kind='all-gather', sent=1536, groups=((0, 1, 2, 3),)): 12})
    """
    computations, entry = parse(text)
    devices = math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))

    @cache
    def executed(name: str) -> Counter[Collective] | str:
        """Or which loop does not tell."""
        total, sizes = Counter(), {}
        for result, shape, kind, rest in computations[name]:
            sizes[result] = size(shape)
            kind = kind.removesuffix("-start")
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):  # a fusion: how TPUs write it
                kind = "reduce-scatter"
            if kind in SENT:
                groups = _groups(rest, devices)
                given = [sizes[operand] for operand in operands(rest)]
                # Ragged, at most all rows of the source, or of the target behind it; the other operands say where.
                moved = min(given[:2]) if kind == "ragged-all-to-all" else sum(given)
                sent = SENT[kind](moved, len(groups[0]))
                if sent and any(len(set(group)) > 1 for group in groups):
                    total[Collective(kind, sent, groups)] += 1
            inner = [executed(computation) for computation in called(rest)]
            if kind == "conditional":
                told = [branch for branch in inner if not isinstance(branch, str)]
                inner = [min(told, key=sent_bytes)] if told else inner
            if unknown := [branch for branch in inner if isinstance(branch, str)]:
                return unknown[0]
            inside = sum(inner, Counter())
            trips = trip_count(computations, name, rest) if kind == "while" else 1
            if inside and trips is None:
                return result
            for collective, times in inside.items():
                total[collective] += times * trips
        return total

    total = executed(entry)
    if isinstance(total, str):
        raise ValueError(f"{total}: a loop that communicates and does not say how often it runs")
    return total


def sent_bytes(executed: Counter[Collective]) -> int:
    """Bytes a device sends by all of them."""
    return sum(times * collective.sent for collective, times in executed.items())


def sent_by_kind(text: str) -> dict[str, int]:
    """Bytes a device sends in one run of a compiled program, by kind of collective; those of `SENT`, in that order.

    Example:
        >>> sent_by_kind(jax.jit(step).lower(state, batch).compile().as_text())["all-to-all"]
        98304
    """
    total = dict.fromkeys(SENT, 0)
    for collective, times in collectives(text).items():
        total[collective.kind] += times * collective.sent
    return total


def trip_count(computations, name: str, rest: str) -> int | None:
    """How often a loop of the computation `name` runs: what it says itself, or, for TPUs, what its condition tells, which
    is that a counter from a constant, one more each time, is below another constant. None if neither tells."""
    if told := _TRIPS.search(rest):
        return int(told[1])
    inside = {result: (kind, rest) for result, _, kind, rest in computations[_CONDITION.search(rest)[1]]}
    compared = [rest for kind, rest in inside.values() if kind == "compare" and "direction=LT" in rest]
    if len(compared) != 1:
        return None
    counter, limit = (inside[operand] for operand in operands(compared[0]))
    if counter[0] != "get-tuple-element" or limit[0] != "constant":
        return None
    outside = {result: (kind, rest) for result, _, kind, rest in computations[name]}
    first = outside[operands(rest)[0]]
    if first[0] != "tuple":
        return None
    first = outside[operands(first[1])[int(_INDEX.search(counter[1])[1])]]
    while first[0] in ("copy", "bitcast"):
        first = outside[operands(first[1])[0]]
    return int(limit[1].split(")")[0]) - int(first[1].split(")")[0]) if first[0] == "constant" else None


@lru_cache(maxsize=2)
def parse(text: str):
    """{computation: [(result, shape, operation, what follows its opening bracket)]}, and the entry's name."""
    computations, entry, current = {}, None, None
    for line in re.sub(r"/\*.*?\*/", "", text).split("\n"):  # /*index=5*/
        if head := _COMPUTATION.match(line):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            current.append(instruction.groups())
    return computations, entry


def size(shape: str) -> int:
    """Bytes of an array, or a tuple of arrays: f32[8,128]{1,0} has 4096."""
    return sum(
        math.prod(int(n) for n in sizes.split(",") if n) * _bits(dtype) // 8
        for dtype, sizes in re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    )


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8 if dtype == "pred" else 0  # a token has none


def operands(rest: str) -> list[str]:
    """Names of an instruction's operands, from what follows its opening bracket."""
    inside = re.split(r"\)(?:,|$)", rest, maxsplit=1)[0]
    return [operand.split()[-1].lstrip("%") for operand in inside.split(", ") if operand]


def called(rest: str) -> list[str]:
    """Names of the computations that an instruction runs."""
    several = [name.lstrip("%") for names in _SEVERAL_CALLED.findall(rest) for name in names.split(", ")]
    return _CALLED.findall(rest) + several


def _groups(rest: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """Who communicates with whom, in any of the four ways it is written, here for (0, 2), (1, 3) of four devices.

    {{0,2},{1,3}}; or [2,2]<=[2,2]T(1,0), the numbers 0..3 as 2 x 2, transposed, in 2 groups of 2; or
    mesh['a'=2,'b'=2] {'a'}, along an axis of a mesh, whose devices may be told as device_ids=([2,2]T(1,0)); or
    {}, all.
    """
    if listed := _LISTED.search(rest):
        groups = [group.split(",") for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    elif iota := _IOTA.search(rest):
        groups = _numbers(iota[3]).reshape(int(iota[1]), int(iota[2]))
    elif along := _AXES.search(rest):
        groups = _along(*along.groups())
    elif _ALL.search(rest):
        groups = [range(devices)]
    else:
        raise ValueError(f"replica_groups: found {rest.split('replica_groups=')[1][:60]}, which is in no known form")
    return tuple(tuple(int(device) for device in group) for group in groups)


def _numbers(written: str) -> np.ndarray:
    """0, 2, 1, 3 of either 0,2,1,3 or [2,2]T(1,0)."""
    first, order = ([int(n) for n in re.findall(r"\d+", part)] for part in written.partition("T")[::2])
    if not written.startswith("["):
        return np.array(first)
    numbers = np.arange(math.prod(first)).reshape(first)
    return numbers.transpose(order or range(len(first))).ravel()


def _along(mesh: str, devices: str | None, axes: str) -> np.ndarray:
    """Groups [groups, devices of one] along axes or parts of them: of 'a'=8, 'a':(2)4 is the part that varies fastest."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    # Every axis as three, of which the one in the middle is split over the group.
    parts, chosen = {name: (size, 1, 1) for name, size in sizes.items()}, []
    for name, outer, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes):
        outer, size = int(outer or 1), int(size or sizes[name])
        parts[name] = (outer, size, sizes[name] // (outer * size))
        chosen.append(3 * list(sizes).index(name) + 1)
    shape = [n for part in parts.values() for n in part]
    ids = np.arange(math.prod(shape)) if devices is None else _numbers(devices)
    ids = np.moveaxis(ids.reshape(shape), chosen, range(-len(chosen), 0))
    return ids.reshape(-1, math.prod(ids.shape[-len(chosen) :]))
