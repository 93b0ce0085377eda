"""Documents packed whole into rows: best fit over a bounded buffer."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Packer(Generic[Item]):
    """Puts items of sizes 1 to `room` into rows that hold at most `room`; the rows depend on the items' order alone.

    A row begins with the item that has waited longest and takes the largest that still fits, again and again. As many items wait as
    fill `buffer` rows.

    Example:
        >>> packer = Packer(room=4)
        >>> [row for item in (3, 2, 3, 1, 1) for row in packer.push(item, str(item))]
        []
        >>> list(packer.finish())
        [['3', '1'], ['2', '1'], ['3']]
    """

    def __init__(self, room: int, buffer: int = 256):
        self._room, self._most = room, buffer * room
        self._total = self._pushed = 0
        self._waiting: dict[int, Item] = {}  # by number, in the order of arrival
        self._order: deque[int] = deque()  # numbers; those that were taken are passed over
        self._sizes: list[tuple[int, int]] = []  # (size, number), sorted
        self._size_of: dict[int, int] = {}

    def push(self, size: int, item: Item) -> Iterator[list[Item]]:
        """Takes an item; gives the rows that the buffer has no room for any more. Raises ValueError for one that fits no row."""
        if not 0 < size <= self._room:
            raise ValueError(f"an item of {size} does not fit a row of {self._room}")
        number = self._pushed
        self._pushed += 1
        bisect.insort(self._sizes, (size, number))
        self._waiting[number], self._size_of[number] = item, size
        self._order.append(number)
        self._total += size
        return self._rows(self._most)

    def finish(self) -> Iterator[list[Item]]:
        """The rows of all that waits."""
        return self._rows(1)

    def _rows(self, most: int) -> Iterator[list[Item]]:
        rows = []
        while self._total >= most:
            rows.append(self._row())
        return iter(rows)

    def _row(self) -> list[Item]:
        while self._order[0] not in self._waiting:
            self._order.popleft()
        number = self._order[0]
        place = bisect.bisect_left(self._sizes, (self._size_of[number], number))
        left, taken = self._room, []
        while place >= 0:
            size, number = self._sizes.pop(place)
            del self._size_of[number]
            left, self._total = left - size, self._total - size
            taken.append(self._waiting.pop(number))
            place = bisect.bisect_left(self._sizes, (left + 1,)) - 1  # the last, and so the largest, that fits
        return taken
