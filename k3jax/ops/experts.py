"""Routed experts: dispatch to where the experts live, grouped feed-forward, and back (report Eq. 11-12)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.derivative import by_hand
from k3jax.ops import exchange, grouped, mx
from k3jax.ops.kda import accumulator

IMPLS = ("auto", "fixed", "ragged", "plain")
Experts = tuple[Array, Array, Array]  # w1 (gate), w3 (up) [E,F,L], w2 (down) [E,L,F]


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


class Unit(NamedTuple):
    """From an expert's gate and up products to what meets w2: the activation, and with `mxfp8` its rounding."""

    act: Activation
    mxfp8: bool = False

    def __call__(self, gate: Array, up: Array) -> Array:
        h = self.act(gate, up)
        return mx.fake_quant(h, "mxfp8") if self.mxfp8 else h


def experts_reference(x: Array, weights: Array, indices: Array, experts: Experts, unit: Unit) -> Array:
    """Every expert on every token, then the weighted sum of the selected: E/k times the work. x [n,L]."""
    w1, w3, w2 = experts
    hidden = unit(jnp.einsum("nl,efl->enf", x, w1), jnp.einsum("nl,efl->enf", x, w3))
    every = jnp.einsum("enf,elf->enl", hidden, w2)
    chosen = indices[:, :, None] == jnp.arange(w1.shape[0], dtype=indices.dtype)[None, None, :]
    combine = jnp.sum(jnp.where(chosen, weights[:, :, None], 0), axis=1)
    return jnp.einsum("ne,enl->nl", combine.astype(x.dtype), every)


def fastest(backend: str, version: tuple[int, ...] = jax.__version_info__) -> str:
    """What `impl="auto"` takes on a backend: the one place that decides.

    CPUs have no `ragged_all_to_all`, and their `ragged_dot` multiplies every row with every expert. Before JAX 0.12 the
    gradient of `ragged_dot` costs TPUs 15 times its products (by a compiled program's own count). That the ragged form
    is faster elsewhere is reasoned, not measured: it sends no empty rows.
    """
    return "fixed" if backend == "cpu" or (backend == "tpu" and version < (0, 12)) else "ragged"


def apply_experts(
    x: Array,
    weights: Array,
    indices: Array,
    valid: Array,
    experts: Experts,
    unit: Unit,
    axes: tuple[str, ...] = (),
    all_axes: tuple[str, ...] = (),
    impl: str = "auto",
    drop: bool = False,
) -> tuple[Array, Array]:
    """y_i = sum_j weights_ij E_{indices_ij}(x_i), E_e(x) = w2_e unit(w1_e x, w3_e x), whatever the imbalance.

    Rows go to the devices that hold their experts and come back, in a round that fits a balanced load. Whatever is
    beyond goes in further rounds, which cost nothing when nobody needs them.

    Args:
        x: this device's tokens [n,L]. weights, indices: [n,k]. valid: [n] bool; tokens that are not there get zeros.
        experts: this device's part of all E experts.
        axes: mesh axes over which the experts are split in R parts (inside `shard_map`); none on one device.
        all_axes: every mesh axis of more than one device, so that all agree on the number of rounds.
        impl: "fixed" (`all_to_all` of fixed sizes, products in blocks), "ragged" (`ragged_all_to_all`, `ragged_dot`),
            "plain" (`ragged_dot` on one device, in forward mode too), or "auto".
        drop: leave out what is beyond the first round. On one device there are no rounds, and nothing is left out.

    Returns:
        y [n,L] in x's dtype, and the number of (token, expert) pairs of this device that were left out, int32.

    Example:
        >>> y, dropped = apply_experts(x, weights, indices, jnp.ones(n, bool), (w1, w3, w2), Unit(Activation("situ")))
    """
    if impl == "auto":
        impl = fastest(jax.default_backend())
    if impl not in IMPLS:
        raise ValueError(f"impl: found {impl!r}, must be one of {', '.join(IMPLS)}")
    ways = lax.axis_size(axes) if axes else 1
    if impl == "plain" and ways > 1:
        raise ValueError(f"impl: found 'plain' for experts on {ways} devices, must be fixed or ragged")
    forms = {"fixed": grouped.blocks, "ragged": grouped.ragged_dots, "plain": grouped.plain}
    local = partial(forms[impl], unit)
    pairs = grouped.sort_pairs(indices, valid, ways * experts[0].shape[0])
    none = jnp.zeros((), jnp.int32)
    if ways == 1:
        return local(x, weights, experts, pairs), none

    form = exchange.fixed if impl == "fixed" else exchange.ragged
    run, first, further, most, needed, dropped = form(local, axes, *indices.shape, pairs)
    y = run(x, weights, experts, pairs, 0, first)
    if drop:
        return y, dropped
    if first < most:
        y = y + _further(run, first, further, (x, weights, experts), pairs, lax.pmax(needed, all_axes or axes))
    return y, none


@partial(by_hand, nondiff_argnums=(0, 1, 2))
def _further(run, first, size, inputs, pairs, needed):
    """The sum of a run's rounds from row `first` to `needed`: as many as there are, also in the backward pass."""

    def another(base, y):
        return y + run(*inputs, pairs, base, size)

    return _rounds(another, first, size, needed, jnp.zeros_like(inputs[0]))


def _further_forward(run, first, size, inputs, pairs, needed):
    return _further(run, first, size, inputs, pairs, needed), (inputs, pairs, needed)


def _further_backward(run, first, size, kept, d_y):
    inputs, pairs, needed = kept

    def another(base, d_inputs):
        _, pull = jax.vjp(lambda inputs: run(*inputs, pairs, base, size), inputs)
        return jax.tree.map(jnp.add, d_inputs, pull(d_y)[0])

    return _rounds(another, first, size, needed, jax.tree.map(jnp.zeros_like, inputs)), None, None


_further.defvjp(_further_forward, _further_backward)


def _rounds(another, first, size, needed, start):
    def loop(value):
        rounds = -((first - needed) // size)
        return lax.fori_loop(0, rounds, lambda i, value: another(first + i * size, value), value)

    return lax.cond(first < needed, loop, lambda value: value, start)
