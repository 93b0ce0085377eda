"""Packing: nothing lost, nothing over, full rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.data.packing import Packer


def rows_of(sizes, room, buffer):
    packer = Packer(room, buffer)
    rows = [row for number, size in enumerate(sizes) for row in packer.push(size, (size, number))]
    return rows + list(packer.finish())


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 8))
def test_every_item_is_in_one_row_that_has_room(sizes, buffer):
    rows = rows_of(sizes, 50, buffer)
    assert sorted(number for row in rows for _, number in row) == list(range(len(sizes)))
    assert all(0 < sum(size for size, _ in row) <= 50 for row in rows)
    assert rows == rows_of(sizes, 50, buffer)


def test_best_fit_by_hand():
    assert [[size for size, _ in row] for row in rows_of([3, 2, 3, 1, 1], 4, 256)] == [[3, 1], [2, 1], [3]]
    # A full buffer gives a row at once: the item that waits longest, with the largest that fits.
    packer = Packer(4, buffer=2)
    given = [list(packer.push(size, size)) for size in (1, 2, 3, 2, 4)]
    assert given == [[], [], [], [[1, 3]], [[2, 2]]]


@pytest.mark.parametrize("buffer", [1, 4])
def test_what_waits_is_bounded(buffer):
    packer, waiting = Packer(10, buffer), 0
    for size in np.random.default_rng(0).integers(1, 11, 500).tolist():
        waiting += size - sum(map(sum, packer.push(size, size)))
        assert waiting < 10 * buffer


def test_rows_of_conversations_are_full():
    rng = np.random.default_rng(0)
    even, skewed = rng.integers(20, 4001, 4000), np.exp(rng.uniform(np.log(20), np.log(4000), 8000)).astype(int)
    for tokens in (even, skewed):
        rows = rows_of((tokens - 1).tolist(), 4096, 256)
        assert sum(size for row in rows for size, _ in row) / len(rows) / 4096 >= 0.97


@pytest.mark.parametrize("size", [0, 5])
def test_items_that_fit_no_row(size):
    with pytest.raises(ValueError, match=f"an item of {size} does not fit a row of 4"):
        Packer(4).push(size, "x")
