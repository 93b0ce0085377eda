"""Every op in narrow types: results and gradients in the types promised, finite, and those of float64 but for rounding.

That float64 is right is tested op by op, beside its reference.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.nn.layers import rms_norm
from k3jax.ops import kda_gate, l2norm, mla, mx, segment_summary, vit
from k3jax.ops.attnres import attnres_mix, keep_depth, read_depth
from k3jax.ops.conv import short_conv
from k3jax.ops.experts import Activation, Unit, apply_experts
from k3jax.ops.loss import cross_entropy
from k3jax.ops.mla import mla_attention
from k3jax.ops.router import route

TOLERANCE = {"float32": 3e-5, "bfloat16": 4e-2, "float16": 5e-3}  # of the largest value of an array
B, T, H = 2, 12, 2
IDS = jnp.asarray([[1] * 5 + [2] * 5 + [0] * 2, [1] * 12], jnp.int32)
PLACES = jnp.asarray(np.random.default_rng(9).integers(0, 3, (B, T, 3)), jnp.int32)
GRIDS = jnp.asarray(np.broadcast_to([2, 3, 3], (B, T, 3)), jnp.int32)
SLOTS = jnp.asarray([[0, 1, 0], [0, -1, 1]], jnp.int32)
INDICES = jnp.asarray(np.random.default_rng(8).permuted(np.tile(np.arange(4), (T, 1)), axis=1)[:, :2], jnp.int32)


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape)


class Wide(np.ndarray):
    """An input that stays float32 beside narrow ones."""


def wide(x):
    return np.asarray(x).view(Wide)


DECAY, BETA = wide(-(normal(B, T, H, 4) ** 2)), wide(1 / (1 + np.exp(-normal(B, T, H))))
KEYS, VALUES = normal(B, T, H, 4) / 2, normal(B, T, H, 3)
MATRICES = [0.2 * normal(4, *shape) for shape in ((24, 32), (24, 32), (32, 24))]
EXPERTS = [normal(T, 32), wide(abs(normal(T, 2))), *MATRICES]


def experts(impl, x, weights, *matrices):
    unit = Unit(Activation("situ"))
    return apply_experts(x, weights, INDICES, jnp.arange(T) < 10, matrices, unit, impl=impl)[0]


def depth(tape, sources, query, norm):
    count = jnp.ones((), jnp.int32)
    h, sources, tape = read_depth(sources, jnp.zeros_like(sources) if tape else None, count, query, norm, 1e-5)
    return h, keep_depth(sources.at[count].add(h), tape)


def latent(absorb, q, c, r, w_k, w_v):
    return mla_attention(q, c, r, w_k, w_v, IDS, IDS, absorb=absorb)


def learnt(hidden, head, weights):
    return cross_entropy(hidden, head, jnp.asarray(IDS), weights, chunk=7)


def routed(scores):
    return route(scores, jnp.zeros(4, scores.dtype), 2).weights


def mixed(sources, query, norm):
    return attnres_mix(sources, jnp.ones((), jnp.int32), query, norm, 1e-5)


def seen(q, k, v):
    return vit.segment_attention(q, k, v, IDS, IDS)


DEPTH = [normal(3, B, T, 8), normal(8), normal(8)]
LATENT = [normal(B, T, H, 6), normal(B, T, 5), normal(B, T, 2), normal(H, 4, 5), normal(H, 3, 5)]
STAYS, FLOAT32 = "as given", "float32"
# What is called, its arguments, and the types of its results.
OPS = {
    "l2norm": (l2norm, [normal(B, T, 8)], [STAYS]),
    "rms_norm": (partial(rms_norm, eps=1e-5), [normal(B, T, 8), normal(8)], [STAYS]),
    "kda_gate": (lambda *x: kda_gate(*x, -5.0), [normal(B, T, H, 4), normal(H), normal(H, 4)], [FLOAT32]),
    "softplus gate": (lambda *x: kda_gate(*x, None), [normal(B, T, H, 4), normal(H), normal(H, 4)], [FLOAT32]),
    "segment_summary": (lambda *x: segment_summary(*x, IDS), [KEYS, VALUES, DECAY, BETA], [FLOAT32, FLOAT32]),
    "short_conv": (lambda *x: short_conv(*x, segment_ids=IDS)[0], [normal(B, T, H, 4), normal(H, 4, 4)], [FLOAT32]),
    "short_conv on": (short_conv, [normal(B, T, H, 4), normal(H, 4, 4), normal(B, 3, H, 4)], [FLOAT32, STAYS]),
    "attnres_mix": (mixed, DEPTH, [STAYS]),
    "read_depth": (partial(depth, True), DEPTH, [STAYS, STAYS]),
    "read_depth plain": (partial(depth, False), DEPTH, [STAYS, STAYS]),
    "mla absorbed": (partial(latent, True), LATENT, [STAYS]),
    "mla expanded": (partial(latent, False), LATENT, [STAYS]),
    "experts fixed": (partial(experts, "fixed"), EXPERTS, [STAYS]),
    "experts ragged": (partial(experts, "ragged"), EXPERTS, [STAYS]),
    "experts plain": (partial(experts, "plain"), EXPERTS, [STAYS]),
    "route": (routed, [wide(abs(normal(T, 4)))], [FLOAT32]),
    "cross_entropy": (learnt, [normal(B, T, 8), normal(9, 8), wide(abs(normal(B, T)))], [FLOAT32]),
    "segment_attention": (seen, [normal(B, T, H, n) for n in (4, 4, 3)], [STAYS]),
    "rotary_2d": (lambda x: vit.rotary_2d(x, PLACES), [normal(B, T, H, 8)], [STAYS]),
    "position_embedding": (
        lambda x: vit.position_embedding(x, vit.frame_table(4, 6), PLACES, GRIDS), [normal(4, 5, 6)], [FLOAT32]
    ),
    "join_cells": (lambda x: vit.join_cells(x, SLOTS, 4), [normal(B, T, 6)], [STAYS]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """The sequence is more than one block of keys, and the last is not full."""
    monkeypatch.setattr(mla, "BLOCK", 8)
    monkeypatch.setattr(vit, "BLOCK", 8)


def typed(inputs, dtype):
    return tuple(jnp.asarray(np.asarray(x), jnp.float32 if isinstance(x, Wide) else dtype) for x in inputs)


@partial(jax.jit, static_argnums=0)
def both(f, inputs):
    """Results, and gradients for random cotangents."""
    out, pull = jax.vjp(f, *inputs)
    return jax.tree.leaves(out), pull(jax.tree.map(lambda x: jnp.asarray(normal(1, *x.shape)[0], x.dtype), out))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", OPS)
def test_op(name, dtype):
    f, inputs, types = OPS[name]
    inputs = typed(inputs, dtype)
    out, gradients = both(f, inputs)
    assert [x.dtype for x in out] == [dtype if t == STAYS else t for t in types]
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]
    exact = both(f, tuple(x.astype(jnp.float64) for x in inputs))
    for a, b in zip(jax.tree.leaves((out, gradients)), jax.tree.leaves(exact), strict=True):
        assert np.all(np.isfinite(np.asarray(a, np.float64)))
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=TOLERANCE[dtype] * np.abs(b).max())


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_passes_gradients_on(fmt, dtype):
    x, d = (jnp.asarray(normal(n, 64), dtype) for n in (3, 4))
    d = d[:3]
    for rounded in (partial(mx.fake_quant, fmt=fmt), lambda x: mx.round_through(x, jnp.bfloat16)):
        y, pull = jax.vjp(rounded, x)
        assert y.dtype == dtype
        np.testing.assert_array_equal(pull(d)[0], d)
