"""What MoonViT-V2 computes on patches: positions, 2-D rotary, attention inside an image, joining of cells.

A row holds the patches of several images one after the other. P patches of a row, I cells of joined patches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from k3jax.ops.kda import accumulator

BLOCK = 512  # queries and keys whose scores are held at once


def frame_table(frames: int, D: int) -> np.ndarray:
    """[sin(f w_i), cos(f w_i)] with w_i = 10000^(-2i/D), for every frame f: [frames,D] float32.

    Computed and rounded in float32, as the released table is, whatever the model computes in.
    """
    w = 1 / 10000 ** (np.arange(D // 2, dtype=np.float32) / np.float32(D / 2))
    angle = np.arange(frames, dtype=np.float32)[:, None] * w[None]
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


def position_embedding(table: Array, frames: Array, places: Array, grids: Array) -> Array:
    """The table, stretched bilinearly over each image's grid, at every patch; plus, in a clip, what its frame adds.

    Half-pixel centres: row y of h reads the table's row max((y + 1/2) N/h - 1/2, 0), between two rows a weighted mean;
    columns alike. Frame f of a clip adds frames[f]; a single image nothing.

    Args:
        table: [N,M,D]. frames: [F,D], see `frame_table`.
        places: [B,P,3] int, each patch's frame, row and column. grids: [B,P,3] int, its image's frames, rows and columns.

    Returns:
        [B,P,D], float32 (float64 for a float64 table).

    Example:
        >>> position_embedding(table, frame_table(4, D), images.places, images.grids)
    """
    rows, columns, D = table.shape
    dtype = accumulator(table.dtype)

    def taps(axis, size):
        at = (places[..., axis].astype(dtype) + 0.5) * (size / grids[..., axis].astype(dtype)) - 0.5
        at = jnp.maximum(at, 0)
        low = jnp.minimum(at.astype(jnp.int32), size - 1)
        part = (at - low.astype(dtype))[..., None]
        return (low, 1 - part), (jnp.minimum(low + 1, size - 1), part)

    out = jnp.zeros((*places.shape[:2], D), dtype)
    flat = table.reshape(rows * columns, D)
    for y, y_part in taps(1, rows):
        for x, x_part in taps(2, columns):
            out = out + y_part * x_part * jnp.take(flat, y * columns + x, axis=0).astype(dtype)
    added = jnp.take(jnp.asarray(frames, dtype), places[..., 0], axis=0)
    return out + jnp.where(grids[..., :1] > 1, added, 0)


def rotary_2d(x: Array, places: Array) -> Array:
    """Turns the pairs (x_2p, x_2p+1) of every head by the patch's column (even p) or row (odd p) times
    10000^(-4 floor(p/2) / K). x [B,P,H,K], places [B,P,3] as in `position_embedding`; the same for every frame.

    Example:
        >>> rotary_2d(q, jnp.zeros((1, 5, 3), int))   # q: nothing turns at row 0, column 0
    """
    dtype = accumulator(x.dtype)
    K = x.shape[-1]
    frequency = 10000.0 ** (-jnp.arange(0, K, 4, dtype=dtype) / K)
    across = jnp.stack([places[..., 2], places[..., 1]], axis=-1).astype(dtype)
    angle = (frequency[None, None, :, None] * across[..., None, :]).reshape(*places.shape[:2], 1, K // 2)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pairs = x.astype(dtype).reshape(*x.shape[:-1], K // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(x.dtype)


def segment_attention_reference(q, k, v, q_ids, kv_ids):
    """`segment_attention` as written down: every score at once."""
    dtype = accumulator(q.dtype)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
    mask = _same(q_ids, kv_ids)
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1), 0)
    return jnp.einsum("bhts,bshv->bthv", weights.astype(v.dtype), v)


def segment_attention(q: Array, k: Array, v: Array, q_ids: Array, kv_ids: Array) -> Array:
    """o_t = sum_s softmax_s(q_t k_s K^-1/2) v_s over the keys of the same segment, in both directions.

    Never holds more than `BLOCK` x `BLOCK` scores a row and head, and passes over pairs of blocks that share no
    segment, so that images packed one after the other cost the sum of their own squares. Softmax in float32 (float64
    for float64).

    Args:
        q: [B,T,H,K]. k: [B,S,H,K]. v: [B,S,H,V].
        q_ids, kv_ids: [B,T], [B,S] int segments, 0 = not there.

    Returns:
        [B,T,H,V] in q's dtype; zeros for a query of segment 0.

    Example:
        >>> o = segment_attention(q, k, v, ids, ids)
    """
    dtype, scale = accumulator(q.dtype), q.shape[-1] ** -0.5
    B, T, H, _ = q.shape
    q, q_ids = _blocks(q), _blocks(q_ids)
    keys = _blocks(k), _blocks(v), _blocks(kv_ids)

    @jax.checkpoint
    def one_block(part):
        q, q_ids = part

        def step(carry, keys):
            mask = _same(q_ids, keys[2])
            return lax.cond(jnp.any(mask), lambda: meet(carry, keys, mask), lambda: carry), None

        def meet(carry, keys, mask):
            peak, total, out = carry
            scores = jnp.einsum("bthk,bshk->bhts", q, keys[0], preferred_element_type=dtype)
            scores = jnp.where(mask, scores * scale, -1e30)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - new_peak[..., None]), 0)
            shrink = jnp.exp(peak - new_peak)
            part = jnp.einsum("bhts,bshv->bhtv", weights.astype(v.dtype), keys[1], preferred_element_type=dtype)
            return new_peak, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + part

        rows = (B, H, q.shape[1])
        start = jnp.full(rows, -1e30, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, v.shape[-1]), dtype)
        (_, total, out), _ = lax.scan(jax.checkpoint(step), start, keys)
        out = out / jnp.where(total > 0, total, 1)[..., None]
        return jnp.einsum("bhtv->bthv", out).astype(q.dtype)

    out = jnp.moveaxis(lax.map(one_block, (q, q_ids)), 0, 1)
    return out.reshape(B, -1, H, v.shape[-1])[:, :T]


def join_cells(x: Array, slots: Array, cell: int) -> Array:
    """The patches of every cell side by side, averaged over the frames of a clip.

    Args:
        x: [B,P,D], `cell` patches of a cell one after the other.
        slots: [B,P/cell] int, the token every cell adds to; below 0 none.

    Returns:
        [B,P/cell,cell*D] in x's dtype: token j is the mean of the cells with slot j; zeros without any.

    Example:
        >>> join_cells(jnp.ones((1, 8, 3)), jnp.array([[0, 0]]), 4).shape   # two frames of one cell: one token
        (1, 2, 12)
    """
    B, P, D = x.shape
    cells = x.reshape(B, P // cell, cell * D).astype(accumulator(x.dtype))
    # A slot behind the last adds nowhere.
    slots = jnp.where(slots < 0, P // cell, slots)
    add = jax.vmap(lambda cells, slots: jnp.zeros_like(cells).at[slots].add(cells, mode="drop"))
    frames = add(jnp.ones_like(cells[..., :1]), slots)
    return (add(cells, slots) / jnp.maximum(frames, 1)).astype(x.dtype)


def _same(q_ids, kv_ids):
    """[B,1,T,S]: which query sees which key."""
    return ((q_ids[:, :, None] == kv_ids[:, None, :]) & (kv_ids[:, None, :] > 0))[:, None]


def _blocks(x):
    """[B,T,...] -> [T/BLOCK,B,BLOCK,...], the last filled up with zeros."""
    block = min(x.shape[1], BLOCK)
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
