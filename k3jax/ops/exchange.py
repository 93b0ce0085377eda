"""Tokens to the devices that hold their experts, and back: the two exchanges of `apply_experts`.

Both have static shapes and send only latents. An exchange works in rounds, each of which takes a window of the rows;
the first is sized for a balanced load, and whatever does not fit goes in further, smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.grouped import Pairs, sort_pairs, to_rows, to_tokens


class Rounds(NamedTuple):
    """An exchange.

    run: (x, weights, experts, pairs, base, size) -> y [n,L], what the rows in the window [base, base + size) add to the
        result; size is static, base is not.
    first, further: sizes of the first round and of all others. most: rows that there can be.
    needed: how many there are, where there are most. dropped: rows of this device beyond the first round.
    """

    run: Callable[..., Array]
    first: int
    further: int
    most: int
    needed: Array
    dropped: Array


def _sizes(balanced: float, most: int) -> tuple[int, int]:
    """Rows of the first round, for a balanced load and three sigma of its spread under random routing, and of others."""
    eights = lambda rows: min(most, 8 * math.ceil(rows / 8))  # noqa: E731
    return eights(balanced + 3 * balanced**0.5), eights(balanced / 4)


# ---- fixed sizes -------------------------------------------------------------------------------------------


def fixed(local: Callable[..., Array], axes: tuple[str, ...], n: int, k: int, pairs: Pairs) -> Rounds:
    """Equally many rows to every device, by `all_to_all`. A window is of the rows from one device to another.

    `local` is what a device does with the rows it receives, a form of `k3jax.ops.grouped` without its unit.
    """
    ways = lax.axis_size(axes)
    most = n * min(k, pairs.counts.size // ways)
    first, further = _sizes(n * k / ways, most)
    rows_to = jnp.sum(pairs.counts.reshape(ways, -1), axis=1, dtype=jnp.int32)
    dropped = jnp.sum(jnp.maximum(rows_to - first, 0), dtype=jnp.int32)
    return Rounds(partial(_fixed_round, local, axes), first, further, most, jnp.max(rows_to), dropped)


def _fixed_round(local, axes, x, weights, experts, pairs, base, size):
    n, k, ways = x.shape[0], weights.shape[1], lax.axis_size(axes)
    E = pairs.counts.size // ways  # on each device
    rows_to = jnp.sum(pairs.counts.reshape(ways, E), axis=1, dtype=jnp.int32)
    leaves = jnp.cumsum(rows_to, dtype=jnp.int32) - rows_to
    rank = base + jnp.arange(size, dtype=jnp.int32)
    pair = pairs.order[jnp.minimum(leaves[:, None] + rank[None, :], n * k - 1)]
    pair = jnp.where(rank[None, :] < rows_to[:, None], pair, n * k).reshape(-1)
    device = jnp.minimum(pairs.expert // E, ways - 1)
    place = pairs.position - leaves[device] - base
    inside = (place >= 0) & (place < size) & (pairs.expert < ways * E)
    slot = jnp.where(inside, device * size + place, ways * size).reshape(n, k)

    send = lambda rows: lax.all_to_all(rows.reshape(ways, size, -1), axes, 0, 0).reshape(ways * size, -1)  # noqa: E731
    expert = jnp.take(pairs.expert % E, pair, mode="fill", fill_value=E)
    out = _received(local, send(to_rows(x, pair, slot)), send(expert), experts)
    return to_tokens(send(out), weights, pair, slot)


def _received(local, rows, expert, experts):
    """Rows [m,L] through their one expert each, [m,1], numbered on this device; zeros where there is none."""
    E = experts[0].shape[0]
    pairs = sort_pairs(expert, expert[:, 0] < E, E)
    return local(rows, jnp.ones(expert.shape, rows.dtype), experts, pairs)


# ---- ragged ------------------------------------------------------------------------------------------------


def ragged(local: Callable[..., Array], axes: tuple[str, ...], n: int, k: int, pairs: Pairs) -> Rounds:
    """Only rows that exist, by `ragged_all_to_all`. A window is of the rows that arrive at a device.

    Those of device 0 arrive first, by expert, then those of device 1, and so on: all know where each device's rows
    lie there, because all know all counts.
    """
    ways = lax.axis_size(axes)
    most = ways * n * min(k, pairs.counts.size // ways)
    first, further = _sizes(n * k, most)
    _, here, rows_to, _, arrives = _traffic(axes, pairs)
    dropped = jnp.sum(rows_to[here] - jnp.clip(first - arrives[here], 0, rows_to[here]), dtype=jnp.int32)
    needed = jnp.max(jnp.sum(rows_to, axis=0, dtype=jnp.int32))
    return Rounds(partial(_ragged_round, local, axes), first, further, most, needed, dropped)


def _traffic(axes, pairs):
    """counts [from, to, expert there], this device, rows [from, to], and where those start at the sender and receiver."""
    counts = lax.all_gather(pairs.counts.reshape(lax.axis_size(axes), -1), axes)
    rows_to = jnp.sum(counts, axis=2, dtype=jnp.int32)
    before = lambda axis: jnp.cumsum(rows_to, axis=axis, dtype=jnp.int32) - rows_to  # noqa: E731
    return counts, lax.axis_index(axes), rows_to, before(1), before(0)


def _ragged_round(local, axes, x, weights, experts, pairs, base, size):
    (n, L), k = x.shape, weights.shape[1]
    counts, here, rows_to, leaves, arrives = _traffic(axes, pairs)
    E = counts.shape[2]
    pair, slot = pairs.in_order(), pairs.slots((n, k))

    clipped = lambda at: jnp.clip(at, base, base + size)  # noqa: E731
    sizes = clipped(arrives + rows_to) - clipped(arrives)
    outgoing = jnp.where(sizes > 0, leaves + clipped(arrives) - arrives, 0)
    incoming = jnp.where(sizes > 0, clipped(arrives) - base, 0)
    room, home = jnp.zeros((size, L), x.dtype), jnp.zeros((n * k, L), x.dtype)
    rows = to_rows(x, pair, slot)
    rows = _send(rows, room, outgoing[here], sizes[here], incoming[here], sizes[:, here], axes)
    ends = jnp.cumsum(counts[:, here].reshape(-1), dtype=jnp.int32)  # of the rows of every (device, expert)
    group = jnp.searchsorted(ends, base + jnp.arange(size, dtype=jnp.int32), side="right").astype(jnp.int32)
    out = _received(local, rows, jnp.where(group < ends.size, group % E, E)[:, None], experts)
    out = _send(out, home, incoming[:, here], sizes[:, here], outgoing[:, here], sizes[here], axes)
    return to_tokens(out, weights, pair, slot)


def _send(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, axes):
    """`lax.ragged_all_to_all`, which CPUs lack."""
    arguments = operand, output, input_offsets, send_sizes, output_offsets, recv_sizes
    native = partial(lax.ragged_all_to_all, axis_name=axes)
    return lax.platform_dependent(*arguments, cpu=partial(_gathered, axes), default=native)


def _gathered(axes, operand, output, input_offsets, send_sizes, output_offsets, recv_sizes):
    """The same by gathering everything everywhere: what it means, for tests on CPUs."""
    del recv_sizes
    here = lax.axis_index(axes)
    everything = lax.all_gather(operand, axes)
    starts, sizes, targets = lax.all_gather((input_offsets, send_sizes, output_offsets), axes)
    row = jnp.arange(output.shape[0], dtype=jnp.int32)[:, None]
    offset = row - targets[None, :, here]
    sent = (offset >= 0) & (offset < sizes[None, :, here])
    source = jnp.argmax(sent, axis=1)
    index = jnp.take_along_axis(starts[None, :, here] + offset, source[:, None], axis=1)[:, 0]
    index = jnp.clip(index, 0, operand.shape[0] - 1)
    return jnp.where(jnp.any(sent, axis=1)[:, None], everything[source, index], output)
