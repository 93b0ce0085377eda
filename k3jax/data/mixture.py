"""Which row of which source comes when: pure functions of the row's number, in memory that no source's size enters.

Rows of all batches are numbered in one sequence: row b of batch `step` has number n = step * batch_size + b.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

WINDOW = 1000
"""In every window of so many rows each source has the same number of rows."""


def shuffled(places: np.ndarray, count: int, key: Sequence[int]) -> np.ndarray:
    """A bijection of 0 .. count-1 onto itself, another one for every key, at `places` (int64, any shape).

    A Feistel network on the pairs (x, y) of side s = ceil(sqrt(count)): x += F(y), y += F(x), modulo s, six times over, walked on while the
    place it leads to is outside (at most 2 sqrt(count) + 1 are).

    Example:
        >>> sorted(shuffled(np.arange(5), 5, (7,)).tolist())
        [0, 1, 2, 3, 4]
    """
    side = np.uint64(_root(count))
    keys = np.random.SeedSequence(list(key)).generate_state(12, np.uint64)
    out = np.asarray(places, np.uint64).copy()
    outside = np.ones(out.shape, bool)
    while outside.any():
        x, y = np.divmod(out[outside], side)
        for first, second in keys.reshape(6, 2):
            x = (x + _mixed(y ^ first) % side) % side
            y = (y + _mixed(x ^ second) % side) % side
        out[outside] = x * side + y
        outside &= out >= count
    return out.astype(np.int64)


def _root(count: int) -> int:
    """ceil(sqrt(count)), and at least 1."""
    root = max(1, round(count**0.5))
    while root * root < count:
        root += 1
    return root


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every bit of the input changes half of the bits of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Schedule:
    """Sources in turn: which one the row with number n is of, and how many rows of that source came before.

    Weights become whole rows of `WINDOW` (at least one; those with the largest remainder are rounded up), and the turns repeat after that
    many or fewer: so every window of `WINDOW` rows, wherever it begins, has exactly these. Up to any row a source is less than one row
    from its share.

    Example:
        >>> Schedule([5, 3, 2]).turns.tolist()
        [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]
    """

    def __init__(self, weights: Sequence[float]):
        """Raises ValueError, naming data.weights, for weights that are not positive."""
        for weight in weights:
            if not 0 < weight < float("inf"):
                raise ValueError(f"data.weights={','.join(map(str, weights))}: found {weight}, must be positive numbers")
        if len(weights) > WINDOW:
            raise ValueError(f"data.weights: found {len(weights)} sources, must be at most {WINDOW}")
        counts = _apportion(weights, WINDOW)
        counts //= np.gcd.reduce(counts)
        period = int(counts.sum())
        turns, done = np.empty(period, np.int64), np.zeros(len(counts), np.int64)
        for n in range(period):
            # Row k of a source may come from k/share on and must by (k+1)/share: the one that is due first.
            due = -(-(done + 1) * period // counts)
            due[(done == counts) | (done * period // counts > n)] = 2 * period
            turns[n] = np.argmin(due)
            done[turns[n]] += 1
        one = np.arange(len(counts)) == turns[:, None]
        self.turns, self.counts = turns, counts
        self._before = (np.cumsum(one, 0) - one)[np.arange(period), turns]

    def at(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, rows of that source before) of the rows with these numbers."""
        rounds, turn = np.divmod(numbers, len(self.turns))
        source = self.turns[turn]
        return source, rounds * self.counts[source] + self._before[turn]


def _apportion(weights: Sequence[float], total: int) -> np.ndarray:
    """Whole numbers that add up to `total`, as near to the weights' shares as can be, none of them 0."""
    # Decimal, as they were written: 0.7, 0.2 and 0.1 add up to 1.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight * total / sum(exact) for weight in exact]
    counts = np.array([max(1, int(share)) for share in shares])
    while counts.sum() != total:
        step = 1 if counts.sum() < total else -1
        gains = [step * (share - int(count)) if count + step >= 1 else -np.inf for share, count in zip(shares, counts)]
        counts[int(np.argmax([float(gain) for gain in gains]))] += step
    return counts
