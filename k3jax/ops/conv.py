"""Short depthwise causal convolution over time, as KDA puts it in front of its queries, keys and values."""

import jax.numpy as jnp
from jax import Array

from k3jax.ops.kda import accumulator


def short_conv(
    x: Array, weight: Array, tail: Array | None = None, segment_ids: Array | None = None
) -> tuple[Array, Array]:
    """y_t = sum_w weight_w x_{t-W+1+w}, channel by channel; the last tap is the current token.

    Args:
        x: [B,T,H,K]. weight: [H,K,W].
        tail: the last W-1 real inputs before x, [B,W-1,H,K]; zeros by default.
        segment_ids: [B,T], 0 = padding. A tap reaches only tokens of its own segment; padding reads as zero.

    Returns:
        y [B,T,H,K] in float32 (float64 for float64 inputs), and the tail for what follows, in x's dtype: the last W-1
        inputs that are not padding.

    Example:
        >>> y, tail = short_conv(jnp.ones((1, 5, 1, 1)), jnp.ones((1, 1, 4)))
        >>> y[0, :, 0, 0]
        Array([1., 2., 3., 4., 4.], dtype=float32)
    """
    B, T, H, K = x.shape
    W = weight.shape[-1]
    dtype = accumulator(x.dtype)
    if tail is None:
        tail = jnp.zeros((B, W - 1, H, K), x.dtype)
    if segment_ids is not None:
        x = jnp.where((segment_ids > 0)[:, :, None, None], x, 0)
    joined = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    weight = weight.astype(dtype)
    y = jnp.zeros((B, T, H, K), dtype)
    for w in range(W):
        tap = joined[:, w : w + T].astype(dtype)
        back = W - 1 - w
        if segment_ids is not None and 0 < back < T:
            same = jnp.pad(segment_ids[:, back:] == segment_ids[:, :-back], ((0, 0), (back, 0)), constant_values=True)
            tap = jnp.where(same[:, :, None, None], tap, 0)
        y = y + tap * weight[None, None, :, :, w]
    if segment_ids is None:
        return y, joined[:, T:]
    real = jnp.pad(segment_ids > 0, ((0, 0), (W - 1, 0)), constant_values=True)
    last = jnp.argsort(real, axis=1, stable=True)[:, T:]
    return y, jnp.take_along_axis(joined, last[:, :, None, None], axis=1)
