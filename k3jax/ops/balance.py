"""Balanced expert parallelism: which experts get a second copy where, and how many tokens each copy computes."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def plan(counts: Array, ranks: int) -> Array:
    """Tokens of every expert that every rank computes, so that all ranks compute equally many.

    Of E experts, E/R live on each of R ranks, in order. Every rank ends with exactly sum(counts) / R tokens; where
    that is no whole number, the first sum(counts) mod R ranks compute one more. A rank gets copies of at most E/R
    experts, all of which live on one other rank, the largest first, so that they are few.

    Proof: call a rank short of, at, or over its target. While one is short another is over, because the targets sum
    to the tokens. A step moves what the shortest rank lacks from the rank that is furthest over: that one holds more
    than its target, and no target exceeds another by more than one, so it has enough. The short rank is then at its
    target and never changes again, so a rank receives once, from one rank; the giver was over its target, so it has
    not received, so what it gives are tokens of its own E/R experts. Each step settles one rank, and the last one
    settles with its giver.

    The exchange of `apply_experts` does not use it yet: every expert computes at its home.

    Args:
        counts: int [E], tokens routed to each expert, over all ranks. Their sum must fit the dtype.
        ranks: R, which divides E.

    Returns:
        share [E,R] in counts' dtype, >= 0: tokens of expert e that rank r computes. Each row sums to its count.

    Raises:
        ValueError: E is not a multiple of R.

    Example:
        >>> plan(jnp.array([6, 2, 3, 1]), 2)  # rank 1 takes two tokens of expert 0
        Array([[4, 2],
               [2, 0],
               [0, 3],
               [0, 1]], dtype=int32)
    """
    (E,) = counts.shape
    if ranks < 1 or E % ranks:
        raise ValueError(f"ranks: found {ranks}, must divide the number of experts, {E}")
    rank, total = jnp.arange(ranks, dtype=counts.dtype), jnp.sum(counts, dtype=counts.dtype)
    target = total // ranks + (rank < total % ranks).astype(counts.dtype)
    home = jnp.repeat(rank, E // ranks)
    share = jnp.where(home[:, None] == rank[None, :], counts[:, None], 0)

    def settle(_, share):
        lacks = target - jnp.sum(share, axis=0, dtype=counts.dtype)
        short, over = jnp.argmax(lacks), jnp.argmin(lacks)
        held = share[:, over]
        largest_first = jnp.argsort(-held)
        ordered = held[largest_first]
        before = jnp.cumsum(ordered, dtype=counts.dtype) - ordered
        moved = jnp.zeros_like(held).at[largest_first].set(jnp.clip(lacks[short] - before, 0, ordered))
        return share.at[:, over].add(-moved).at[:, short].add(moved)

    return lax.fori_loop(0, ranks - 1, settle, share)
