"""Short convolution: values by hand, and the same document whole, in chunks, packed and padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.conv import short_conv

WEIGHT = jnp.asarray([[[1.0, 10.0, 100.0, 1000.0]]])  # [H=1,K=1,W=4], oldest tap first


def column(*values):
    return jnp.asarray(values, jnp.float64)[None, :, None, None]


def draw(seed, B, T, H=2, K=3, W=4):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(B, T, H, K))), jnp.asarray(rng.normal(size=(H, K, W)))


def test_by_hand():
    y, tail = short_conv(column(1, 2, 3, 4, 5), WEIGHT)
    np.testing.assert_array_equal(y[0, :, 0, 0], [1000, 2100, 3210, 4321, 5432])
    np.testing.assert_array_equal(tail[0, :, 0, 0], [3, 4, 5])


def test_channels_have_their_own_taps():
    x = jnp.broadcast_to(column(1, 2), (1, 2, 1, 2))
    weight = jnp.asarray([[[0.0, 0, 1, 5], [0, 0, 0, 7]]])
    np.testing.assert_array_equal(short_conv(x, weight)[0][0, :, 0], [[5, 7], [11, 14]])


def test_a_short_input_keeps_what_the_tail_held():
    y, tail = short_conv(column(4), WEIGHT, column(1, 2, 3))
    assert y.item() == 4321
    np.testing.assert_array_equal(tail[0, :, 0, 0], [2, 3, 4])


@pytest.mark.parametrize("cut", [1, 2, 3, 6])
def test_the_tail_continues(cut):
    x, weight = draw(0, 2, 7)
    whole, end = short_conv(x, weight)
    first, tail = short_conv(x[:, :cut], weight)
    second, tail = short_conv(x[:, cut:], weight, tail)
    np.testing.assert_array_equal(jnp.concatenate([first, second], axis=1), whole)
    np.testing.assert_array_equal(tail, end)


def test_segments_by_hand():
    y, _ = short_conv(column(1, 2, 3, 4, 5), WEIGHT, segment_ids=jnp.asarray([[1, 1, 2, 2, 2]]))
    np.testing.assert_array_equal(y[0, :, 0, 0], [1000, 2100, 3000, 4300, 5430])


def test_segments_are_isolated():
    x, weight = draw(1, 1, 9)
    ids = jnp.asarray([[1, 1, 2, 3, 3, 3, 3, 0, 0]])
    y, _ = short_conv(x, weight, segment_ids=ids)
    alone = [short_conv(x[:, a:b], weight)[0] for a, b in ((0, 2), (2, 3), (3, 7))]
    np.testing.assert_array_equal(y[:, :7], jnp.concatenate(alone, axis=1))
    gradient = jax.grad(lambda x: short_conv(x, weight, segment_ids=ids)[0][:, 3:7].sum())(x)
    assert np.all(gradient[:, :3] == 0) and np.all(gradient[:, 7:] == 0) and np.all(gradient[:, 3:7] != 0)


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
def test_padding_on_either_side(ids, continued):
    # Row 1 is all real: every row has its own padding.
    x, weight = draw(2, 2, 5)
    before, _ = draw(3, 2, 3)
    real = np.asarray([ids, [1] * 5]) > 0
    x = jnp.where(real[:, :, None, None], x, 1e9)
    tail = before if continued else None
    y, end = short_conv(x, weight, tail, jnp.asarray(real.astype(np.int32)))
    for row in range(2):
        alone = x[row, real[row]][None]
        expected, expected_end = short_conv(alone, weight, None if tail is None else tail[row : row + 1])
        np.testing.assert_array_equal(y[row, real[row]], expected[0])
        np.testing.assert_array_equal(end[row], expected_end[0])
    assert np.all(np.isfinite(y))


def test_padding_all_along_leaves_the_tail():
    x, weight = draw(4, 1, 6)
    tail, _ = draw(5, 1, 3)
    _, end = short_conv(x, weight, tail, jnp.zeros((1, 6), jnp.int32))
    np.testing.assert_array_equal(end, tail)


def test_dtypes():
    x, weight = draw(6, 1, 5)
    y, tail = short_conv(x.astype(jnp.bfloat16), weight.astype(jnp.float32))
    assert (y.dtype, tail.dtype) == (jnp.float32, jnp.bfloat16)
    exact, _ = short_conv(x.astype(jnp.bfloat16).astype(jnp.float64), weight.astype(jnp.float32))
    assert exact.dtype == jnp.float64
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-6)  # sums of four products in float32
    y, tail = short_conv(x.astype(jnp.float32), weight, tail)
    assert (y.dtype, tail.dtype) == (jnp.float32, jnp.bfloat16)
