"""The matrix products of one forward pass on one device: rows, inner and outer sizes, by kind of layer.

Everything that counts work (FLOPs, bytes moved) derives from this list, which follows `k3jax/nn` module by module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from k3jax.config import LayerKind, ModelConfig
from k3jax.plan.hardware import Hardware
from k3jax.plan.setting import Serve, Strategy, Train, Workload
from k3jax.rules import pieces

KINDS = ("KDA", "MLA", "AttnRes", "experts", "shared", "dense FFN", "router", "latents", "head")

TILE, CHUNK, GROUP = 16, 32, 4  # of `k3jax/ops/kda_chunked.py`
KEY_BLOCK = 512  # of `k3jax/ops/mla.py`
LOSS_CHUNK = 256  # of `k3jax/ops/loss.py`


class Product(NamedTuple):
    """`count` products of [rows,inner] and [inner,outer] in one layer.

    weight: whether the second factor is a weight (else an activation). forward, backward, again: how often it is
    computed
    in a forward pass, in its derivative, and anew where the layer is recomputed. wide: in float32 at highest precision.
    """

    kind: str
    rows: float
    inner: float
    outer: float
    count: float = 1
    weight: bool = True
    backward: float = 2
    again: float = 1
    wide: bool = False

    @property
    def flops(self) -> float:
        """Of one forward pass: 2 rows inner outer."""
        return 2 * self.rows * self.inner * self.outer * self.count


class Sizes(NamedTuple):
    """What a device works on.

    rows: sequences. time: tokens of each inside a mixer. flat: tokens between sublayers. heads, mla_heads, shared,
    dense,
    vocab: of that axis. keys: tokens that attention looks at. experts: resident, of `ways` parts. pairs: rows that all
    its tokens make, k each.
    """

    rows: float
    time: float
    flat: float
    heads: float
    mla_heads: float
    shared: float
    dense: float
    vocab: float
    keys: float
    experts: float
    ways: int
    pairs: float


def sizes(config: ModelConfig, workload: Workload, strategy: Strategy) -> Sizes:
    """On one device, for one of the step's parts with gradient accumulation."""
    mesh = vars(strategy.mesh)
    tensor = pieces("heads", mesh)
    if isinstance(workload, Train):
        rows = workload.batch / workload.grad_accum / pieces("batch", mesh)
        time = workload.sequence / pieces("time", mesh)
        flat = rows * workload.sequence / pieces("seq", mesh)
        keys = float(workload.sequence)
    else:
        rows = float(workload.rows(mesh))
        time = float(workload.new)  # a cached row stays whole
        flat = rows * (workload.new / pieces("seq", mesh) if workload.new > 1 else 1)
        # A prompt's pieces meet, on average, half of the context.
        keys = workload.context if workload.phase == "decode" else (workload.context + workload.new) / 2
        keys = KEY_BLOCK * math.ceil(keys / KEY_BLOCK)
    ways = pieces("experts", mesh)
    return Sizes(
        rows,
        time,
        flat,
        config.kda_num_heads / tensor,
        config.num_attention_heads / tensor,
        config.shared_intermediate_size / tensor,
        config.intermediate_size / tensor,
        config.vocab_size / tensor,
        keys,
        config.num_experts / ways,
        ways,
        flat * config.num_experts_per_token,
    )


# ---- token mixers ------------------------------------------------------------------------------------------


def kda(config: ModelConfig, s: Sizes, context: int = 1) -> Iterator[Product]:
    """One KDA layer: q, k, v, output gate, beta, decay's low rank, output, and the recurrence."""
    D, K, n = config.hidden_size, config.kda_head_dim, s.rows * s.time
    HK = s.heads * K
    yield Product("KDA", n, D, HK, 3)
    yield Product("KDA", n, D, s.heads)
    yield Product("KDA", n, D, K)
    yield Product("KDA", n, K, HK)
    if config.use_full_rank_gate:
        yield Product("KDA", n, D, HK)
    else:
        yield Product("KDA", n, D, K)
        yield Product("KDA", n, K, HK)
    yield Product("KDA", n, HK, D)
    yield from recurrence(config, s.rows * s.heads, s.time, K)
    if context > 1:
        yield from recurrence(config, s.rows * s.heads, s.time, 2 * K)  # the summary: values and identity side by side
        yield Product("KDA", K, K, K, s.rows * s.heads * context, False, wide=True)


def recurrence(config: ModelConfig, rows: float, time: float, V: float) -> Iterator[Product]:
    """KDA of `rows` (row, head) pairs by the chunked form, or of one token by one step (`k3jax/ops/kda*.py`)."""
    K = config.kda_head_dim
    wide = {"weight": False, "wide": True}
    if time == 1:
        yield Product("KDA", 2, K, V, rows, **wide)
        return
    groups = max(1, math.ceil(time / (CHUNK * GROUP)))
    chunks = rows * groups * math.ceil(time / (CHUNK * groups))
    tiles = chunks * CHUNK / TILE
    bounded = config.gate_lower_bound is not None and -config.gate_lower_bound * TILE <= 80
    if bounded:
        # Running sums of decays, computed anew and twice more in the derivative; pairs of keys and of queries with
        # keys.
        yield Product("KDA", TILE, TILE, K, tiles, backward=3, **wide)
        yield Product("KDA", 2 * TILE, TILE, K, tiles, backward=3, **wide)
    else:
        levels = round(math.log2(TILE))
        yield Product("KDA", (levels + 2) * TILE, TILE, K, tiles, backward=2, **wide)
        yield Product("KDA", TILE, TILE, K, 2 * levels * tiles, backward=3, **wide)
    yield Product("KDA", CHUNK, TILE, K, tiles / 2, backward=3, **wide)  # neighbours merged
    yield Product("KDA", TILE, TILE, TILE, (2 * 6 + 2) * chunks, backward=0, **wide)  # inverse
    yield Product("KDA", CHUNK, K, V, 3 * chunks, backward=7 / 3, **wide)  # the state read twice and written
    yield Product("KDA", CHUNK, CHUNK, V, 2 * chunks, backward=5 / 2, **wide)  # updates, and what queries see of them


def mla(config: ModelConfig, s: Sizes) -> Iterator[Product]:
    """One MLA layer: projections, and attention over all keys in blocks, absorbed where that multiplies less."""
    D, L, Lq = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    K, R, V, H = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, s.mla_heads
    n = s.rows * s.time
    if Lq:
        yield Product("MLA", n, D, Lq)
        yield Product("MLA", n, Lq, H * (K + R))
    else:
        yield Product("MLA", n, D, H * (K + R))
    yield Product("MLA", n, D, L + R)
    if config.mla_use_output_gate:
        yield Product("MLA", n, D, H * V)
    yield Product("MLA", n, H * V, D)
    options = {"weight": False}
    if absorbed(config, s.time):
        yield Product("MLA", n, K, L, H, again=1)
        yield Product("MLA", n, L, V, H, again=1)
        # Each block is computed anew in its own derivative, all but what it adds.
        yield Product("MLA", s.time, L + R, s.keys, s.rows * H, backward=3, **options)
        yield Product("MLA", s.time, s.keys, L, s.rows * H, backward=2, **options)
    else:
        yield Product("MLA", s.rows * s.keys, L, H * (K + V), backward=3)
        yield Product("MLA", s.time, K + R, s.keys, s.rows * H, backward=3, **options)
        yield Product("MLA", s.time, s.keys, V, s.rows * H, backward=2, **options)


def absorbed(config: ModelConfig, time: float) -> bool:
    """Whether `mla_attention` moves W_kvb into queries and outputs."""
    L, KV = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
    return time * (2 * L - KV) <= L * KV


# ---- feed-forward ------------------------------------------------------------------------------------------


def dense(config: ModelConfig, s: Sizes) -> Iterator[Product]:
    """The dense layers' feed-forward network."""
    n, D = s.rows * s.time, config.hidden_size
    yield Product("dense FFN", n, D, s.dense, 2)
    yield Product("dense FFN", n, s.dense, D)


def moe(config: ModelConfig, s: Sizes, exchange: str) -> Iterator[Product]:
    """One MoE layer: router, latents, the rows of the resident experts, and the shared experts."""
    D, L, F = config.hidden_size, config.latent_size, config.moe_intermediate_size
    yield Product("router", s.flat, D, config.num_experts)
    if config.routed_expert_hidden_size:
        yield Product("latents", s.flat, D, L)
        yield Product("latents", s.flat, L, D)
    rows = expert_rows(s, exchange)
    yield Product("experts", rows, L, F, 2)
    yield Product("experts", rows, F, L)
    if s.shared:
        n = s.rows * s.time
        yield Product("shared", n, D, s.shared, 2)
        yield Product("shared", n, s.shared, D)


def expert_rows(s: Sizes, exchange: str) -> float:
    """Rows that a device's experts multiply at a balanced load: those that exist, or whole blocks of them.

    Blocks (`k3jax.ops.grouped.blocks`) hold a quarter of a balanced load within limits; an expert's last is half empty
    on average, and never empty of padding below one block.
    """
    if exchange == "ragged":
        return s.pairs
    nk = s.pairs if s.ways == 1 else s.ways * fixed_window(s.pairs / s.ways)
    tokens = nk if s.ways > 1 else s.flat  # rows that arrive have one expert each
    size = min(max(nk // (4 * s.experts), 64), 192, tokens)
    size += -size % 8
    load = s.pairs / s.experts
    return s.experts * size * (math.ceil(load / size) if load <= size else load / size + 0.5)


def used_share(config: ModelConfig, workload: Workload, strategy: Strategy) -> float:
    """Part of its resident experts that a device reads, those that any token chose: 1 - (1 - k/E)^n of n tokens with
    random choices. Empty rows choose none."""
    mesh = strategy.mesh
    if isinstance(workload, Train):
        tokens = workload.tokens / (mesh.data * mesh.fsdp)
    else:
        tokens = min(workload.batch, workload.rows(vars(mesh)) * mesh.expert) * workload.new
    return 1 - (1 - config.num_experts_per_token / config.num_experts) ** tokens


PACKED_ROWS = 512  # of `k3jax/ops/packed.py`


def stays_packed(workload: Serve, strategy: Strategy, hardware: Hardware, s: Sizes) -> bool:
    """Whether packed experts are multiplied as they are, by a kernel for few rows on TPUs; else layers are unpacked."""
    few = s.pairs <= PACKED_ROWS if s.ways == 1 else fixed_window(s.pairs) <= PACKED_ROWS
    return workload.experts == "packed" and hardware.torus > 0 and strategy.mesh.fsdp == 1 and few


def fixed_window(balanced: float) -> int:
    """Rows of the first round: a balanced load and three sigma of its spread (`k3jax.ops.exchange`)."""
    return 8 * math.ceil((balanced + 3 * balanced**0.5) / 8)


def attnres(config: ModelConfig, s: Sizes) -> Iterator[Product]:
    """The two mixtures over depth of a layer: a sum over the sources that is a product a token."""
    if config.attn_res_block_size:
        yield Product("AttnRes", s.flat, config.num_attn_res_blocks + 1, config.hidden_size, 2, False)


def head(config: ModelConfig, workload: Workload, strategy: Strategy, s: Sizes) -> Product:
    """Logits of all tokens in chunks, each computed anew in its derivative; of all tokens too in serving."""
    if isinstance(workload, Serve):
        return Product("head", s.rows * s.time, config.hidden_size, s.vocab)
    chunk = min(LOSS_CHUNK, s.flat)
    padded = chunk * math.ceil(s.flat / chunk) * pieces("vocab", vars(strategy.mesh))
    return Product("head", padded, config.hidden_size, s.vocab, backward=3, again=0)


# ---- all of them -------------------------------------------------------------------------------------------


def layer(config: ModelConfig, kind: LayerKind, s: Sizes, strategy: Strategy) -> list[Product]:
    """Of one layer."""
    mixer = kda(config, s, strategy.mesh.context) if kind.mixer == "kda" else mla(config, s)
    ffn = moe(config, s, strategy.exchange) if kind.ffn == "moe" else dense(config, s)
    return [*mixer, *attnres(config, s), *ffn]


def model(config: ModelConfig, workload: Workload, strategy: Strategy) -> list[tuple[Product, int]]:
    """(product, layers that have it) of one forward pass."""
    s = sizes(config, workload, strategy)
    stack = config.segments
    kinds = {kind: layer(config, kind, s, strategy) for unit, _ in stack for kind in unit}
    found = [(product, repeats) for unit, repeats in stack for kind in unit for product in kinds[kind]]
    if config.attn_res_block_size:
        found.append(
            (Product("AttnRes", s.flat, config.num_attn_res_blocks + 1, config.hidden_size, 1, False, again=0), 1)
        )
    found.append((head(config, workload, strategy, s), 1))
    return found


def times(product: Product, workload: Workload) -> float:
    """How often a step computes a product of the forward pass: once, in its derivative, and anew under remat."""
    if isinstance(workload, Serve):
        return 1
    return (1 + product.backward + (product.again if workload.remat else 0)) * workload.grad_accum


def flops(config: ModelConfig, workload: Workload, strategy: Strategy) -> dict[str, float]:
    """FLOPs of a step's matrix products on a device, by kind of layer."""
    found = dict.fromkeys(KINDS, 0.0)
    for product, layers in model(config, workload, strategy):
        found[product.kind] += product.flops * layers * times(product, workload)
    return {kind: n for kind, n in found.items() if n}
