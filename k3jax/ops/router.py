"""Which experts a token goes to, and Quantile Balancing of the router's bias (report Eq. 11, 13-14).

Counts are int32 and exact for up to 2^31 - 1 tokens, those of a whole step over all micro-batches and devices.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

BINS = 1000


class Routing(NamedTuple):
    """weights [n,k] of the selected experts indices [n,k], and each token's cutoff [n] (all but indices float)."""

    weights: Array
    indices: Array
    cutoff: Array


def router_scores(logits: Array, function: Literal["sigmoid", "softmax"] = "sigmoid") -> Array:
    """How much each token wants each expert, in (0, 1): the sigmoid of logits [n,E], or their softmax over experts."""
    return jax.nn.sigmoid(logits) if function == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def route(
    scores: Array,
    bias: Array,
    k: int,
    *,
    num_groups: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scaling: float = 1.0,
) -> Routing:
    """The k experts with the largest score + bias, weighted by their scores without the bias.

    Args:
        scores: [n,E] in (0, 1), float32 or wider. bias: [E], carries no gradient.
        num_groups, topk_group: where not all groups of E / num_groups experts stay, only the `topk_group` groups whose two
            best biased scores sum highest are considered.
        renormalize: divide the weights by their sum + 1e-20 (if k > 1). scaling: multiplies the weights.

    Returns:
        A `Routing`; the cutoff is the (k+1)-th largest biased score, -inf where no more than k experts are considered.

    Example:
        >>> route(jnp.array([[0.9, 0.1, 0.6]]), jnp.zeros(3), 1).indices
        Array([[0]], dtype=int32)
    """
    n, E = scores.shape
    biased = lax.stop_gradient(scores + bias[None, :].astype(scores.dtype))
    if num_groups > topk_group:
        groups = biased.reshape(n, num_groups, E // num_groups)
        merit = jnp.sum(lax.top_k(groups, 2)[0], axis=-1)
        best = lax.top_k(merit, topk_group)[1]
        kept = jnp.any(best[:, :, None] == jnp.arange(num_groups, dtype=best.dtype)[None, None, :], axis=1)
        biased = jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(n, E)
    top, indices = lax.top_k(biased, min(k + 1, E))
    cutoff = top[:, k] if k < E else jnp.full(n, -jnp.inf, scores.dtype)
    indices = indices[:, :k]
    weights = jnp.take_along_axis(scores, indices, axis=1)
    if renormalize and k > 1:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return Routing(weights * scaling, indices, cutoff)


def expert_load(indices: Array, num_experts: int, valid: Array) -> Array:
    """Tokens each expert is given: int32 [E] from indices [n,k]; tokens with valid [n] False are not counted."""
    counts = jnp.broadcast_to(valid[:, None], indices.shape).astype(jnp.int32)
    return jnp.zeros(num_experts, jnp.int32).at[indices].add(counts)


def quantile_bias(scores: Array, cutoff: Array, k: int, valid: Array | None = None) -> Array:
    """Next router bias by exact Quantile Balancing: bias_j = -((q+1)-th largest over tokens of scores_ij - cutoff_i),
    then minus the mean over experts; q = m k / E is the balanced load of m tokens (rounded up).

    Args:
        scores: [n,E]. cutoff: [n]. valid: [n] bool, tokens that count, at least one; all by default.

    Returns:
        bias [E] in the scores' dtype.
    """
    n, E = scores.shape
    valid = jnp.ones(n, bool) if valid is None else valid
    margin = jnp.where(valid[:, None], scores - cutoff[:, None], -jnp.inf)
    tokens = jnp.sum(valid, dtype=jnp.int32)
    q = _balanced_load(tokens, k, E)
    bias = -jnp.sort(margin, axis=0, descending=True)[jnp.minimum(q, tokens - 1)]
    return bias - jnp.mean(bias)


def quantile_histogram(scores: Array, cutoff: Array, bias: Array, valid: Array) -> Array:
    """Counts of cutoff_i - scores_ij by expert, over `BINS` uniform bins of [min(bias) - 1, max(bias) + 1].

    Histograms of the same bias add up over micro-batches and devices.

    Args:
        scores: [n,E]. cutoff: [n]. bias: [E], the one the cutoffs were found with. valid: [n] bool.

    Returns:
        int32 [E, BINS].
    """
    E = scores.shape[1]
    low, width = _bins(bias.astype(scores.dtype))
    place = jnp.floor((cutoff[:, None] - scores - low) / width)
    place = jnp.clip(place, 0, BINS - 1).astype(jnp.int32)
    counts = jnp.broadcast_to(valid[:, None], place.shape).astype(jnp.int32)
    experts = jnp.arange(E, dtype=jnp.int32)[None, :]
    return jnp.zeros((E, BINS), jnp.int32).at[experts, place].add(counts)


def quantile_bias_from_histogram(histogram: Array, bias: Array, k: int) -> Array:
    """Next router bias from `quantile_histogram`s of the current `bias`: the bin in which the count reaches the balanced
    load ceil(q), linear inside it, then minus the mean over experts. No tokens: the bias stays.

    Args:
        histogram: int32 [E, BINS]. bias: [E].

    Returns:
        bias [E] in the given bias's dtype.
    """
    E = histogram.shape[0]
    low, width = _bins(bias)
    tokens = jnp.sum(histogram[0], dtype=jnp.int32)
    q = _balanced_load(tokens, k, E)
    reached = jnp.cumsum(histogram, axis=1, dtype=jnp.int32)
    place = jnp.argmax(reached >= q, axis=1)
    inside = jnp.take_along_axis(histogram, place[:, None], axis=1)[:, 0]
    before = jnp.take_along_axis(reached, place[:, None], axis=1)[:, 0] - inside
    fraction = (q - before).astype(bias.dtype) / jnp.maximum(inside, 1).astype(bias.dtype)
    new = low + width * (place.astype(bias.dtype) + fraction)
    return jnp.where(tokens > 0, new - jnp.mean(new), bias)


def _balanced_load(tokens: Array, k: int, E: int) -> Array:
    """ceil(tokens k / E), whose product alone would leave int32 from 2^31 / k tokens on."""
    return tokens // E * k - (-(tokens % E) * k // E)


def _bins(bias: Array) -> tuple[Array, Array]:
    low = jnp.min(bias) - 1
    return low, (jnp.max(bias) + 1 - low) / BINS
