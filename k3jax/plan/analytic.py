"""The analytic model: what a strategy needs and how long a step takes, from shapes alone.

Times are rooflines, the least that the hardware's peaks allow: matrix products at the full rate, memory read at the
full bandwidth, links used as `k3jax.plan.communication.seconds` says. A measured step is longer.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from k3jax.config import ModelConfig
from k3jax.plan import arrays, communication, memory, products
from k3jax.plan.hardware import Hardware
from k3jax.plan.setting import Strategy, Train, Workload, check
from k3jax.rules import pieces

PACKED = 17 / 64  # bytes of MXFP4 with its scales over those of bfloat16
RESERVED = 0.02  # of a device's memory that programs and fragmentation take


@dataclass(frozen=True)
class Prediction:
    """What one strategy does with one workload. Per device; bytes, FLOPs, seconds.

    Attributes:
        devices: in the mesh.
        arguments: what the step is given, by purpose; outputs that are not arguments are a few numbers.
        temporaries: what it holds beside them at the worst moment, by purpose.
        memory, capacity: bytes needed and there.
        flops: of a step's matrix products, by kind of layer. bytes: moved to and from memory, alike.
        communication: bytes a device sends, {collective: {mesh axes: bytes}}; by_purpose: the same as
            {purpose: bytes}.
        compute_seconds, memory_seconds, communication_seconds: the three rooflines; bound: which makes the step long.
        step_seconds: layer kind by layer kind the longer of compute and memory, or communication if that is longer
        still.
        serial_seconds: the same with nothing sent while something is computed.
        tokens_per_second: over all devices. mfu: model FLOPs over what the devices could do in step_seconds.
        cost: of a step, and per million tokens, at the price given; None without one.
    """

    model: str
    workload: Workload
    strategy: Strategy
    hardware: str
    devices: int
    arguments: dict[str, float]
    temporaries: dict[str, float]
    memory: float
    capacity: float
    flops: dict[str, float]
    bytes: dict[str, float]
    communication: dict[str, dict[str, float]]
    by_purpose: dict[str, float]
    compute_seconds: float
    memory_seconds: float
    communication_seconds: float
    bound: str
    step_seconds: float
    serial_seconds: float
    tokens_per_second: float
    mfu: float
    cost_per_step: float | None = None
    cost_per_million_tokens: float | None = None

    @property
    def fits(self) -> bool:
        """Whether a device holds it."""
        return self.memory <= self.capacity

    @property
    def row(self) -> str:
        """The strategy in words."""
        return str(self.strategy)

    def to_json(self) -> dict:
        """Plain values, fit for `json.dump`."""
        return dataclasses.asdict(self) | {"fits": self.fits, "mesh": str(self.strategy)}


def predict(
    config: ModelConfig, workload: Workload, strategy: Strategy, hardware: Hardware, price: float | None = None
) -> Prediction:
    """What `strategy` needs and how long it takes; `price`: of a device for an hour.

    Raises:
        ValueError: sizes that do not fit together, each named.

    Example:
        >>> mesh = MeshConfig(fsdp=64, expert=16)
        >>> predict(cfg, Train(), Strategy(mesh), HARDWARE["v5p"]).bound
        'compute'
    """
    check(config, workload, strategy)
    return evaluate(config, workload, strategy, hardware, price)


def evaluate(
    config: ModelConfig, workload: Workload, strategy: Strategy, hardware: Hardware, price: float | None = None
) -> Prediction:
    """`predict` for sizes that are known to fit together."""
    mesh = vars(strategy.mesh)
    found = products.model(config, workload, strategy)
    given, held = arguments(config, workload, strategy), memory.temporaries(config, workload, strategy, hardware)
    flops, moved = products.flops(config, workload, strategy), bytes_moved(config, workload, strategy, hardware)
    compute = compute_seconds(found, workload, hardware)
    read = {kind: n / hardware.bandwidth for kind, n in moved.items()}
    transfers = communication.transfers(config, workload, strategy)
    sending = sum(communication.seconds(transfer, mesh, hardware) for transfer in transfers)
    local = sum(max(compute.get(kind, 0.0), read.get(kind, 0.0)) for kind in {*compute, *read})
    rooflines = {"compute": sum(compute.values()), "memory": sum(read.values())}
    step = max(local, sending)
    purposes: Counter[str] = Counter()
    for transfer in transfers:
        purposes[transfer.what] += transfer.sent
    devices = strategy.mesh.size
    cost = None if price is None else price * devices * step / 3600
    return Prediction(
        model=config.model_type,
        workload=workload,
        strategy=strategy,
        hardware=hardware.name,
        devices=devices,
        arguments=given,
        temporaries=held,
        memory=sum(given.values()) + sum(held.values()),
        capacity=capacity(hardware),
        flops=flops,
        bytes=moved,
        communication=communication.by_axes(transfers),
        by_purpose=dict(purposes),
        compute_seconds=rooflines["compute"],
        memory_seconds=rooflines["memory"],
        communication_seconds=sending,
        bound="communication" if sending > local else max(rooflines, key=rooflines.get),
        step_seconds=step,
        serial_seconds=local + sending,
        tokens_per_second=workload.tokens / step,
        mfu=model_flops(config, workload) / (step * devices * hardware.bf16),
        cost_per_step=cost,
        cost_per_million_tokens=None if cost is None else cost * 1e6 / workload.tokens,
    )


def capacity(hardware: Hardware) -> float:
    """Bytes of a device's memory that a step may take."""
    return hardware.memory * (1 - RESERVED)


def memory_bytes(config: ModelConfig, workload: Workload, strategy: Strategy, hardware: Hardware) -> float:
    """`Prediction.memory` alone."""
    held = memory.temporaries(config, workload, strategy, hardware)
    return sum(arguments(config, workload, strategy).values()) + sum(held.values())


def arguments(config: ModelConfig, workload: Workload, strategy: Strategy) -> dict[str, float]:
    """Bytes of what the step is given, by purpose."""
    mesh = vars(strategy.mesh)
    weights = arrays.weight_bytes(config, workload, mesh)
    found = {"routed experts": weights["experts"], "dense weights": weights["dense"]}
    if isinstance(workload, Train):
        found["optimizer state"] = arrays.optimizer_bytes(config, workload, mesh)
    else:
        found |= arrays.cache_bytes(config, workload, mesh)
    return found | {"batch": arrays.batch_bytes(workload, mesh)}


def compute_seconds(found, workload: Workload, hardware: Hardware) -> dict[str, float]:
    """FLOPs over the bf16 rate; products of highest precision take several passes. By kind of layer."""
    total: Counter[str] = Counter()
    for product, layers in found:
        flops = product.flops * layers * products.times(product, workload)
        total[product.kind] += flops * (hardware.float32_passes if product.wide else 1) / hardware.bf16
    return dict(total)


def bytes_moved(config: ModelConfig, workload: Workload, strategy: Strategy, hardware: Hardware) -> dict[str, float]:
    """Bytes to and from memory by kind of layer, of a step.

    Every product reads its two factors and writes its result once a pass, of the experts those that were chosen. KDA
    reads and writes its state, attention its latents, the mixture over depth its sources; training also reads and
    writes every parameter, gradient and moment once in the optimizer.
    """
    mesh, s = vars(strategy.mesh), products.sizes(config, workload, strategy)
    training = isinstance(workload, Train)
    total: Counter[str] = Counter()
    for product, layers in products.model(config, workload, strategy):
        times = products.times(product, workload)
        wide = communication.WIDE if product.wide else communication.NARROW
        weight = product.inner * product.outer * product.count
        if product.kind == "experts":
            weight *= s.experts * expert_reads(config, workload, strategy, hardware, s)
        moved = product.count * product.rows * (product.inner + product.outer)
        if product.kind == "MLA" and not product.weight:
            weight, moved = 0, product.count * product.rows * min(product.inner, product.outer)
        total[product.kind] += (weight + moved) * wide * layers * times
    passes = (3 + workload.remat) * workload.grad_accum if training else 1
    total["AttnRes"] = attnres_bytes(config, workload, s)
    if training:
        total["MLA"] += passes * arrays.mla_cache_bytes(config, s.rows, s.keys)
        given = arrays.weight_bytes(config, workload, mesh)
        total["optimizer"] = 7 * sum(given.values())  # parameter, gradient, two moments read; three written
    else:
        heads = config.kda_num_heads / pieces("heads", mesh)
        total["KDA"] += arrays.kda_state_bytes(config, s.rows, heads)  # written; the products read it
        total["MLA"] += arrays.mla_cache_bytes(config, s.rows, s.keys)
    return dict(total)


def expert_reads(
    config: ModelConfig, workload: Workload, strategy: Strategy, hardware: Hardware, s: products.Sizes
) -> float:
    """Bytes moved of the resident experts, over their bytes as bfloat16: 4.25 bits of those that a token chose where
    they stay packed; where they do not, all are read packed and written unpacked first."""
    used = products.used_share(config, workload, strategy)
    if isinstance(workload, Train) or workload.experts != "packed":
        return used
    return PACKED * used if products.stays_packed(workload, strategy, hardware, s) else PACKED + 1 + used


def attnres_bytes(config: ModelConfig, workload: Workload, s: products.Sizes) -> float:
    """Mixtures over depth: each passes over its sources twice, their derivative four times (two of them of gradients).

    A read in layer i of blocks of S sees i // S + 1 finished blocks and the running sum; plain residuals are one slot.
    """
    S, n = config.attn_res_block_size, config.num_hidden_layers
    slots = sum(2 * (i // S + 2) for i in range(n)) if S else 2 * n
    passes = (2 * (1 + workload.remat) + 4) * workload.grad_accum if isinstance(workload, Train) else 2
    return slots * passes * s.flat * config.hidden_size * communication.NARROW


def model_flops(config: ModelConfig, workload: Workload) -> float:
    """What the model needs at least over all devices: 2 FLOPs an active parameter and token, 6 in training."""
    return (6 if isinstance(workload, Train) else 2) * config.num_active_parameters * workload.tokens


def shortfall(prediction: Prediction) -> str:
    """In words: by how much it does not fit, and what takes the room."""
    largest = sorted((prediction.arguments | prediction.temporaries).items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {n / 1e9:.1f} GB" for name, n in largest)
    over = (prediction.memory - prediction.capacity) / 1e9
    return (
        f"{prediction.row}: needs {prediction.memory / 1e9:.1f} GB a device, {over:.1f} GB more than "
        f"{prediction.hardware}'s {prediction.capacity / 1e9:.1f} GB; largest: {parts}"
    )
