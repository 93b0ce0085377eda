"""Experts that stay packed: MXFP4 matrices of a whole stack of layers, of which a product reads one layer's, 4 bits each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops import mx

ROWS = 512  # at most, that the kernel (packed_tpu.py) keeps beside the matrices; more are worth unpacking a layer first


class Packed(NamedTuple):
    """Matrices [E,O,I] of one layer in a stack of N: codes uint8 [N,E,O,I/2] (two E2M1 a byte), scale uint8 [N,E,O,I/32],
    layer int32."""

    codes: Array
    scale: Array
    layer: Array

    @property
    def shape(self) -> tuple[int, int, int]:
        _, E, O, half = self.codes.shape  # noqa: E741
        return E, O, 2 * half

    def all(self, dtype) -> Array:
        """Every matrix of the layer, dequantised."""
        codes, scale = (lax.dynamic_index_in_dim(x, self.layer, 0, keepdims=False) for x in (self.codes, self.scale))
        return mx.dequantize(mx.unpack(codes), scale, dtype)

    def one(self, expert: Array, dtype) -> Array:
        """[O,I], dequantised."""
        zero = jnp.zeros((), jnp.int32)
        at = self.layer, expert, zero, zero
        codes, scale = (lax.dynamic_slice(x, at, (1, 1, *x.shape[2:]))[0, 0] for x in (self.codes, self.scale))
        return mx.dequantize(mx.unpack(codes), scale, dtype)


def takes(rows: Array, w: Packed) -> bool:
    """Whether the kernel multiplies these, on this machine."""
    _, O, I = w.shape  # noqa: E741
    fits = len(rows) <= ROWS and rows.dtype == jnp.bfloat16 and O % 128 == 0 and I % 256 == 0
    return jax.default_backend() == "tpu" and fits
