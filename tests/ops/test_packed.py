"""Products with experts that stay packed, the TPU kernel interpreted, against the same matrices dequantised."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mx, packed_tpu
from k3jax.ops.packed import Packed

LAYERS, E, O, I = 3, 5, 256, 512  # noqa: E741


@pytest.fixture(scope="module")
def stack():
    """Matrices [N,E,O,I], and as they are packed."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((LAYERS, E, O, I)) * 10.0 ** np.arange(E)[:, None, None])
    codes, scale = mx.quantize(w.astype(jnp.float32))
    return np.asarray(mx.dequantize(codes, scale)), mx.pack(codes), scale


def test_matrices_come_out_of_the_stack(stack):
    values, codes, scale = stack
    w = Packed(codes, scale, jnp.int32(2))
    assert w.shape == (E, O, I)
    np.testing.assert_array_equal(w.all(jnp.float32), values[2])
    np.testing.assert_array_equal(w.one(jnp.int32(3), jnp.float32), values[2, 3])


@pytest.mark.parametrize("counts", [(3, 0, 9, 0, 7), (0, 0, 0, 0, 0), (0, 40, 0, 0, 0), (1, 1, 1, 1, 1), (0, 0, 0, 2, 18)])
def test_product_is_that_of_the_dequantised_matrices(counts, stack):
    values, codes, scale = stack
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((40, I)), jnp.bfloat16)
    y = packed_tpu.product(rows, Packed(codes, scale, jnp.int32(1)), jnp.asarray(counts, jnp.int32), interpret=True)
    expert = np.repeat(np.arange(E), counts)
    expected = np.zeros((40, O))
    expected[: len(expert)] = np.einsum("mi,moi->mo", np.float64(rows)[: len(expert)], np.float64(values[1])[expert])
    assert y.dtype == jnp.bfloat16
    scale_of_row = np.abs(expected).max(axis=1, keepdims=True) + 1e-9
    np.testing.assert_allclose(np.float64(y) / scale_of_row, expected / scale_of_row, rtol=0, atol=2**-8)


def test_every_code_means_what_it_should():
    codes = jnp.arange(16, dtype=jnp.int32)
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(packed_tpu._e2m1(codes), expected + [-x for x in expected])
