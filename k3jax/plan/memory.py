"""What a step holds beside its arguments: bytes a device of everything temporary, by purpose."""

from __future__ import annotations

import math

from k3jax.config import LayerKind, ModelConfig
from k3jax.plan.arrays import gradient_bytes
from k3jax.plan.communication import NARROW, WIDE, gathered_layer
from k3jax.plan.hardware import Hardware
from k3jax.plan.products import (
    CHUNK,
    GROUP,
    KEY_BLOCK,
    LOSS_CHUNK,
    Sizes,
    absorbed,
    expert_rows,
    fixed_window,
    sizes,
    stays_packed,
)
from k3jax.plan.setting import Serve, Strategy, Train, Workload


def temporaries(config: ModelConfig, workload: Workload, strategy: Strategy, hardware: Hardware) -> dict[str, float]:
    """Bytes by purpose, all held at the worst moment: the derivative of one layer, or of all without remat."""
    mesh, s = vars(strategy.mesh), sizes(config, workload, strategy)
    if isinstance(workload, Serve):
        return _serving(config, workload, strategy, hardware, s)
    exchange = exchange_buffers(config, strategy, s)
    worst = max(config.layers, key=lambda kind: layer_activations(config, kind, s) + exchange * (kind.ffn == "moe"))
    layers = [worst] if workload.remat else config.layers  # recomputed one by one, or all kept
    found = {
        "gradients": gradient_bytes(config, workload, mesh) * (2 if workload.grad_accum > 1 else 1),
        "between layers": between_layers(config, workload, s),
        "activations": sum(layer_activations(config, kind, s) for kind in layers),
        "exchange": sum(kind.ffn == "moe" for kind in layers) * exchange,
        "gathered weights": gathered_layer(config, workload, mesh) * len(layers),
        "unsummed gradients": unsummed_gradients(config, s),
        "loss": loss_chunk(config, s),
    }
    return found


def _serving(
    config: ModelConfig, workload: Serve, strategy: Strategy, hardware: Hardware, s: Sizes
) -> dict[str, float]:
    mesh = vars(strategy.mesh)
    found = {
        "activations": depth_sources(config, s)
        + max(layer_activations(config, kind, s, False) for kind in config.layers),
        "exchange": exchange_buffers(config, strategy, s) if "moe" in {kind.ffn for kind in config.layers} else 0.0,
        "logits": s.rows * s.time * s.vocab * NARROW,
    }
    if mesh["fsdp"] > 1:
        found["gathered weights"] = gathered_layer(config, workload, mesh)
    elif not stays_packed(workload, strategy, hardware, s):
        found["a layer's experts"] = layer_experts(config, s)
    return found


def depth_sources(config: ModelConfig, s: Sizes) -> float:
    """Finished blocks and the running sum: (N + 1) values of the width a token."""
    return (config.num_attn_res_blocks + 1) * s.flat * config.hidden_size * NARROW


def between_layers(config: ModelConfig, workload: Train, s: Sizes) -> float:
    """The sources, their gradient, and what the reads send back; under remat each layer's running sum."""
    running = s.flat * config.hidden_size * NARROW
    return 3 * depth_sources(config, s) + (config.num_hidden_layers * running if workload.remat else 0)


def layer_activations(config: ModelConfig, kind: LayerKind, s: Sizes, training: bool = True) -> float:
    """What one layer's derivative reads, and no more than its forward pass works in without one."""
    mixer = kda_activations(config, s) if kind.mixer == "kda" else mla_activations(config, s, training)
    ffn = dense_activations(s) if kind.ffn == "dense" else moe_activations(config, s)
    residual = 6 * s.flat * config.hidden_size * NARROW  # both sublayers' mixture, norm and running sum
    return residual + mixer + ffn


def kda_activations(config: ModelConfig, s: Sizes) -> float:
    """Of every value of q, k, v: projection and its normalised form narrow, convolution wide; decay logits and log
    decay wide; gate, output and its gated norm narrow; what enters the chunks once more; a wide update. And N, A, P of
    every chunk, a state every GROUP chunks."""
    n, K = s.rows * s.time * s.heads, config.kda_head_dim
    values = 3 * (2 * NARROW + WIDE) + 2 * WIDE + 3 * NARROW + (3 * NARROW + WIDE) + WIDE
    chunks = 3 * CHUNK * WIDE + K * K * WIDE / (CHUNK * GROUP) if s.time > 1 else 2 * K * K * WIDE
    return n * (K * values + chunks)


def mla_activations(config: ModelConfig, s: Sizes, training: bool) -> float:
    """Queries, gate and output narrow; the running softmax's sums wide, kept for every block of keys in training; one
    block's scores and expanded keys."""
    K, R, V, L = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    n, H = s.rows * s.time, s.mla_heads
    width = L if absorbed(config, s.time) else V
    blocks = math.ceil(s.keys / KEY_BLOCK) if training else 2
    block = min(s.keys, KEY_BLOCK)
    work = n * H * block * (WIDE + NARROW) + s.rows * block * H * (K + V) * NARROW
    latents = s.rows * s.keys * (L + R) * NARROW if training else 0.0  # a cache is read where it lies
    return n * H * ((K + R + 3 * V) * NARROW + blocks * (width + 2) * WIDE) + latents + work


def dense_activations(s: Sizes) -> float:
    """Gate, up and hidden units, narrow."""
    return 3 * s.rows * s.time * s.dense * NARROW


def moe_activations(config: ModelConfig, s: Sizes) -> float:
    """Shared experts' gate, up and hidden units; scores and a wide copy of the input; latents and outputs."""
    shared = 3 * s.rows * s.time * s.shared * NARROW
    router = s.flat * (2 * config.num_experts + config.hidden_size) * WIDE
    return shared + router + 3 * s.flat * config.latent_size * NARROW


def exchange_buffers(config: ModelConfig, strategy: Strategy, s: Sizes) -> float:
    """Rows of latents sent, received, in order of their experts, put out and sent back; each one's hidden units thrice.

    The first round has room for a balanced load and three sigma.
    """
    L, F = config.latent_size, config.moe_intermediate_size
    if s.ways == 1:
        rows, sent = expert_rows(s, strategy.exchange), 0.0
    elif strategy.exchange == "fixed":
        rows = sent = s.ways * fixed_window(s.pairs / s.ways)
    else:
        rows, sent = fixed_window(s.pairs), s.pairs
    return (2 * sent * L + rows * (3 * L + 3 * F)) * NARROW


def unsummed_gradients(config: ModelConfig, s: Sizes) -> float:
    """Gradients of one layer's resident experts before they are summed: of the first round and of the further."""
    return 2 * s.experts * config.expert_parameters * NARROW


def layer_experts(config: ModelConfig, s: Sizes) -> float:
    """One layer's resident experts as bfloat16 values: unpacked, or copied out of the stack of all layers'."""
    return s.experts * config.expert_parameters * NARROW


def loss_chunk(config: ModelConfig, s: Sizes) -> float:
    """A chunk's logits, their softmax and derivative, wide."""
    return 3 * min(LOSS_CHUNK, s.flat) * config.vocab_size * WIDE
