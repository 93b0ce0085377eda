"""What every module shares: how parameters are declared and read, norms, and the dense feed-forward network."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.config import ModelConfig
from k3jax.ops import mx
from k3jax.ops.experts import Activation
from k3jax.ops.kda import accumulator
from k3jax.sharding import along, constrain, mesh_axes, on_shards


class Policy(NamedTuple):
    """Number formats of a model.

    Attributes:
        dtype: of matrix products and of what flows between layers.
        param_dtype: of stored parameters (those the release keeps in float32 are never narrower).
        experts: "dequantized" (weights as they are), "qat" (fake-quantised to MXFP4 as they are used, and every other
            weight rounded to the bfloat16 it is released in, both straight-through) or "packed" (MXFP4 in memory).
        mxfp8_inputs: what meets an expert's weights passes through MXFP8.
        kda_impl: `impl` of `k3jax.ops.kda`. With "scan", its reference, JAX differentiates the rest of the model as it is
            written too: on one device in forward mode as in reverse, for more memory and time.
        expert_impl: `impl` of `k3jax.ops.experts.apply_experts`.
        capacity_drop: experts leave out what exceeds the first round's room; `RouterStats.dropped` counts it.
    """

    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    experts: str = "dequantized"
    mxfp8_inputs: bool = False
    kda_impl: str = "auto"
    expert_impl: str = "auto"
    capacity_drop: bool = False

    @property
    def forward_mode(self) -> bool:
        """Whether no derivative is by hand, for those know reverse mode alone."""
        return self.kda_impl == "scan"


def declare(module: nn.Module, name: str, init, shape, axes, dtype) -> Array:
    """Declares a parameter: its name, initialiser, shape, logical axes and dtype, in one place."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)


def weight(module: nn.Module, name: str, shape, axes, std: float | None = None) -> Array:
    """A weight the release stores in bfloat16, ready for use in the compute dtype: normal(std), or ones."""
    policy = module.policy
    init = nn.initializers.ones if std is None else nn.initializers.normal(std)
    value = declare(module, name, init, shape, axes, policy.param_dtype)
    if policy.experts == "qat":
        # What a checkpoint stores is what the forward pass uses.
        value = mx.round_through(value, jnp.bfloat16)
    return value.astype(policy.dtype)


def float32_weight(module: nn.Module, name: str, init, shape, axes) -> Array:
    """A weight that is stored and used in float32 (float64 under float64)."""
    policy = module.policy
    value = declare(module, name, init, shape, axes, accumulator(policy.param_dtype))
    return value.astype(accumulator(policy.dtype))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis.

    Statistics in float32 (float64 for float64 x); the normalised value is cast to x's dtype before the weight.
    """
    wide = x.astype(accumulator(x.dtype))
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def activation(cfg: ModelConfig) -> Activation:
    """The gated unit the config names."""
    return Activation(cfg.hidden_act, cfg.activation_situ_beta, cfg.activation_situ_linear_beta)


def project(x: Array, w: Array, dtype=None) -> Array:
    """y_bt = w x_bt for every token: x [B,T,*I], w [*O,*I] -> [B,T,*O] in `dtype`, x's by default.

    Where no device holds a part of T, batch and time are one axis: with two, CPUs compute the transpose of what meets x
    in w's gradient element by element, which costs as much as the product.
    """
    inputs, outputs = x.shape[2:], w.shape[: w.ndim + 2 - x.ndim]
    if mesh_axes("seq"):
        contracted = tuple(range(2, x.ndim)), tuple(range(len(outputs), w.ndim))
        return lax.dot_general(x, w, (contracted, ((), ())), preferred_element_type=dtype)
    rows, matrix = x.reshape(-1, math.prod(inputs)), w.reshape(-1, math.prod(inputs))
    y = lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    return y.reshape(*x.shape[:2], *outputs)


def embed(table: Array, tokens: Array) -> Array:
    """The rows of table [V,D] that tokens [B,T] name: [B,T,D], split as what flows between sublayers is. Tokens outside
    0..V-1 have zeros.

    Tokens and vectors move and the table does not: a device looks its own rows and columns up for all that it shares the
    table with. Of the sum over parts of the vocabulary one term is not zero.
    """
    seq = along("seq", tokens.shape[1])
    columns, rows = mesh_axes("embed"), mesh_axes("vocab")

    def local(table, tokens):
        if columns:
            tokens = lax.all_gather(tokens, columns, axis=0, tiled=True)
        if rows:
            tokens = tokens - lax.axis_index(rows) * table.shape[0]
        tokens = jnp.where(tokens < 0, table.shape[0], tokens)  # else it would count from the end
        x = jnp.take(table, tokens, axis=0, mode="fill", fill_value=0)
        if columns:
            x = lax.all_to_all(x, columns, 0, 2, tiled=True)
        if rows:
            x = lax.psum_scatter(x, rows, scatter_dimension=1, tiled=True) if seq else lax.psum(x, rows)
        return (x,)

    where = [("vocab", "embed"), ("batch", along("time", tokens.shape[1]))]
    return on_shards(local, where, [("batch", seq)])(table, tokens)[0]


class DenseFFN(nn.Module):
    """down( act(gate x, up x) ): the dense layers' feed-forward part and the shared experts. x [B,T,D]."""

    cfg: ModelConfig
    policy: Policy
    width: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        cfg, D = self.cfg, self.cfg.hidden_size
        gate, up = (
            weight(self, name, (self.width, D), ("mlp", "embed"), cfg.initializer_range)
            for name in ("gate_proj", "up_proj")
        )
        down = weight(self, "down_proj", (D, self.width), ("embed", "mlp"), cfg.initializer_range)
        time = along("time", x.shape[1])
        x = constrain(x, "batch", time, None)  # once, for both products and their derivatives
        h = activation(cfg)(project(x, gate), project(x, up))
        return project(constrain(h, "batch", time, "mlp"), down)


def log_uniform_dt(low: float = 1e-3, high: float = 1e-1):
    """Initialiser of decay biases: softplus(dt_bias) log-uniform in [low, high], so that heads start with memories of
    different lengths."""

    def init(key, shape, dtype):
        dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(low), math.log(high)))
        return dt + jnp.log(-jnp.expm1(-dt))

    return init
