"""Choosing the next token."""

import jax
import jax.numpy as jnp
from jax import Array


def sample(logits: Array, key: Array, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Array:
    """Draws tokens [B] from logits [B,vocab].

    Args:
        temperature: divides the logits; 0 takes the largest.
        top_k: only the k largest are drawn from; 0 for all.
        top_p: only the smallest set of the likeliest tokens that together hold this probability, at least one.

    Example:
        >>> sample(jnp.array([[0.0, 5.0]]), jax.random.key(0), temperature=0.0)
        Array([1], dtype=int32)
    """
    logits = logits.astype(jnp.float32)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k:
        smallest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probability = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = jnp.sum((before < top_p).astype(jnp.int32), axis=-1, keepdims=True)
        smallest = jnp.take_along_axis(ordered, kept - 1, axis=-1)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
