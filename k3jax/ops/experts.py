"""Routed experts: dispatch to where the experts live, grouped feed-forward, and back (report Eq. 11-12)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops import mx
from k3jax.ops.kda import accumulator

# Room for an expert in one round: a balanced load's spread (2 sigma of random routing) and a quarter more.
CAPACITY_FACTOR, CAPACITY_SIGMAS = 1.25, 2.0


class Activation(NamedTuple):
    """The gated unit of every feed-forward part: "situ" with its two bounds, or "silu"."""

    name: str
    beta: float = 4.0
    linear_beta: float = 25.0

    def __call__(self, gate: Array, up: Array) -> Array:
        """SiTU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta); SiLU: silu(gate) * up.

        In float32 (float64 for float64), returned in gate's dtype. SiTU is bounded by beta * linear_beta.
        """
        dtype = accumulator(gate.dtype)
        g, u = gate.astype(dtype), up.astype(dtype)
        if self.name == "situ":
            g = self.beta * jnp.tanh(g / self.beta) * jax.nn.sigmoid(g)
            u = self.linear_beta * jnp.tanh(u / self.linear_beta)
        else:
            g = jax.nn.silu(g)
        return (g * u).astype(gate.dtype)


def expert_ffn(x: Array, w1: Array, w3: Array, w2: Array, act: Activation, mxfp8_inputs: bool = False) -> Array:
    """w2 act(w1 x, w3 x) of every expert on its own rows.

    Args:
        x: [E,C,L]. w1 (gate), w3 (up): [E,F,L]. w2 (down): [E,L,F].
        mxfp8_inputs: the activations that meet w2 pass through MXFP8 (those that meet w1 and w3 are the caller's).

    Returns:
        [E,C,L] in x's dtype.
    """
    h = act(jnp.einsum("ecl,efl->ecf", x, w1), jnp.einsum("ecl,efl->ecf", x, w3))
    if mxfp8_inputs:
        h = mx.fake_quant(h, "mxfp8")
    return jnp.einsum("ecf,elf->ecl", h, w2)


def experts_reference(x, weights, indices, w1, w3, w2, act, mxfp8_inputs=False):
    """Every expert on every token, then the weighted sum of the selected: E/k times the work. x [n,L]."""
    E = w1.shape[0]
    every = expert_ffn(jnp.broadcast_to(x[None], (E, *x.shape)), w1, w3, w2, act, mxfp8_inputs)
    chosen = indices[:, :, None] == jnp.arange(E, dtype=indices.dtype)[None, None, :]
    combine = jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1)
    return jnp.einsum("ne,enl->nl", combine.astype(x.dtype), every)


def apply_experts(
    x: Array,
    weights: Array,
    indices: Array,
    valid: Array,
    ffn: Callable[[Array], Array],
    num_experts: int,
    axes: tuple[str, ...] = (),
    all_axes: tuple[str, ...] = (),
) -> Array:
    """y_i = sum_j weights_ij ffn_{indices_ij}(x_i), every token on every selected expert whatever the imbalance.

    Rows go to a buffer of fixed capacity an expert, are exchanged over the devices that share the experts, and come
    back the same way. Rows beyond the capacity go in further rounds, which cost nothing when nobody needs them.

    Args:
        x: this device's tokens [n,L]. weights, indices: [n,k]. valid: [n] bool; tokens that are not there get zeros.
        ffn: maps [E/R, rows, L] to the same shape, on this device's experts.
        axes: mesh axes over which the experts are split in R parts (inside `shard_map`); none on one device.
        all_axes: every mesh axis of more than one device, so that all agree on the number of rounds.

    Returns:
        y [n,L] in x's dtype.
    """
    (n, L), k, E = x.shape, indices.shape[1], num_experts
    ways = lax.axis_size(axes) if axes else 1
    balanced = n * k / E
    capacity = min(n, 8 * math.ceil((CAPACITY_FACTOR * balanced + CAPACITY_SIGMAS * balanced**0.5) / 8))

    # Place of every (token, choice) among the rows of its expert, in order of token.
    expert = jnp.where(valid[:, None], indices, E).astype(jnp.int32).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.zeros(E, jnp.int32).at[expert].add(1, mode="drop")
    first = jnp.cumsum(counts) - counts
    by_expert = expert[order]
    ranks = jnp.arange(n * k, dtype=jnp.int32) - first[jnp.minimum(by_expert, E - 1)]
    place = jnp.zeros(n * k, jnp.int32).at[order].set(ranks)
    source = (order // k).astype(jnp.int32)

    def one_round(number):
        base = number * capacity
        inside = (ranks >= base) & (ranks < base + capacity) & (by_expert < E)
        slot = jnp.where(inside, by_expert * capacity + ranks - base, E * capacity)
        taken = jnp.full(E * capacity, n, jnp.int32).at[slot].set(source, mode="drop")
        rows = jnp.take(x, taken, axis=0, mode="fill", fill_value=0).reshape(E, capacity, L)
        if axes:
            rows = lax.all_to_all(rows, axes, 0, 0, tiled=True)
        rows = rows.reshape(ways, E // ways, capacity, L)
        rows = jnp.einsum("recl->ercl", rows).reshape(E // ways, ways * capacity, L)
        out = ffn(rows).reshape(E // ways, ways, capacity, L)
        out = jnp.einsum("ercl->recl", out).reshape(E, capacity, L)
        if axes:
            out = lax.all_to_all(out, axes, 0, 0, tiled=True)
        here = (place >= base) & (place < base + capacity) & (expert < E)
        index = jnp.where(here, expert * capacity + place - base, E * capacity)
        picked = jnp.take(out.reshape(E * capacity, L), index, axis=0, mode="fill", fill_value=0)
        return jnp.einsum("nk,nkl->nl", weights.astype(x.dtype), picked.reshape(n, k, L))

    y = one_round(0)
    rounds = -(-n // capacity)
    if rounds == 1:
        return y
    most = lax.stop_gradient(jnp.max(counts))
    most = lax.pmax(most, all_axes) if all_axes else most

    def further(y):
        @jax.checkpoint
        def step(y, number):
            return lax.cond(number * capacity < most, lambda: y + one_round(number), lambda: y), None

        return lax.scan(step, y, jnp.arange(1, rounds, dtype=jnp.int32))[0]

    return lax.cond(capacity < most, further, lambda y: y, y)
