"""Next-token cross-entropy that never holds the logits of a whole batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.ids import in_range, refuse_unknown
from k3jax.ops.kda import accumulator
from k3jax.sharding import along, gathered, mesh_axes, on_shards


def token_losses(logits: Array, targets: Array, axes: tuple[str, ...] = ()) -> Array:
    """-log softmax(logits)[target] in nats, in float32 (float64 for float64): [...,vocab], [...] -> [...].

    A target outside 0..vocab-1 is refused where its value is known; in a traced program its loss is NaN and its gradient
    zero.

    axes: mesh axes over which the vocabulary is split (inside `shard_map`); `logits` are then this device's part.
    """
    vocab = logits.shape[-1] * (lax.axis_size(axes) if axes else 1)
    refuse_unknown(targets, vocab, name="target")
    logits, targets = logits.astype(accumulator(logits.dtype)), in_range(targets, vocab)
    top = jnp.max(lax.stop_gradient(logits), axis=-1)
    place = targets
    if axes:
        top = lax.pmax(top, axes)
        place = targets - lax.axis_index(axes) * logits.shape[-1]
    here = (place >= 0) & (place < logits.shape[-1])
    chosen = jnp.take_along_axis(logits, jnp.where(here, place, 0)[..., None], axis=-1)[..., 0]
    total, chosen = jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), jnp.where(here, chosen - top, 0)
    if axes:
        total, chosen = lax.psum((total, chosen), axes)
    return jnp.where(targets < vocab, jnp.log(total) - chosen, jnp.nan)


def cross_entropy(hidden: Array, head: Array, targets: Array, weights: Array, chunk: int = 256) -> Array:
    """sum_t weights_t (-log softmax(head hidden_t)[targets_t]), a part of the tokens at a time.

    The backward pass computes each part's logits anew. On a mesh, each device gathers the columns of its rows of `head`
    once, and its gradient is summed once; devices that share the vocabulary take the same tokens together.

    Args:
        hidden: [B,T,D]. head: [vocab,D]. targets: [B,T] int. weights: [B,T], 0 where nothing is learnt: the target is
            not looked at.
        chunk: a device takes so many of its tokens at a time; R devices that share the vocabulary take theirs together, and
            each holds R chunk rows of vocab / R logits.

    Returns:
        The weighted sum in float32 (float64 for float64 hidden).

    Example:
        >>> total = cross_entropy(*model.apply(variables, out.hidden, method="head_inputs"), targets, weights)
        >>> loss = total / jnp.sum(weights)
    """
    refuse_unknown(targets, head.shape[0], weights, "target")
    targets, tokens = in_range(targets, head.shape[0]), ("batch", along("seq", hidden.shape[1]))
    weights = weights.astype(accumulator(hidden.dtype))
    run = on_shards(partial(_local, chunk, *map(mesh_axes, tokens)), [tokens, ("vocab", "embed"), tokens, tokens], [()])
    return run(hidden, head, targets, weights)[0]


def _local(chunk, batch, seq, hidden, head, targets, weights):
    columns, rows = mesh_axes("embed"), mesh_axes("vocab")
    if columns:
        head = gathered(head, columns, 1)
    shared = tuple(axis for axis in rows if axis in seq)  # have tokens of their own
    tokens = targets.size
    chunk = min(chunk, tokens)

    def chunks(x):
        x = x.reshape(tokens, *x.shape[2:])
        return jnp.pad(x, ((0, -tokens % chunk),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])

    @jax.checkpoint
    def step(total, part):
        hidden, targets, weights = lax.all_gather(part, shared, tiled=True) if shared else part
        logits = lax.dot_general(hidden, head, (((1,), (1,)), ((), ())))
        losses = token_losses(logits, targets, rows)
        return total + jnp.sum(jnp.where(weights == 0, 0, weights * losses)), None

    total, _ = lax.scan(step, jnp.zeros((), weights.dtype), tuple(map(chunks, (hidden, targets, weights))))
    apart = batch + tuple(axis for axis in seq if axis not in shared)
    return (lax.psum(total, apart) if apart else total,)
