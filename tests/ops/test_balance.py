"""The plan of redundant experts: its promises hold for any counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.ops.balance import plan

make_plan = jax.jit(plan, static_argnums=1)
SIZES = [(1, 1), (4, 1), (4, 4), (8, 2), (12, 3), (16, 8), (30, 5), (64, 8)]  # experts, ranks
any_count = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 50), st.integers(0, 10**7))


def check(counts, ranks):
    """The four promises; the plan."""
    counts = np.asarray(counts, np.int32)
    each = len(counts) // ranks
    share = np.asarray(make_plan(counts, ranks))
    assert share.dtype == np.int32 and share.shape == (len(counts), ranks) and (share >= 0).all()
    assert (share.sum(1) == counts).all()
    least, more = divmod(int(counts.sum()), ranks)
    assert share.sum(0).tolist() == [least + (rank < more) for rank in range(ranks)]
    away = (share > 0) & (np.arange(len(counts))[:, None] // each != np.arange(ranks)[None])
    assert (away.sum(0) <= each).all()
    assert all(len({expert // each for expert in np.flatnonzero(column)}) <= 1 for column in away.T)
    return share


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SIZES), st.data())
def test_every_rank_computes_equally_many_with_few_copies(sizes, data):
    experts, ranks = sizes
    check(data.draw(st.lists(any_count, min_size=experts, max_size=experts)), ranks)


@pytest.mark.parametrize("experts, ranks", SIZES)
def test_extremes(experts, ranks):
    for expert in {0, experts // 2, experts - 1}:  # all on one expert
        check(np.eye(experts, dtype=int)[expert] * 1001, ranks)
    idle = np.full(experts, 17)
    idle[: experts // ranks] = 0  # one rank has nothing to do
    check(idle, ranks)
    even = np.full(experts, 5)
    assert (check(even, ranks) == np.repeat(np.eye(ranks, dtype=int), experts // ranks, axis=0) * 5).all()
    check(np.zeros(experts), ranks)


def test_slight_surpluses_pass_from_rank_to_rank():
    """Three ranks with one token too many each: were they to give it to the last, that would need three copies."""
    share = check([5, 5, 5, 1], 4)
    assert (share > 0).sum() <= 8


def test_the_largest_experts_move():
    share = check([1, 2, 9, 0, 0, 0], 2)  # six tokens go from rank 0 to rank 1
    assert share.tolist() == [[1, 0], [2, 0], [3, 6], [0, 0], [0, 0], [0, 0]]


def test_example():
    assert plan(jnp.array([6, 2, 3, 1], jnp.int32), 2).tolist() == [[4, 2], [2, 0], [0, 3], [0, 1]]


@pytest.mark.parametrize("ranks", [0, 3])
def test_refuses_ranks_that_do_not_divide(ranks):
    with pytest.raises(ValueError, match=f"ranks: found {ranks}, must divide the number of experts, 4"):
        plan(jnp.zeros(4, jnp.int32), ranks)
