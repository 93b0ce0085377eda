"""Experts of one device: each token through the experts chosen for it, as matrix products grouped by expert.

Three forms of one function. `blocks` loops over experts and blocks of their rows: it multiplies hardly any empty row, what
a block works on stays in a processor's caches, and of all rows only the hidden units are kept. `ragged_dots` leaves the
grouping to `lax.ragged_dot`, and `plain` the derivatives to JAX as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from k3jax.derivative import by_hand
from k3jax.ops import packed
from k3jax.ops.kda import accumulator
from k3jax.ops.packed import Packed

# Rows of a block: a quarter of a balanced load, for an expert's last block is half empty on average, within limits
# between which they multiply about equally fast (2 cores, L = F = 512).
BLOCKS = (64, 192)


class Pairs(NamedTuple):
    """The (token, choice) pairs of this device, n k of them, in the order of their experts.

    order: [nk] pairs by expert, in order of token, those without a token last. position: [nk] its inverse.
    expert: [nk] of every pair, E where there is no token. counts, first: [E] rows of every expert, and where they start.
    """

    order: Array
    position: Array
    expert: Array
    counts: Array
    first: Array

    def in_order(self) -> Array:
        """[nk]: `order`, with nk for those that have no token."""
        nk = self.order.size
        there = jnp.arange(nk, dtype=jnp.int32) < jnp.sum(self.counts, dtype=jnp.int32)
        return jnp.where(there, self.order, nk)

    def slots(self, shape: tuple[int, int]) -> Array:
        """[n,k]: the row of every pair among all in order; far beyond the last where there is no token."""
        return jnp.where(self.expert < self.counts.size, self.position, 2**30).reshape(shape)


def sort_pairs(indices: Array, valid: Array, num_experts: int) -> Pairs:
    """indices [n,k] and valid [n] as `Pairs`."""
    expert = jnp.where(valid[:, None], indices, num_experts).astype(jnp.int32).reshape(-1)
    order = _sorted_by(expert, num_experts + 1)
    position = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    return Pairs(order, position, expert, counts, jnp.cumsum(counts, dtype=jnp.int32) - counts)


def _sorted_by(group: Array, groups: int) -> Array:
    """Indices of [m] numbers below `groups`, in their order, equal ones as they come."""
    m = group.size
    if groups * m > 2**32:
        return jnp.argsort(group, stable=True).astype(jnp.int32)
    # TPUs compile a sort of numbers alone five times as fast as one that carries indices.
    key = group.astype(jnp.uint32) * np.uint32(m) + jnp.arange(m, dtype=jnp.uint32)
    return (lax.sort(key, is_stable=False) % np.uint32(m)).astype(jnp.int32)


# ---- a loop over blocks ------------------------------------------------------------------------------------


@partial(by_hand, nondiff_argnums=(0,))
def blocks(unit: Callable[[Array, Array], Array], x: Array, weights: Array, experts, pairs: Pairs) -> Array:
    """y_i = sum_j weights_ij w2 unit(w1 x_i, w3 x_i) with the matrices of the j-th expert of token i.

    Args:
        unit: (gate [m,F], up [m,F]) -> [m,F].
        x: [n,L]. weights: [n,k]. experts: w1, w3 [E,F,L] and w2 [E,L,F], or three `Packed`. pairs: of n k.

    Returns:
        y [n,L] in x's dtype.
    """
    return _forward(unit, x, weights, experts, pairs)[0]


def _forward(unit, x, weights, experts, pairs):
    (n, k), (_, F, L) = weights.shape, experts[0].shape
    size, token, weight = _rows(weights.astype(x.dtype), pairs)

    def expert(w, _, begin, blocks, rows):
        w1, w3, w2 = w

        def block(i, rows):
            at = begin + i * size
            x_b = _tokens(x, _window(token, at, size))
            gate, up = x_b @ w1.T, x_b @ w3.T
            out = (unit(gate, up) @ w2.T) * _window(weight, at, size)[:, None]
            return tuple(map(partial(_write, at=at), rows, (gate, up, out)))

        return lax.fori_loop(0, blocks, block, rows)

    empty = [jnp.zeros((n * k + size, width), x.dtype) for width in (F, F, L)]
    gate, up, out = _over_experts(expert, experts, x.dtype, pairs, size, tuple(empty))
    return sum_slots(out, pairs.slots(weights.shape)), (x, weights, experts, pairs, gate, up)


def _backward(unit, kept, d_y):
    x, weights, experts, pairs, gate, up = kept
    size, token, weight = _rows(weights.astype(x.dtype), pairs)
    wide = accumulator(x.dtype)

    def expert(w, e, begin, blocks, carry):
        w1, w3, w2 = w

        def block(i, carry):
            d_rows, d_weight, sums = carry
            at = begin + i * size
            tokens = _window(token, at, size)
            x_b, d_y_b = _tokens(x, tokens), _tokens(d_y, tokens)
            real = jnp.arange(size, dtype=jnp.int32) < pairs.counts[e] - i * size
            weight_b = jnp.where(real, _window(weight, at, size), 0)[:, None]
            hidden, pull = jax.vjp(unit, _window(gate, at, size), _window(up, at, size))
            d_hidden = d_y_b @ w2
            of_weight = jnp.sum(d_hidden.astype(wide) * hidden.astype(wide), axis=1)
            d_gate, d_up = pull(d_hidden * weight_b)
            products = ((d_gate, x_b), (d_up, x_b), (d_y_b * weight_b, hidden))
            sums = tuple(
                total + lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=wide)
                for total, (a, b) in zip(sums, products, strict=True)
            )
            return _write(d_rows, d_gate @ w1 + d_up @ w3, at), _write(d_weight, of_weight, at), sums

        d_rows, d_weight, d_experts = carry
        none = tuple(jnp.zeros(matrix.shape, wide) for matrix in w)
        d_rows, d_weight, sums = lax.fori_loop(0, blocks, block, (d_rows, d_weight, none))
        put = lambda d, total: lax.dynamic_update_index_in_dim(d, total.astype(d.dtype), e, 0)  # noqa: E731
        return d_rows, d_weight, tuple(map(put, d_experts, sums))

    rows = pairs.order.size + size
    carry = jnp.zeros((rows, x.shape[1]), x.dtype), jnp.zeros(rows, wide), jax.tree.map(jnp.zeros_like, experts)
    d_rows, d_weight, d_experts = _over_experts(expert, experts, x.dtype, pairs, size, carry)
    slots = pairs.slots(weights.shape)
    d_weights = jnp.take(d_weight, slots, mode="fill", fill_value=0).astype(weights.dtype)
    return sum_slots(d_rows, slots), d_weights, d_experts, None


blocks.defvjp(_forward, _backward)


def _rows(weights, pairs):
    """Rows of a block, and the token and weight of every row, a block more than there are; token n where there is none."""
    n, k = weights.shape
    least, most = BLOCKS
    size = min(max(n * k // (4 * pairs.counts.size), least), most, n)
    size += -size % 8
    pair = jnp.pad(pairs.in_order(), (0, size), constant_values=n * k)
    return size, pair // k, jnp.take(weights.reshape(-1), pair, mode="fill", fill_value=0)


def _tokens(x, token):
    return jnp.take(x, token, axis=0, mode="fill", fill_value=0)


def _over_experts(body, experts, dtype, pairs, size, carry):
    """body(matrices, expert, first row, blocks, carry) for every expert that has rows, in order: the rows that a last block
    writes beyond its expert's are written again by those they belong to."""
    used = jnp.argsort(pairs.counts == 0, stable=True).astype(jnp.int32)

    def step(i, carry):
        e = used[i]
        matrices = tuple(
            w.one(e, dtype) if isinstance(w, Packed) else lax.dynamic_index_in_dim(w, e, 0, keepdims=False)
            for w in experts
        )
        return body(matrices, e, pairs.first[e], -(-pairs.counts[e] // size), carry)

    return lax.fori_loop(0, jnp.sum(pairs.counts > 0, dtype=jnp.int32), step, carry)


def _window(rows, at, size):
    return lax.dynamic_slice_in_dim(rows, at, size)


def _write(rows, block, at):
    return lax.dynamic_update_slice_in_dim(rows, block.astype(rows.dtype), at, 0)


# ---- with ragged_dot ---------------------------------------------------------------------------------------

# Rows [m,i] in groups, with one matrix [o,i] a group.
_GROUPED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])


def ragged_dots(unit: Callable[[Array, Array], Array], x: Array, weights: Array, experts, pairs: Pairs) -> Array:
    """As `blocks`."""
    return _ragged(to_rows, to_tokens, unit, x, weights, experts, pairs)


def plain(unit: Callable[[Array, Array], Array], x: Array, weights: Array, experts, pairs: Pairs) -> Array:
    """As `ragged_dots`, in forward mode too: its gradient scatters rows."""
    return _ragged(to_rows.plain, to_tokens.plain, unit, x, weights, experts, pairs)


def _ragged(to_rows, to_tokens, unit, x, weights, experts, pairs):
    pair, slot = pairs.in_order(), pairs.slots(weights.shape)

    def product(rows, w):
        if isinstance(w, Packed) and packed.takes(rows, w):
            from k3jax.ops import packed_tpu  # Pallas takes half a second to import

            return packed_tpu.product(rows, w, pairs.counts)
        w = w.all(rows.dtype) if isinstance(w, Packed) else w
        return lax.ragged_dot_general(rows, w, pairs.counts, _GROUPED)

    w1, w3, w2 = experts
    rows = to_rows(x, pair, slot)
    out = product(unit(product(rows, w1), product(rows, w3)), w2)
    return to_tokens(jnp.where((pair < pair.size)[:, None], out, 0), weights, pair, slot)


# ---- moving rows: each is the other's derivative, so that none scatters ------------------------------------


@by_hand
def to_rows(x: Array, pair: Array, slot: Array) -> Array:
    """Row m is token pair_m // k, or zeros. x [n,L], pair [m] (n k: none), slot [n,k], where each pair went (m: nowhere)."""
    return jnp.take(x, pair // slot.shape[1], axis=0, mode="fill", fill_value=0)


@by_hand
def to_tokens(rows: Array, weights: Array, pair: Array, slot: Array) -> Array:
    """y_i = sum_j weights_ij rows_(slot_ij): [m,L] and [n,k] to [n,L], in the rows' dtype."""
    return sum_slots(rows, slot, weights.astype(rows.dtype))


def sum_slots(rows: Array, slot: Array, weights: Array | None = None) -> Array:
    """sum_j weights_ij rows_(slot_ij), with weights 1 by default; a slot beyond the rows gives zeros."""

    def add(total, choice):  # one choice at a time: [n,k,L] is never held
        at, weight = choice
        picked = jnp.take(rows, at, axis=0, mode="fill", fill_value=0)
        picked = picked if weight is None else picked * weight[:, None]
        return total + picked.astype(total.dtype), None

    zeros = jnp.zeros((slot.shape[0], rows.shape[1]), accumulator(rows.dtype))
    choices = slot.T, weights if weights is None else weights.T
    # Unrolled, CPUs take half the time over it, and the TPU compiler seven times as long.
    return lax.scan(add, zeros, choices, unroll=jax.default_backend() == "cpu")[0].astype(rows.dtype)


def _to_rows_forward(x, pair, slot):
    return to_rows.plain(x, pair, slot), slot  # plain here and below: a gradient can itself be differentiated forwards


def _to_rows_backward(slot, d_rows):
    return sum_slots(d_rows, slot), None, None


def _to_tokens_forward(rows, weights, pair, slot):
    return to_tokens.plain(rows, weights, pair, slot), (rows, weights, pair, slot)


def _to_tokens_backward(kept, d_y):
    rows, weights, pair, slot = kept
    of_token = to_rows.plain(d_y, pair, slot)
    weight = jnp.take(weights.reshape(-1), pair, mode="fill", fill_value=0).astype(rows.dtype)
    wide = accumulator(rows.dtype)
    by_row = jnp.sum(of_token.astype(wide) * rows.astype(wide), axis=1)
    d_weights = jnp.take(by_row, slot, mode="fill", fill_value=0).astype(weights.dtype)
    return of_token * weight[:, None], d_weights, None, None


to_rows.defvjp(_to_rows_forward, _to_rows_backward)
to_tokens.defvjp(_to_tokens_forward, _to_tokens_backward)
