"""Latent attention: values by hand, and the block-wise form against the plain one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import mla
from k3jax.ops.mla import mla_attention, mla_reference

FORMS = pytest.mark.parametrize("absorb", [False, True])


def draw(seed, B=2, T=7, S=7, H=3, K=4, R=2, L=5, V=6, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, K + R), (B, S, L), (B, S, R), (H, K, L), (H, V, L)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def ones(*shape):
    return jnp.ones(shape, jnp.int32)


@FORMS
def test_by_hand(absorb):
    # One head, K = R = V = L = 1: keys (c, r), scores (2 c + 3 r) / sqrt(2), values 10 c.
    q = jnp.asarray([2.0, 3.0])[None, None, None]
    latent, k_rope = jnp.asarray([[[1.0], [2.0]]]), jnp.asarray([[[0.5], [-0.5]]])
    w_k, w_v = jnp.full((1, 1, 1), 1.0), jnp.full((1, 1, 1), 10.0)
    o = mla_attention(q, latent, k_rope, w_k, w_v, ones(1, 1), ones(1, 2), 1, absorb=absorb)
    a, b = np.exp(3.5 / np.sqrt(2)), np.exp(2.5 / np.sqrt(2))
    assert o.item() == pytest.approx((10 * a + 20 * b) / (a + b), rel=1e-14)
    # From index 0 the second key lies ahead.
    o = mla_attention(q, latent, k_rope, w_k, w_v, ones(1, 1), ones(1, 2), 0, absorb=absorb)
    assert o.item() == pytest.approx(10, rel=1e-14)


CASES = {
    "causal": ([[1] * 7] * 2, [[1] * 7] * 2, 0),
    "packed": ([[1, 1, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 0, 0]], None, 0),
    "left padding": ([[0, 0, 0, 1, 1, 1, 1], [1] * 7], None, 0),
    "cache": ([[1] * 7] * 2, [[0, 0] + [1] * 9 + [0] * 2, [1] * 11 + [0] * 2], 4),
    "nothing to see": ([[0] * 7, [1] * 7], [[1] * 7, [0] * 7], 0),
}


@FORMS
@pytest.mark.parametrize("case", CASES)
def test_blocks_give_the_reference(case, absorb, monkeypatch):
    monkeypatch.setattr(mla, "BLOCK", 3)  # divides neither 7 nor 13
    q_ids, kv_ids, offset = CASES[case]
    q_ids, kv_ids = jnp.asarray(q_ids), jnp.asarray(kv_ids or q_ids)
    arrays = draw(0, S=kv_ids.shape[1])
    cotangent = draw(1)[0][..., :6]

    def value_and_gradients(form):
        o, vjp = jax.vjp(lambda *a: form(*a, q_ids, kv_ids, offset), *arrays)
        return o, *vjp(cotangent)

    expected = jax.jit(partial(value_and_gradients, mla_reference))()
    found = jax.jit(partial(value_and_gradients, partial(mla_attention, absorb=absorb)))()
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)  # float64 sums in another order
    visible = (q_ids > 0) & (case != "nothing to see")
    assert np.all(np.asarray(found[0])[~visible] == 0)
    assert np.all(np.asarray(found[0])[visible] != 0)


def test_the_offset_may_be_traced():
    arrays = draw(2, T=2)
    for offset in (0, 3, 5):
        o = jax.jit(mla_attention)(*arrays, ones(2, 2), ones(2, 7), jnp.asarray(offset, jnp.int32))
        expected = mla_reference(*arrays, ones(2, 2), ones(2, 7), offset)
        np.testing.assert_allclose(o, expected, rtol=1e-12)


@FORMS
def test_room_behind_the_queries_is_not_visited(absorb, monkeypatch):
    monkeypatch.setattr(mla, "BLOCK", 3)
    q, latent, k_rope, w_k, w_v = draw(8, T=2, S=13)

    def attend(latent, k_rope):  # the queries are tokens 4 and 5
        return mla_attention(q, latent, k_rope, w_k, w_v, ones(2, 2), ones(2, 13), 4, absorb=absorb)

    # A NaN that is looked at spreads, masked or not.
    poisoned = attend(latent.at[:, 6:].set(jnp.nan), k_rope.at[:, 6:].set(jnp.nan))
    np.testing.assert_array_equal(poisoned, attend(latent, k_rope))
    assert np.all(np.isfinite(poisoned))


@FORMS
def test_segments_are_isolated(absorb):
    arrays = draw(3, B=1)
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 0]])
    last = lambda *a: mla_attention(*a, ids, ids, absorb=absorb)[:, 3:].sum()  # noqa: E731
    q, latent, k_rope, *_ = jax.jit(jax.grad(last, argnums=(0, 1, 2)))(*arrays)
    for gradient in (q, latent, k_rope):
        assert np.all(gradient[:, :3] == 0) and np.all(gradient[:, 6:] == 0)
    # The segment's first query sees one key: moving q or the scores changes nothing, its value does.
    assert np.all(latent[:, 3:6] != 0) and np.all(q[:, 4:6] != 0)


@FORMS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_masked_rows_have_finite_gradients(absorb, dtype):
    arrays = draw(4, dtype=dtype)
    q_ids = jnp.asarray([[0, 0, 1, 1, 1, 1, 1], [0] * 7])

    def loss(*arrays):
        return jnp.sum(mla_attention(*arrays, q_ids, q_ids, absorb=absorb).astype(jnp.float32))

    for gradient in jax.jit(jax.grad(loss, argnums=range(5)))(*arrays):
        assert np.all(np.isfinite(np.asarray(gradient, np.float32)))


@FORMS
def test_large_scores_do_not_overflow(absorb):
    q, latent, k_rope, w_k, w_v = draw(5, dtype=jnp.float32)
    arrays = (1e4 * q, latent, k_rope, w_k, w_v)
    o = mla_attention(*arrays, ones(2, 7), ones(2, 7), absorb=absorb)
    exact = mla_reference(*(x.astype(jnp.float64) for x in arrays), ones(2, 7), ones(2, 7))
    np.testing.assert_allclose(o, exact, rtol=1e-4, atol=1e-4)


@FORMS
def test_bfloat16(absorb):
    arrays = draw(6, dtype=jnp.bfloat16)
    o = mla_attention(*arrays, ones(2, 7), ones(2, 7), absorb=absorb)
    assert o.dtype == jnp.bfloat16
    exact = mla_reference(*(x.astype(jnp.float64) for x in arrays), ones(2, 7), ones(2, 7))
    error = np.abs(np.asarray(o, np.float64) - exact).max() / np.abs(exact).max()
    assert 0 < error < 2e-2  # a few roundings of 2^-9 each


def test_the_form_with_fewer_multiplications_is_taken():
    def expands_keys(T):
        arrays = draw(7, T=T, S=64, K=16, V=16, L=32)
        return "f64[2,64,3,16]" in str(jax.make_jaxpr(mla_attention)(*arrays, ones(2, T), ones(2, 64)))

    assert expands_keys(48) and not expands_keys(1)


@FORMS
def test_a_layer_of_a_stack_is_read_in_place(absorb, monkeypatch):
    monkeypatch.setattr(mla, "BLOCK", 3)
    q, latent, k_rope, w_k, w_v = draw(0, S=13)
    ids, kv_ids = ones(2, 7), ones(2, 13)
    stacks = [jnp.stack([x + 1, x, x * 2]) for x in (latent, k_rope)]
    alone = mla_attention(q, latent, k_rope, w_k, w_v, ids, kv_ids, 6, absorb=absorb)
    inside = mla_attention(q, *stacks, w_k, w_v, ids, kv_ids, 6, absorb=absorb, layer=jnp.int32(1))
    np.testing.assert_array_equal(inside, alone)
