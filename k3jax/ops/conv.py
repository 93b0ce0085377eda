"""Short depthwise causal convolution over time, as KDA puts it in front of its queries, keys and values."""

import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda import accumulator


def short_conv(
    x: Array, weight: Array, tail: Array | None = None, segment_ids: Array | None = None
) -> tuple[Array, Array]:
    """y_t = sum_w weight_w x_{t-W+1+w}, channel by channel; the last tap is the current token.

    Args:
        x: [B,T,H,K]. weight: [H,K,W].
        tail: the last W-1 real inputs before x, [B,W-1,H,K]; zeros by default.
        segment_ids: [B,T], 0 = padding, which holds no meaning in y. A tap reaches only tokens of its own segment; a
            row that continues a `tail` is one segment, whose taps pass over padding.

    Returns:
        y [B,T,H,K] in float32 (float64 for float64 inputs), and the tail for what follows: the last W-1 inputs
        that are not padding, in the given tail's dtype (x's without one).

    Example:
        >>> y, tail = short_conv(jnp.ones((1, 5, 1, 1)), jnp.ones((1, 1, 4)))
        >>> y[0, :, 0, 0]
        Array([1., 2., 3., 4., 4.], dtype=float32)
    """
    B, T, H, K = x.shape
    W = weight.shape[-1]
    dtype = accumulator(x.dtype)
    continues = tail is not None
    if not continues:
        tail = jnp.zeros((B, W - 1, H, K), x.dtype)
    real = None if segment_ids is None else segment_ids > 0
    joined = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    together = joined
    if real is not None:  # padding first, then the tail and the real inputs side by side
        order = jnp.argsort(jnp.pad(real, ((0, 0), (W - 1, 0)), constant_values=True), axis=1, stable=True)
        together = jnp.take_along_axis(joined, order[:, :, None, None], axis=1)

    weight = weight.astype(dtype)
    y = jnp.zeros((B, T, H, K), dtype)
    for w in range(W):
        tap = (together if continues else joined)[:, w : w + T].astype(dtype)
        back = W - 1 - w
        if real is not None and not continues and 0 < back < T:
            same = segment_ids[:, back:] == segment_ids[:, :-back]
            same = jnp.pad(same, ((0, 0), (back, 0)), constant_values=True)
            tap = jnp.where(same[:, :, None, None], tap, 0)
        y = y + tap * weight[None, None, :, :, w]
    if real is not None and continues:  # back to where they were
        place = T - lax.cumsum(real.astype(jnp.int32), axis=1, reverse=True)
        y = jnp.take_along_axis(y, place[:, :, None, None], axis=1, mode="clip")
    return y, together[:, T:].astype(tail.dtype)
