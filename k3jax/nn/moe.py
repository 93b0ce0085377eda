"""Stable LatentMoE: a router over many small experts that act in a latent, beside shared experts (Eq. 11-14)."""

from __future__ import annotations

from functools import partial

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.config import MX_BLOCK, ModelConfig
from k3jax.nn.layers import DenseFFN, Policy, activation, declare, project, rms_norm, weight
from k3jax.ops import mx
from k3jax.ops.experts import Unit, apply_experts
from k3jax.ops.kda import accumulator
from k3jax.ops.packed import Packed
from k3jax.ops.router import expert_load, quantile_histogram, route, router_scores
from k3jax.sharding import along, constrain, gathered, mesh_axes, on_shards


@flax.struct.dataclass
class RouterStats:
    """What one forward pass tells of a router: `load` int32 [E], tokens each expert was chosen by, `histogram` int32
    [E,1000] for Quantile Balancing, and `dropped` float32 (float64 for float64), how many (token, expert) pairs were left
    out (0 unless `capacity_drop`; they may be more than int32 holds). Global over the mesh; padding is not counted."""

    load: Array
    histogram: Array
    dropped: Array


def expert_stacks(segment: dict) -> dict[str, dict[str, Array]]:
    """{layer: the packed experts of all its repeats} of a segment's parameters."""
    return {
        name: layer["block_sparse_moe"]["experts"] for name, layer in segment.items() if "block_sparse_moe" in layer
    }


class RoutedExperts(nn.Module):
    """The routed experts' weights, ready for the matrix products: w1, w3 [E,F,L] and w2 [E,L,F] in the compute dtype, or
    still packed within the whole stack they are in."""

    cfg: ModelConfig
    policy: Policy

    @nn.compact
    def __call__(self, stacks: dict[str, Array] | None, repeat: Array) -> tuple[Array, ...] | tuple[Packed, ...]:
        cfg, policy = self.cfg, self.policy
        E, F, L = cfg.num_experts, cfg.moe_intermediate_size, cfg.latent_size
        axes = ("experts", "expert_out", None)
        if stacks is not None:
            # A grouped product would first copy its slice of the stack: three times the bytes of a layer's experts.
            return tuple(Packed(stacks[f"{name}_packed"], stacks[f"{name}_scale"], repeat) for name in ("w1", "w3", "w2"))

        def matrix(name, shape):
            if policy.experts == "packed":
                zeros, (E, rows, columns) = nn.initializers.zeros, shape
                packed = declare(self, f"{name}_packed", zeros, (E, rows, columns // 2), axes, jnp.uint8)
                scale = declare(self, f"{name}_scale", zeros, (E, rows, columns // MX_BLOCK), axes, jnp.uint8)
                return mx.dequantize(mx.unpack(packed), scale, policy.dtype)
            init = nn.initializers.normal(cfg.initializer_range)
            value = declare(self, name, init, shape, axes, policy.param_dtype)
            if policy.experts == "qat":
                value = mx.fake_quant(value, "mxfp4")
            return value.astype(policy.dtype)

        return matrix("w1", (E, F, L)), matrix("w3", (E, F, L)), matrix("w2", (E, L, F))


class LatentMoE(nn.Module):
    """y = W_up RMSNorm( sum_i p_i E_i(W_down x) ) + Shared(x); without a latent size, E_i acts on x itself.

    Without shared experts, Shared is nothing.
    """

    cfg: ModelConfig
    policy: Policy

    @nn.compact
    def __call__(
        self, x: Array, valid: Array, stacks: dict[str, Array] | None, repeat: Array
    ) -> tuple[Array, RouterStats]:
        """x [B,T,D], valid [B,T] bool -> y [B,T,D] and the router's statistics.

        `stacks`: the packed experts of all repeats of this layer, of which `repeat` is its own; None: it has parameters.
        """
        cfg, policy = self.cfg, self.policy
        D, E, L, std = cfg.hidden_size, cfg.num_experts, cfg.latent_size, cfg.initializer_range
        gate = weight(self, "gate", (E, D), (None, "embed"), std)
        bias = self.variable(
            "router", "e_score_correction_bias", jnp.zeros, (E,), accumulator(policy.param_dtype)
        ).value
        experts = RoutedExperts(cfg, policy, name="experts")(stacks, repeat)

        z = x
        if cfg.routed_expert_hidden_size:
            w = weight(self, "routed_expert_down_proj", (L, D), (None, "embed"), std)
            z = project(x, w)
        if policy.mxfp8_inputs:
            z = mx.fake_quant(z, "mxfp8")
        seq = along("seq", x.shape[1])
        z = constrain(z, "batch", seq, None)
        u, stats = _routed(cfg, policy, x, z, valid, gate, bias.astype(accumulator(policy.dtype)), experts, seq)
        if cfg.latent_moe_use_norm:
            u = rms_norm(u, weight(self, "routed_expert_norm", (L,), (None,)), cfg.rms_norm_eps)
        if cfg.routed_expert_hidden_size:
            w = weight(self, "routed_expert_up_proj", (D, L), ("embed", None), std)
            u = project(u, w)
        if cfg.num_shared_experts:
            u = u + DenseFFN(cfg, policy, cfg.shared_intermediate_size, name="shared_experts")(x)
        return u, stats


def _routed(cfg, policy, x, z, valid, gate, bias, experts, seq):
    """The routed part on every device's own tokens: route, exchange, expert products, exchange back."""
    body = partial(_routed_local, cfg, policy, mesh_axes("experts"), mesh_axes("batch") + mesh_axes(seq))
    tokens = ("batch", seq)
    arrays, tree = jax.tree.flatten(experts)
    axes = Packed((None, "experts"), (None, "experts"), ()) * 3 if len(arrays) > 3 else [("experts", "expert_out")] * 3
    run = on_shards(
        lambda *x: body(*x[:5], jax.tree.unflatten(tree, x[5:])), [tokens, tokens, tokens, (), (), *axes], [tokens, ()]
    )
    return run(x, z, valid, gate, bias, *arrays)


def _routed_local(cfg, policy, expert_axes, token_axes, x, z, valid, gate, bias, experts):
    B, T, D = x.shape
    if shards := mesh_axes("expert_out"):
        experts = tuple(gathered(w, shards, 1) for w in experts)
    wide = accumulator(policy.dtype)
    flat = valid.reshape(-1)
    logits = jnp.einsum("nd,ed->ne", x.reshape(-1, D).astype(wide), gate.astype(wide))
    scores = router_scores(logits, cfg.moe_router_activation_func)
    k = cfg.num_experts_per_token
    routing = route(
        scores,
        bias,
        k,
        num_groups=cfg.num_expert_group,
        topk_group=cfg.topk_group,
        renormalize=cfg.moe_renormalize,
        scaling=cfg.routed_scaling_factor,
    )
    plain = policy.forward_mode and policy.expert_impl == "auto" and not expert_axes
    y, dropped = apply_experts(
        z.reshape(B * T, -1),
        routing.weights,
        routing.indices,
        flat,
        experts,
        Unit(activation(cfg), policy.mxfp8_inputs),
        expert_axes,
        tuple(dict.fromkeys(token_axes + expert_axes)),
        "plain" if plain else policy.expert_impl,
        policy.capacity_drop,
    )
    stats = RouterStats(
        expert_load(routing.indices, cfg.num_experts, flat),
        quantile_histogram(lax.stop_gradient(scores), routing.cutoff, bias, flat),
        dropped.astype(wide),
    )
    if token_axes:
        stats = lax.psum(stats, token_axes)
    return y.reshape(B, T, -1), stats
