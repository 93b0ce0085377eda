"""The two token mixers: Kimi Delta Attention and gated latent attention without positions."""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.cache import layer_cache, with_layer_cache, written
from k3jax.config import ModelConfig
from k3jax.nn.layers import Policy, float32_weight, log_uniform_dt, project, rms_norm, weight
from k3jax.ops.conv import short_conv
from k3jax.ops.kda import accumulator, kda, kda_gate, l2norm
from k3jax.ops.kda_context import kda_over, short_conv_over
from k3jax.ops.mla import mla_attention
from k3jax.sharding import along, constrain, mesh_axes, on_shards

LATENT_EPS = 1e-6  # of the two norms inside MLA; every other norm has the config's


class KimiDeltaAttention(nn.Module):
    """W_o[ sigmoid(W_g x) * RMSNorm(KDA(q, k, v, decay, beta)) ], q, k, v = SiLU(ShortConv(W x)) (Eq. 1-6)."""

    cfg: ModelConfig
    policy: Policy

    @nn.compact
    def __call__(self, x: Array, ids: Array | None, stacks: dict | None, repeat: Array):
        """x [B,T,D], segment ids [B,T] or None, the caches of all repeats of this layer or None, and which of them is its
        own -> y [B,T,D], new caches."""
        cfg, dtype = self.cfg, self.policy.dtype
        D, H, K, std = cfg.hidden_size, cfg.kda_num_heads, cfg.kda_head_dim, cfg.initializer_range
        wide = accumulator(dtype)
        cache, new_cache = stacks and layer_cache(stacks, repeat), {}
        time = _time(x, cache)
        tokens, context = ("batch", time, "heads"), "".join(mesh_axes(time))

        def mixed(name):
            w = weight(self, f"{name}_proj", (H, K, D), ("heads", None, "embed"), std)
            taps = cfg.short_conv_kernel_size
            bound = taps**-0.5
            conv = float32_weight(
                self, f"{name}_conv1d", _uniform(bound), (H, K, taps), ("heads", None, None)
            )
            y = constrain(project(x, w), *tokens, None)
            if context:
                y = on_shards(
                    lambda *x: (short_conv_over(context, *x),), [tokens, ("heads",), tokens[:2]], [tokens]
                )(y, conv, ids)[0]
            else:
                y, new_cache[f"{name}_conv1d"] = short_conv(y, conv, cache and cache[f"{name}_conv1d"], ids)
            return jax.nn.silu(y)

        q, k, v = mixed("q"), mixed("k"), mixed("v")
        q, k, v = (l2norm(q) * K**-0.5).astype(dtype), l2norm(k).astype(dtype), v.astype(dtype)

        # What decides beta and decay is not rounded to a narrower compute dtype on its way.
        w = weight(self, "b_proj", (H, D), ("heads", "embed"), std)
        beta = jax.nn.sigmoid(project(x, w, wide))
        z = project(x, weight(self, "f_a_proj", (K, D), (None, "embed"), std))
        w = weight(self, "f_b_proj", (H, K, K), ("heads", None, None), std)
        z = project(z, w, wide)
        A_log = float32_weight(self, "A_log", nn.initializers.zeros, (H,), ("heads",))
        dt_bias = float32_weight(self, "dt_bias", log_uniform_dt(), (H, K), ("heads", None))
        g = kda_gate(z, A_log, dt_bias, cfg.gate_lower_bound)

        state, segment_ids = cache and cache["state"], ids
        if cache is not None and ids is not None:
            # A cached row is one document with one state: its ids only say which tokens are padding.
            valid = (ids > 0)[:, :, None]
            k, g = jnp.where(valid[..., None], k, 0), jnp.where(valid[..., None], g, 0)
            beta, segment_ids = jnp.where(valid, beta, 0), None
        options = {"gate_lower_bound": cfg.gate_lower_bound, "impl": self.policy.kda_impl}
        if context:
            run = on_shards(lambda *x: (kda_over(context, *x, **options),), [tokens] * 5 + [tokens[:2]], [tokens])
            (o,) = run(q, k, v, g, beta, ids)
        else:
            states = ("batch", "heads")
            run = on_shards(partial(kda, **options), [tokens] * 5 + [states, ("batch",)], [tokens, states])
            o, state = run(q, k, v, g, beta, state, segment_ids)

        if cfg.use_full_rank_gate:
            gate = project(x, weight(self, "g_proj", (H, K, D), ("heads", None, "embed"), std))
        else:
            gate = project(x, weight(self, "g_a_proj", (K, D), (None, "embed"), std))
            gate = project(gate, weight(self, "g_b_proj", (H, K, K), ("heads", None, None), std))
        o_norm = float32_weight(self, "o_norm", nn.initializers.ones, (K,), (None,))
        o = rms_norm(o.astype(wide), o_norm, cfg.rms_norm_eps) * jax.nn.sigmoid(gate.astype(wide))
        o = constrain(o.astype(dtype), *tokens, None)
        y = _output(self, o)
        if stacks is not None:
            stacks = with_layer_cache(stacks, repeat, {"state": state, **new_cache})
        return y, stacks


class LatentAttention(nn.Module):
    """W_o( sigmoid(W_g x) * attention ) over keys and values expanded from a cached latent, never rotated (Eq. 7)."""

    cfg: ModelConfig
    policy: Policy

    @nn.compact
    def __call__(
        self, x: Array, ids: Array, stacks: dict | None, repeat: Array, places: Array | None, present: Array | None
    ):
        """x [B,T,D], ids [B,T], the caches of all repeats of this layer, which of them is its own, the places in it of
        the first tokens, which follow each other (tokens behind them are padding), and [B,S] which cached ones are real."""
        cfg = self.cfg
        D, H, std = cfg.hidden_size, cfg.num_attention_heads, cfg.initializer_range
        K, R, V, L = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim, cfg.kv_lora_rank

        if cfg.q_lora_rank:
            q = project(x, weight(self, "q_a_proj", (cfg.q_lora_rank, D), (None, "embed"), std))
            q = rms_norm(q, weight(self, "q_a_layernorm", (cfg.q_lora_rank,), (None,)), LATENT_EPS)
            w = weight(self, "q_b_proj", (H, K + R, cfg.q_lora_rank), ("heads", None, "embed"), std)
            q = project(q, w)
        else:
            q = project(x, weight(self, "q_proj", (H, K + R, D), ("heads", None, "embed"), std))
        tokens = ("batch", _time(x, stacks), "heads")
        q = constrain(q, *tokens, None)

        w = weight(self, "kv_a_proj_with_mqa", (L + R, D), (None, "embed"), std)
        kv = constrain(project(x, w), "batch", None, None)
        latent, k_rope = kv[..., :L], kv[..., L:]
        latent = rms_norm(latent, weight(self, "kv_a_layernorm", (L,), (None,)), LATENT_EPS)
        zero = jnp.zeros((), jnp.int32)
        kv_ids, keys, layer, start = ids, ("batch",), None, zero
        if stacks is not None:
            # Stacks are written in place and read block by block: at long contexts a copy of one layer's is gigabytes.
            start = places[0]
            latent, k_rope = (
                written(stacks[name], new[None, :, : len(places)], (repeat, zero, start, zero), 2)
                for name, new in (("latent", latent), ("k_rope", k_rope))
            )
            stacks, kv_ids, keys, layer = {"latent": latent, "k_rope": k_rope}, present, (None, "batch"), repeat
        w_kv = weight(self, "kv_b_proj", (H, K + V, L), ("heads", None, "embed"), std)
        dtype = self.policy.dtype
        in_axes = [tokens, keys, keys, ("heads",), ("heads",), tokens[:2], ("batch",), (), ()]
        o = on_shards(lambda *x: (_attend(mesh_axes(tokens[1]), *x),), in_axes, [tokens])(
            q, latent, k_rope, w_kv[:, :K], w_kv[:, K:], ids, kv_ids, start, layer
        )[0]
        if cfg.mla_use_output_gate:
            gate = project(x, weight(self, "g_proj", (H, V, D), ("heads", None, "embed"), std))
            wide = accumulator(dtype)
            o = (o.astype(wide) * jax.nn.sigmoid(gate.astype(wide))).astype(dtype)
        o = constrain(o, *tokens, None)
        y = _output(self, o)
        return y, stacks


def _output(module: nn.Module, o: Array) -> Array:
    """W_o of the heads' outputs [B,T,H,V], side by side: [B,T,D]."""
    cfg = module.cfg
    o = o.reshape(*o.shape[:2], -1)  # with axes H and V of its own, TPUs would copy the weight before each product
    return project(o, weight(module, "o_proj", (cfg.hidden_size, o.shape[2]), ("embed", "heads"), cfg.initializer_range))


def _time(x: Array, cache: dict | None) -> str | None:
    """The logical axis of T inside a mixer: a cached row stays whole."""
    return along("time", x.shape[1]) if cache is None else None


def _attend(context: tuple[str, ...], q, latent, k_rope, w_k, w_v, q_ids, kv_ids, start, layer):
    """`mla_attention` of the queries on this device, of T split over `context`, with the keys of all."""
    for axis in context:
        start = start + lax.axis_index(axis) * q.shape[1]
    return mla_attention(q, latent, k_rope, w_k, w_v, q_ids, kv_ids, start, layer=layer)


def _uniform(bound: float):
    def init(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
