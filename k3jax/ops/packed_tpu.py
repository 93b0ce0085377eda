"""The grouped product of few rows with packed experts: a Pallas kernel for TPUs that unpacks what it reads where it
multiplies. With matrices dequantised before, a step of decoding would move nine times the bytes.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3jax.ops import mx
from k3jax.ops.packed import Packed

COLUMNS = 512  # rows of a matrix, at most, that are in fast memory at a time
PART = 128  # of those, that are unpacked at a time
HALF = mx.BLOCK // 2  # bytes of a block


def product(rows: Array, w: Packed, counts: Array, interpret: bool = False) -> Array:
    """y_m = W_e(m) rows_m with the matrix of the row's expert: as `lax.ragged_dot` of the dequantised matrices.

    Args:
        rows: [m,I] bfloat16, those of expert 0 first, then those of expert 1, and so on. counts: [E] rows of each.

    Returns:
        [m,O] bfloat16, accumulated in float32; zeros for rows beyond the last expert's. Scales of 2^-127 count as 0.

    Example:
        >>> y = product(rows, Packed(codes, scale, layer), counts)
    """
    (m, I), (E, O, _) = rows.shape, w.shape  # noqa: E741
    size = math.gcd(O, COLUMNS)
    end = jnp.cumsum(counts, dtype=jnp.int32)
    # Experts without rows come last and name the last one that has some, whose matrix is there already.
    used = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    many = jnp.sum(counts > 0, dtype=jnp.int32)
    expert = used[jnp.minimum(jnp.arange(E, dtype=jnp.int32), jnp.maximum(many - 1, 0))]
    end = jnp.where(jnp.arange(E, dtype=jnp.int32) < many, end[expert], 0)
    scalars = w.layer.reshape(1), expert, end - counts[expert], end

    rows = jnp.pad(rows, ((0, -m % 16), (0, 0)))
    at = lambda o, e, layer, expert, start, end: (layer[0], expert[e], o, 0)  # noqa: E731
    codes = pl.BlockSpec((1, 1, size, I // 2), at)
    # Transposed as the compiler lays it out, which wastes the least room: else it would copy the stack's.
    scale = pl.BlockSpec((1, 1, I // mx.BLOCK, size), lambda *x: (*at(*x)[:2], 0, x[0]))
    whole = pl.BlockSpec((len(rows), I // 2), lambda o, e, *_: (0, 0))
    y = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((len(rows), O), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(O // size, E),
            in_specs=[whole, whole, codes, scale],
            out_specs=pl.BlockSpec((len(rows), size), lambda o, e, *_: (0, o)),
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=48 * 2**20),
        # Of the one layer that is read: the compiler would count the whole stack.
        cost_estimate=pl.CostEstimate(
            flops=2 * len(rows) * E * O * I,
            bytes_accessed=E * O * (I // 2 + I // mx.BLOCK) + rows.nbytes + 4 * len(rows) * O,
            transcendentals=0,
        ),
        interpret=interpret,
    )(*scalars, rows[:, 0::2], rows[:, 1::2], w.codes, jnp.swapaxes(w.scale, 2, 3))
    return y[:m].astype(jnp.bfloat16)


def _kernel(layer, expert, start, end, even, odd, codes, scale, y):
    """Adds one expert's rows' products with some of its matrix's rows."""
    e = pl.program_id(1)

    @pl.when(e == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when(end[e] > start[e])
    def _():
        row = lax.broadcasted_iota(jnp.int32, (even.shape[0], 1), 0)
        mine = (row >= start[e]) & (row < end[e])
        lax.fori_loop(0, y.shape[1] // PART, partial(_some, (even, odd, codes, scale, y), mine), None)


def _some(refs, mine, o, _):
    """Adds the products with `PART` of the matrix's rows, in loops so small that they compile fast."""
    even, odd, codes, scale, y = refs
    rows = pl.ds(pl.multiple_of(o * PART, PART), PART)
    power = lax.bitcast_convert_type(scale[0, 0, :, rows].astype(jnp.int32) << 23, jnp.float32).astype(jnp.bfloat16)
    width = math.gcd(codes.shape[-1], 2 * PART)
    block = lax.broadcasted_iota(jnp.int32, (scale.shape[2], width), 0)
    column = lax.broadcasted_iota(jnp.int32, (scale.shape[2], width), 1)

    def step(c, total):
        columns = pl.ds(pl.multiple_of(c * width, width), width)
        byte = codes[0, 0, rows, columns].astype(jnp.int32)
        # A scale covers the 16 bytes of its block: a product with zeros and ones spreads it, exactly.
        spread = _dot(power, ((column + c * width) // HALF == block).astype(jnp.bfloat16), ((0,), (0,)))
        for code, x in ((byte & 15, even), (byte >> 4, odd)):
            w = (_e2m1(code) * spread).astype(jnp.bfloat16)
            total = total + _dot(jnp.where(mine, x[:, columns], 0), w, ((1,), (1,)))
        return total

    total = lax.fori_loop(0, codes.shape[-1] // width, step, jnp.zeros((even.shape[0], PART), jnp.float32))
    y[:, rows] += total


def _dot(a: Array, b: Array, over) -> Array:
    return lax.dot_general(a, b, (over, ((), ())), preferred_element_type=jnp.float32)


def _e2m1(code: Array) -> Array:
    """float32 values of E2M1 codes, int32: sign, two bits of exponent with bias 1, one of mantissa."""
    magnitude = code & 7
    bits = jnp.where(magnitude > 1, (magnitude << 22) + (126 << 23), magnitude * (126 << 23))
    return lax.bitcast_convert_type(bits | ((code & 8) << 28), jnp.float32)
