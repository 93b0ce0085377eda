"""Latent attention without positions: keys and values are expanded from a latent that all heads share (report Eq. 7)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.kda import accumulator

BLOCK = 512  # keys a step of the block-wise softmax looks at


def mla_reference(q, latent, k_rope, w_k, w_v, q_ids, kv_ids, q_offset=0):
    """`mla_attention` as written down: every score at once."""
    dtype = accumulator(q.dtype)
    S = latent.shape[1]
    k_nope = jnp.einsum("bsl,hkl->bshk", latent, w_k)
    k_rope = jnp.broadcast_to(k_rope[:, :, None, :], (*k_nope.shape[:3], k_rope.shape[-1]))
    k = jnp.concatenate([k_nope, k_rope], axis=-1)
    v = jnp.einsum("bsl,hvl->bshv", latent, w_v)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
    mask = _mask(q_ids, kv_ids, q_offset, jnp.arange(S, dtype=jnp.int32))
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0)
    return jnp.einsum("bhts,bshv->bthv", weights.astype(q.dtype), v)


def mla_attention(
    q: Array,
    latent: Array,
    k_rope: Array,
    w_k: Array,
    w_v: Array,
    q_ids: Array,
    kv_ids: Array,
    q_offset: Array | int = 0,
    *,
    absorb: bool | None = None,
    layer: Array | None = None,
) -> Array:
    """o_t = sum_s softmax_s((q_n k_n + q_r k_r) (K+R)^-0.5) v_s, with k_n = W_k c_s, v = W_v c_s and c the latents.

    Never holds more than `BLOCK` keys' scores or expanded keys, and costs what the keys up to the last query cost,
    whatever room a cache has behind them. Absorbed, W_k is moved into q and W_v into o, and the
    latents are attended to directly: cheaper when few queries meet many keys, as in decoding.

    Args:
        q: [B,T,H,K+R], its last R elements facing `k_rope`. latent: [B,S,L]. k_rope: [B,S,R], never rotated.
        w_k: [H,K,L]. w_v: [H,V,L].
        q_ids, kv_ids: [B,T], [B,S] segment of every token, 0 = not there. A query sees its own segment.
        q_offset: index in S of the first query; a query sees no key behind its own index.
        absorb: None takes the form with fewer multiplications.
        layer: int scalar; `latent` and `k_rope` have an axis of layers in front, of which this one is read.

    Returns:
        o [B,T,H,V] in q's dtype; zeros for a query of segment 0.

    Example:
        >>> ids = jnp.ones((1, 8), jnp.int32)
        >>> o = mla_attention(q, latent, k_rope, w_k, w_v, ids, ids)
    """
    (B, T, H, _), (S, L), R = q.shape, latent.shape[-2:], k_rope.shape[-1]
    K, V = w_k.shape[1], w_v.shape[1]
    dtype = accumulator(q.dtype)
    scale = (K + R) ** -0.5
    if absorb is None:
        absorb = T * (2 * L - K - V) <= L * (K + V)
    q_rope = q[..., K:]
    if absorb:
        q = jnp.einsum("bthk,hkl->bthl", q[..., :K], w_k)
    width = L if absorb else V
    block = min(S, BLOCK)

    def keys_at(x, at):
        if layer is None:
            return lax.dynamic_slice_in_dim(x, at, block, axis=1).astype(q.dtype)
        zero = jnp.zeros((), jnp.int32)
        return lax.dynamic_slice(x, (layer, zero, at, zero), (1, B, block, x.shape[-1]))[0].astype(q.dtype)

    def step(carry, start):
        peak, total, out = carry
        at = jnp.minimum(start, S - block)  # the last block may begin among keys already seen
        c, r, ids = keys_at(latent, at), keys_at(k_rope, at), lax.dynamic_slice_in_dim(kv_ids, at, block, axis=1)
        if absorb:
            values = c
            scores = jnp.einsum("bthl,bsl->bhts", q, c, preferred_element_type=dtype)
            scores = scores + jnp.einsum("bthr,bsr->bhts", q_rope, r, preferred_element_type=dtype)
        else:
            shared = jnp.broadcast_to(r[:, :, None, :], (B, block, H, R))
            keys = jnp.concatenate([jnp.einsum("bsl,hkl->bshk", c, w_k), shared], axis=-1)
            values = jnp.einsum("bsl,hvl->bshv", c, w_v)
            scores = jnp.einsum("bthk,bshk->bhts", q, keys, preferred_element_type=dtype)
        positions = at + jnp.arange(block, dtype=jnp.int32)
        mask = _mask(q_ids, ids, q_offset, positions) & (positions >= start)[None, None, None]
        scores = jnp.where(mask, scores * scale, -1e30)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new_peak[..., None]), 0)
        shrink = jnp.exp(peak - new_peak)
        equation = "bhts,bsv->bhtv" if absorb else "bhts,bshv->bhtv"
        part = jnp.einsum(equation, weights.astype(values.dtype), values, preferred_element_type=dtype)
        return new_peak, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + part

    @jax.checkpoint
    def visit(carry, start):
        if S in (T, block):  # no room, or too little to pass over
            return step(carry, start), None
        # What lies behind the last query is a cache's empty room.
        return lax.cond(start < q_offset + T, step, lambda carry, _: carry, carry, start), None

    carry = (
        jnp.full((B, H, T), -1e30, dtype),
        jnp.zeros((B, H, T), dtype),
        jnp.zeros((B, H, T, width), dtype),
    )
    starts = jnp.arange(0, S, block, dtype=jnp.int32)
    (_, total, out), _ = visit(carry, starts[0]) if len(starts) == 1 else lax.scan(visit, carry, starts)
    out = jnp.where((total > 0)[..., None], out / jnp.maximum(total, 1e-30)[..., None], 0)
    out = jnp.einsum("bhtv->bthv", out).astype(q.dtype)
    return jnp.einsum("bthl,hvl->bthv", out, w_v) if absorb else out


def _mask(q_ids, kv_ids, q_offset, positions):
    """[B,1,T,S]: which query sees which key; `positions` are the keys' indices."""
    queries = q_offset + jnp.arange(q_ids.shape[1], dtype=jnp.int32)
    causal = positions[None, :] <= queries[:, None]
    same = (q_ids[:, :, None] == kv_ids[:, None, :]) & (kv_ids[:, None, :] > 0)
    return (causal[None] & same)[:, None]
