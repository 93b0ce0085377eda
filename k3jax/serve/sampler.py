"""Choosing the next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.ops.kda import accumulator
from k3jax.serve import sampling


def sample(logits: Array, key: Array, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Array:
    """Draws tokens [B] int32 from logits [B,vocab], with probability softmax(logits / temperature).

    Tokens are ranked by their logit, equal ones by their id, as `argmax` does; both limits cut the ranks. A row whose
    largest logit is no number (one is NaN or infinite, or all are -inf) has no likeliest token: it gives -1.

    Args:
        temperature: 0 takes the first of the ranks, as does one below float32's normal numbers (1e-38).
        top_k: only the first k ranks are drawn from; 0 for all.
        top_p: only the fewest first ranks that together hold this probability, at least one.

    Raises:
        ValueError: a setting that is NaN or out of its range.

    Example:
        >>> sample(jnp.array([[0.0, 5.0]]), jax.random.key(0), temperature=0.0)
        Array([1], dtype=int32)
    """
    sampling.check(temperature, top_k, top_p)
    logits = logits.astype(accumulator(logits.dtype))
    logits = jnp.where(logits == 0, 0, logits)  # sorting would tell -0.0 from 0.0
    peak, ids = jnp.max(logits, axis=-1, keepdims=True), None
    least, most = (float(x) for x in (jnp.finfo(logits.dtype).tiny, jnp.finfo(logits.dtype).max))
    if float(temperature) < least:
        chosen = jnp.argmax(logits, axis=-1)
    else:
        if top_k or top_p < 1:
            logits, ids = jax.lax.top_k(logits, min(top_k or logits.shape[-1], logits.shape[-1]))
        logits = (logits - peak) / min(float(temperature), most)
        if top_p < 1:
            probability = jax.nn.softmax(logits, axis=-1)
            before = jnp.cumsum(probability[:, :-1], axis=-1)
            logits = logits.at[:, 1:].set(jnp.where(before < top_p, logits[:, 1:], -jnp.inf))
        chosen = jax.random.categorical(key, logits, axis=-1)
        if ids is not None:
            chosen = jnp.take_along_axis(ids, chosen[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isfinite(peak[:, 0]), chosen, -1).astype(jnp.int32)
