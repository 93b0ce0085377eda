"""Next-token cross-entropy that never holds the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda import accumulator


def token_losses(logits: Array, targets: Array) -> Array:
    """-log softmax(logits)[target] in nats, in float32 (float64 for float64): [B,T,vocab], [B,T] -> [B,T]."""
    logits = logits.astype(accumulator(logits.dtype))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def cross_entropy(
    hidden: Array,
    unembed: Callable[[Array], Array],
    targets: Array,
    weights: Array,
    chunk: int = 256,
    ways: tuple[int, int] = (1, 1),
) -> Array:
    """sum_t weights_t (-log softmax(unembed(hidden_t))[targets_t]), `chunk` tokens of a device at a time.

    The backward pass computes each chunk's logits anew.

    Args:
        hidden: [B,T,D]. unembed: [B,C,D] -> [B,C,vocab].
        targets: [B,T] int. weights: [B,T], 0 where nothing is learnt.
        chunk: a device holds the logits of so many tokens, or of one position of all its rows.
        ways: equal parts of B and of T that lie on different devices; all work on every chunk.

    Returns:
        The weighted sum in float32 (float64 for float64 hidden).

    Example:
        >>> total = cross_entropy(out.hidden, head, targets, weights)
        >>> loss = total / jnp.sum(weights)
    """
    B, T, _ = hidden.shape
    dtype = accumulator(hidden.dtype)
    split, stretches = ways
    chunk = min(max(chunk * split // B, 1), T // stretches)  # positions

    def chunks(x):
        x = x.reshape(B, stretches, -1, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % chunk)) + ((0, 0),) * (x.ndim - 3))
        x = x.reshape(B, stretches, -1, chunk, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0).reshape(-1, B, stretches * chunk, *x.shape[4:])

    @jax.checkpoint
    def step(total, part):
        hidden, targets, weights = part
        return total + jnp.sum(weights * token_losses(unembed(hidden), targets)), None

    parts = chunks(hidden), chunks(targets), chunks(weights.astype(dtype))
    return lax.scan(step, jnp.zeros((), dtype), parts)[0]
