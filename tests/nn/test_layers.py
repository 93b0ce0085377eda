"""Norms, parameter declaration and the dense feed-forward part, by hand."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import ModelConfig, make_mesh
from k3jax.nn.layers import DenseFFN, Policy, embed, float32_weight, log_uniform_dt, rms_norm, weight
from k3jax.sharding import spec

CFG = ModelConfig(
    model_type="kimi_linear",
    vocab_size=8,
    hidden_size=2,
    intermediate_size=3,
    num_hidden_layers=1,
    num_attention_heads=1,
    kv_lora_rank=1,
    qk_nope_head_dim=1,
    qk_rope_head_dim=1,
    v_head_dim=1,
    kda_layers=(),
    full_attn_layers=(1,),
    kda_head_dim=1,
    kda_num_heads=1,
    num_experts=2,
    num_experts_per_token=1,
    num_shared_experts=1,
    moe_intermediate_size=1,
)


def test_rms_norm_by_hand():
    x = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    found = rms_norm(x, jnp.asarray([1.0, 2.0]), 12.5)  # mean square 12.5, so the root is 5
    np.testing.assert_allclose(found, [[0.6, 1.6], [0, 0]], rtol=1e-15)


def test_rms_norm_is_cast_before_the_weight():
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16), jnp.asarray(rng.normal(size=32), jnp.float32)
    found = rms_norm(x, w, 1e-5)
    wide = np.asarray(x, np.float64)
    normed = jnp.asarray(wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)
    expected = normed * w.astype(jnp.bfloat16)[None]
    assert found.dtype == jnp.bfloat16
    # Statistics in float32 round like exact ones but for a hair, which a bfloat16 sum of squares does not.
    assert np.mean(np.asarray(found) == np.asarray(expected)) > 0.999


class Holder(nn.Module):
    policy: Policy

    @nn.compact
    def __call__(self):
        narrow = weight(self, "w", (4, 6), ("mlp", "embed"), std=0.5)
        ones = weight(self, "norm", (6,), (None,))
        wide = float32_weight(self, "A_log", nn.initializers.zeros, (3,), (None,))
        return narrow, ones, wide


@pytest.mark.parametrize(
    "dtype, param_dtype, at_least_float32",
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float64", "float64", "float64"),
    ],
)
def test_weights(dtype, param_dtype, at_least_float32):
    holder = Holder(Policy(jnp.dtype(dtype), jnp.dtype(param_dtype)))
    (narrow, ones, wide), variables = holder.init_with_output(jax.random.key(0))
    boxed = variables["params"]
    assert boxed["w"].names == ("mlp", "embed") and boxed["w"].value.shape == (4, 6)
    assert {boxed["w"].value.dtype, boxed["norm"].value.dtype} == {jnp.dtype(param_dtype)}
    assert {narrow.dtype, ones.dtype} == {jnp.dtype(dtype)}
    # What the release keeps in float32 is neither stored nor used in less.
    assert wide.dtype == boxed["A_log"].value.dtype == at_least_float32
    assert np.all(ones == 1) and np.all(wide == 0) and 0.2 < np.std(narrow.astype(jnp.float32)) < 0.8


def test_qat_uses_what_a_checkpoint_stores():
    params = {"w": jnp.full((4, 6), 1 / 3), "norm": jnp.full(6, 1.001), "A_log": jnp.full(3, 0.1)}
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    qat = Holder(Policy(experts="qat"))

    def total(params):
        narrow, ones, wide = qat.apply({"params": params})
        return jnp.sum(narrow) + jnp.sum(ones) + jnp.sum(wide), (narrow, ones, wide)

    gradients, (narrow, ones, wide) = jax.grad(total, has_aux=True)(params)
    np.testing.assert_array_equal(narrow, np.full((4, 6), 171 / 512))  # 1/3 = 1.0101011 (bfloat16) * 2^-2
    np.testing.assert_array_equal(ones, np.ones(6))
    np.testing.assert_array_equal(wide, params["A_log"])  # float32 in the checkpoint too
    assert all(np.all(g == 1) for g in jax.tree.leaves(gradients))  # straight through


def test_dense_ffn_by_hand():
    params = {
        "gate_proj": jnp.asarray([[1.0, 0.0], [0.0, -1.0], [2.0, 1.0]]),
        "up_proj": jnp.asarray([[1.0, 1.0], [2.0, 0.0], [0.0, 3.0]]),
        "down_proj": jnp.asarray([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]]),
    }
    x = jnp.asarray([[[1.0, 2.0]]])  # gates 1, -2, 4; ups 3, 2, 6
    silu = lambda g: g / (1 + np.exp(-g))  # noqa: E731
    situ = lambda g, u: 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)  # noqa: E731
    for act, unit in (("silu", lambda g, u: silu(g) * u), ("situ", situ)):
        cfg = dataclasses.replace(CFG, hidden_act=act)
        y = DenseFFN(cfg, Policy(jnp.float64, jnp.float64), 3).apply({"params": params}, x)
        a, b, c = unit(1, 3), unit(-2, 2), unit(4, 6)
        np.testing.assert_allclose(y[0, 0], [a + 2 * c, b - c], rtol=1e-14)


def test_decay_biases_spread_over_memories():
    bias = log_uniform_dt()(jax.random.key(0), (4000,), jnp.float32)
    dt = np.asarray(jax.nn.softplus(bias))
    assert 1e-3 <= dt.min() * (1 + 1e-5) and dt.max() <= 1e-1 * (1 + 1e-5)
    # Log-uniform: a quarter in each quarter of the exponents.
    counts, _ = np.histogram(np.log10(dt), bins=4, range=(-3, -1))
    assert np.all(np.abs(counts / 4000 - 0.25) < 0.03), counts


@pytest.mark.parametrize("T", [8, 1])
@pytest.mark.parametrize("axes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"fsdp": 4, "data": 2}, {"context": 2, "tensor": 4}])
def test_embedding_on_a_mesh_moves_no_table(axes, T):
    mesh = make_mesh(**axes)
    V, D = 24, 20
    rng = np.random.default_rng(0)
    table, tokens = rng.normal(size=(V, D)), rng.integers(V, size=(8, T)).astype(np.int32)
    tokens[:4, 0] = -1, V, -V, 2**31 - 1
    cotangent = rng.normal(size=(8, T, D))

    def both(table, tokens, cotangent):
        x, pull = jax.vjp(lambda table: embed(table, tokens), table)
        return x, pull(cotangent)[0]

    expected = jax.jit(both)(table, tokens, cotangent)
    assert not expected[0][:4, 0].any() and expected[0][4:].all()
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, jax.NamedSharding(mesh, spec(("vocab", "embed"), table.shape, mesh)))
        program = jax.jit(both, out_shardings=(None, placed.sharding)).lower(placed, tokens, cotangent).compile()
        x, gradient = program(placed, tokens, cotangent)
    np.testing.assert_array_equal(x, expected[0])
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-14, atol=1e-14)
    tables = {(V, D), (V // mesh.shape["tensor"], D)} - {placed.sharding.shard_shape((V, D))}
    assert tables and not any(f"[{rows},{columns}]" in program.as_text() for rows, columns in tables)
