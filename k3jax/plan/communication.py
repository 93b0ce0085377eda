"""What a step sends: bytes a device by collective and mesh axes, from shapes and the table of logical axes.

A device sends of n bytes of operands, among R devices: all-gather n (R - 1), reduce-scatter n (R - 1) / R, all-reduce
2 n (R - 1) / R, all-to-all n (R - 1) / R (as `k3jax.plan.hlo.SENT`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from k3jax.config import ModelConfig
from k3jax.plan import arrays
from k3jax.plan.arrays import variables
from k3jax.plan.hardware import Hardware
from k3jax.plan.products import Sizes, fixed_window, sizes
from k3jax.plan.setting import Strategy, Train, Workload
from k3jax.rules import MESH_AXES, RULES

NARROW, WIDE = 2, 4  # bytes of bfloat16 and float32


class Transfer(NamedTuple):
    """`sent` bytes a device sends in a step by one kind of collective among the devices that differ along `axes`."""

    what: str
    kind: str
    axes: tuple[str, ...]
    sent: float


def transfers(config: ModelConfig, workload: Workload, strategy: Strategy) -> list[Transfer]:
    """Everything a step sends, by purpose."""
    if config.tie_word_embeddings:  # both uses of a shared matrix send what they would of two
        config = dataclasses.replace(config, tie_word_embeddings=False)
    mesh = vars(strategy.mesh)
    s = sizes(config, workload, strategy)
    training = isinstance(workload, Train)
    parts = workload.grad_accum if training else 1
    # A pass gathers what it needs; one that recomputes shares its gathers with the derivative.
    passes = 2 * parts if training else 1
    found = [*weight_gathers(config, workload, mesh, passes), *exchanges(config, workload, strategy, s)]
    found += [*sequence_transfers(config, workload, mesh, s), *context_transfers(config, workload, mesh, s)]
    found += embedding_transfers(config, workload, mesh, s)
    if training:
        found += gradient_sums(config, workload, mesh, parts)
    return [transfer for transfer in found if transfer.sent > 0]


def _axes(mesh: Mapping[str, int], *names: str) -> tuple[str, ...]:
    """Mesh axes of more than one device behind logical or mesh axes, in the mesh's order."""
    wanted = {axis for name in names for axis in RULES.get(name, (name,))}
    return tuple(axis for axis in MESH_AXES if axis in wanted and mesh[axis] > 1)


def _ways(mesh: Mapping[str, int], axes: Iterable[str]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _gathered(group) -> float:
    """Share of a group that is gathered where it is used: of what the vocabulary splits, the head and not the embedding."""
    return 0.5 if "vocab" in group.axes else 1.0


def weight_gathers(config: ModelConfig, workload: Workload, mesh: Mapping[str, int], passes: int) -> list[Transfer]:
    """Weights split over fsdp are gathered in the compute dtype where they are used: shard (R - 1) a pass.

    Packed experts are gathered as values: they are unpacked where they lie. The embedding stays where it is; the
    head is kept from the loss to its derivative, as the experts are without remat.
    """
    R, found = mesh["fsdp"], defaultdict(float)
    if R == 1:
        return []
    for group in variables(config, workload):
        if group.axes & {"embed", "expert_out"}:
            what = "experts" if group.routed else "dense weights"
            once = isinstance(workload, Train) and ("vocab" in group.axes or group.routed and not workload.remat)
            found[what] += group.values(mesh) * _gathered(group) * NARROW * (R - 1) * (passes / 2 if once else passes)
    return [Transfer(f"{what} gathered", "all-gather", ("fsdp",), sent) for what, sent in found.items()]


def gradient_sums(config: ModelConfig, workload: Train, mesh: Mapping[str, int], parts: int) -> list[Transfer]:
    """Gradients are summed in the compute dtype over all axes that split tokens and not the weight.

    Over fsdp where that splits the weight: a reduce-scatter of what was gathered; over the rest an all-reduce of the
    shard.
    """
    token_axes = _axes(mesh, "batch", "seq")
    found: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
    for group in variables(config, workload):
        if not group.learnt:
            continue
        split = {axis for name in group.axes for axis in RULES[name]}
        n = group.on(mesh) * NARROW * parts
        what = "experts' gradients" if group.routed else "dense gradients"
        if "fsdp" in split and mesh["fsdp"] > 1:
            found[what, "reduce-scatter", ("fsdp",)] += n * _gathered(group) * (mesh["fsdp"] - 1)
        rest = tuple(axis for axis in token_axes if axis not in split)
        if rest:
            R = _ways(mesh, rest)
            found[what, "all-reduce", rest] += 2 * n * (R - 1) / R
    return [Transfer(*key, sent) for key, sent in found.items()]


def exchanges(config: ModelConfig, workload: Workload, strategy: Strategy, s: Sizes) -> list[Transfer]:
    """Latents of every (token, expert) pair to where the expert lives, and back; as much again in the derivative.

    Ragged: the n k rows that exist. Fixed: windows of a balanced load and three sigma, and each row's expert as int32;
    then nothing tells whether a row is there. Recomputed layers exchange anew.
    """
    mesh = vars(strategy.mesh)
    axes = _axes(mesh, "experts")
    R, layers = _ways(mesh, axes), sum(kind.ffn == "moe" for kind in config.layers)
    if R == 1 or not layers:
        return []
    fixed = strategy.exchange == "fixed"
    kind = "all-to-all" if fixed else "ragged-all-to-all"
    rows = R * fixed_window(s.pairs / R) if fixed else s.pairs
    away = (R - 1) / R
    forward = 2 * rows * config.latent_size * NARROW * away
    ids = rows * 4 * away if fixed else 0
    if not isinstance(workload, Train):
        return [Transfer("tokens to experts and back", kind, axes, layers * (forward + ids))]
    forwards = 2 if workload.remat else 1
    sent = forwards * (forward + ids) + forward
    return [Transfer("tokens to experts and back", kind, axes, layers * sent * workload.grad_accum)]


def sequence_transfers(config: ModelConfig, workload: Workload, mesh: Mapping[str, int], s: Sizes) -> list[Transfer]:
    """Over the tensor axis each sublayer gathers its input and leaves its output in parts; routed experts alone do not.

    With sequences split, an all-gather before and a reduce-scatter behind (the other way round in the derivative);
    with single tokens an all-reduce of the output. The embedding and each chunk of logits likewise, whose input is
    gathered anew in its derivative.
    """
    R, D = mesh["tensor"], config.hidden_size
    if R == 1:
        return []
    n = s.rows * s.time * D * NARROW  # of a gathered activation
    training = isinstance(workload, Train)
    parts, again = (workload.grad_accum, workload.remat) if training else (1, 0)
    whole = sum(kind.ffn == "dense" or config.num_shared_experts > 0 for kind in config.layers)
    sublayers = config.num_hidden_layers + whole
    if not training and workload.new == 1:
        vocabulary = 2 * n * (R - 1) / R
        return [
            Transfer("activations summed", "all-reduce", ("tensor",), (sublayers * 2 * n * (R - 1) / R) + vocabulary)
        ]
    moved = n * (R - 1) / R * parts
    gathers = sublayers * ((2 + again) if training else 1) + (3 if training else 1)
    scatters = sublayers * ((2 + again) if training else 1) + (2 if training else 1)
    return [
        Transfer("activations gathered", "all-gather", ("tensor",), gathers * moved),
        Transfer("activations summed", "reduce-scatter", ("tensor",), scatters * moved),
    ]


def embedding_transfers(config: ModelConfig, workload: Workload, mesh: Mapping[str, int], s: Sizes) -> list[Transfer]:
    """Over fsdp, which splits its columns: tokens to all that have some, and vectors back; gradients the other way."""
    R, training = mesh["fsdp"], isinstance(workload, Train)
    times = workload.grad_accum if training else 1
    tokens = s.rows * s.time * times
    vectors = tokens * config.hidden_size * NARROW * (R - 1) / R * (2 if training else 1)
    return [
        Transfer("tokens to the embedding", "all-gather", ("fsdp",), tokens * 4 * (R - 1)),
        Transfer("embedded tokens", "all-to-all", ("fsdp",), vectors),
    ]


def context_transfers(config: ModelConfig, workload: Workload, mesh: Mapping[str, int], s: Sizes) -> list[Transfer]:
    """Over the context axis: a KDA layer's summaries (M, S~) in float32 and the convolutions' last inputs, an MLA
    layer's latents, which are gathered over the tensor axis too."""
    R = mesh["context"]
    training = isinstance(workload, Train)
    if not training:
        return []
    forwards = (2 if workload.remat else 1) * workload.grad_accum
    kda, mla = len(config.kda_layers), len(config.full_attn_layers)
    found = []
    if R > 1:
        K, taps = config.kda_head_dim, config.short_conv_kernel_size - 1
        summary = s.rows * s.heads * 2 * K * K * WIDE
        found.append(Transfer("KDA summaries", "all-gather", ("context",), kda * summary * (R - 1) * forwards))
        back = kda * summary * (R - 1) * workload.grad_accum
        found.append(Transfer("KDA summaries' gradients", "reduce-scatter", ("context",), back))
        halo = 3 * s.rows * taps * s.heads * K * NARROW
        sent = kda * halo * (forwards + workload.grad_accum)
        found.append(Transfer("convolutions' last inputs", "collective-permute", ("context",), sent))
    axes = _axes(mesh, "context", "tensor")
    ways = _ways(mesh, axes)
    if ways > 1:
        latents = (
            s.rows * workload.sequence * (config.kv_lora_rank + config.qk_rope_head_dim) * NARROW * (ways - 1) / ways
        )
        found.append(Transfer("MLA latents", "all-gather", axes, mla * latents * forwards))
        found.append(Transfer("MLA latents' gradients", "all-reduce", axes, 2 * mla * latents * workload.grad_accum))
    return found


def by_axes(found: Iterable[Transfer]) -> dict[str, dict[str, float]]:
    """{collective: {axes joined by *: bytes}}."""
    total: dict[str, dict[str, float]] = {}
    for transfer in found:
        kind, axes = total.setdefault(transfer.kind, {}), "*".join(transfer.axes)
        kind[axes] = kind.get(axes, 0.0) + transfer.sent
    return total


# ---- time --------------------------------------------------------------------------------------------------


def seconds(transfer: Transfer, mesh: Mapping[str, int], hardware: Hardware) -> float:
    """Of a transfer when nothing else is on the links.

    Devices are numbered with the tensor axis fastest, so a group along `axes` steps over the axes behind them. On a
    torus
    a group of R of N devices takes its share of the dimensions, at least one: it sends both ways on each; an exchange
    of all with all is bound by the middle of its longest ring, side / 4 hops on average. Behind a switch a group of one
    domain has all links; a larger one is bound by the network: what leaves a domain goes through its devices' shares.
    """
    devices, R = math.prod(mesh.values()), _ways(mesh, transfer.axes)
    inner = MESH_AXES[::-1].index(transfer.axes[-1])
    stride = math.prod(mesh[axis] for axis in MESH_AXES[::-1][:inner])
    span = min(stride * R, devices)
    exchange = transfer.kind.endswith("all-to-all")
    if span <= hardware.domain:
        if not hardware.torus:
            return transfer.sent / hardware.link
        dimensions = max(1, min(hardware.torus, round(hardware.torus * math.log(R) / math.log(max(devices, 2)))))
        hops = max(1.0, R ** (1 / dimensions) / 4) if exchange else 1.0
        links = 2 * hardware.link * (1 if exchange else dimensions)
        return transfer.sent * hops / links
    together = max(1, hardware.domain // stride)  # members of a group in one domain
    outside = (R - together) / (R - 1)
    inside = transfer.sent * (1 - outside) / hardware.links
    share = hardware.network * (1 if exchange else together)
    return max(inside, transfer.sent * outside / share)


def gathered_layer(config: ModelConfig, workload: Workload, mesh: Mapping[str, int]) -> float:
    """Bytes of the largest layer's weights as values, gathered over fsdp: what a pass holds of them at once."""
    experts = "dequantized" if isinstance(workload, Train) else workload.experts
    over = lambda group: mesh["fsdp"] if group.axes & {"embed", "expert_out"} else 1  # noqa: E731
    return max(sum(x.values(mesh) * over(x) for x in layer) for layer in arrays.layers(config, experts)) * NARROW
