"""Orders without arrays and turns of sources, against counting."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.data.mixture import WINDOW, Schedule, shuffled


@given(st.integers(1, 3000), st.lists(st.integers(0, 1 << 40), min_size=1, max_size=3))
def test_an_order_is_a_bijection_and_each_place_knows_its_own(count, key):
    order = shuffled(np.arange(count), count, key)
    assert sorted(order.tolist()) == list(range(count))
    assert shuffled(np.array([count - 1]), count, key) == order[-1:]


def test_orders_are_even_and_unlike_each_other():
    firsts = np.array([shuffled(np.arange(5), 5, (3, epoch)) for epoch in range(4000)])
    for place in range(5):
        assert abs(np.bincount(firsts[:, place], minlength=5) - 800).max() < 120  # 4.7 standard deviations
    long = shuffled(np.arange(10_000), 10_000, (1, 2))
    assert np.mean(np.abs(np.diff(long)) == 1) < 0.002 and abs(np.corrcoef(long, np.arange(10_000))[0, 1]) < 0.05
    assert np.mean(long == shuffled(np.arange(10_000), 10_000, (1, 3))) < 0.002


def test_an_order_takes_no_memory():
    count = 10**15
    found = shuffled(np.array([0, 1, count - 1]), count, (0,))
    assert len(set(found.tolist())) == 3 and (found >= 0).all() and (found < count).all()


def test_the_order_is_the_same_on_every_version():
    """A run that is resumed with another NumPy sees the same rows."""
    assert shuffled(np.arange(12), 12, (0, 0, 0)).tolist() == [5, 0, 1, 10, 6, 4, 3, 9, 2, 7, 8, 11]


def windows(schedule, count, rows):
    turns = schedule.at(np.arange(rows))[0]
    sums = np.cumsum(turns[:, None] == np.arange(len(schedule.counts)), 0)
    return sums[count:] - sums[:-count]


def test_proportions_are_exact_in_every_window():
    schedule = Schedule([5, 3, 2])
    assert (windows(schedule, 1000, 5000) == [500, 300, 200]).all()
    assert (windows(schedule, 10, 100) == [5, 3, 2]).all()
    assert (windows(Schedule([0.7, 0.2, 0.1]), 10, 100) == [7, 2, 1]).all()
    thirds = windows(Schedule([1, 1, 1]), 1000, 5000)
    assert (thirds == thirds[0]).all() and sorted(thirds[0].tolist()) == [333, 333, 334]


@settings(max_examples=50)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_every_window_has_the_nearest_whole_numbers(weights):
    schedule = Schedule(weights)
    found = windows(schedule, WINDOW, 3 * WINDOW)
    exact = np.array(weights) / sum(weights) * WINDOW
    assert (found == found[0]).all() and (found >= 1).all()
    least = exact >= 1
    if least.all():
        assert (np.abs(found[0] - exact) < 1 + 1e-9).all()
    # Up to every row a source is less than one row from its share of the whole numbers.
    turns = schedule.at(np.arange(WINDOW))[0]
    sums = np.cumsum(turns[:, None] == np.arange(len(weights)), 0)
    shares = np.arange(1, WINDOW + 1)[:, None] * found[0] / WINDOW
    assert (np.abs(sums - shares) < 1).all()


def test_rows_before_are_counted():
    schedule = Schedule([5, 3, 2])
    turns, before = schedule.at(np.arange(1234))
    seen = np.zeros(3, int)
    for turn, count in zip(turns, before):
        assert seen[turn] == count
        seen[turn] += 1
    assert [array.tolist() for array in schedule.at(np.array([1233, 7]))] == [[turns[1233], turns[7]], [before[1233], before[7]]]


@pytest.mark.parametrize("weights", [(1, -1), (0, 0), (1, float("nan")), (1, float("inf"))])
def test_weights_that_are_none(weights):
    with pytest.raises(ValueError, match=r"^data.weights=.*must be positive numbers$"):
        Schedule(weights)
