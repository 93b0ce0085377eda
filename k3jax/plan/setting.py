"""What is planned: a workload, and a strategy to run it by. Sizes, dtypes and refusals; no formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from k3jax.config import ModelConfig
from k3jax.rules import pieces
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig


@dataclass(frozen=True)
class Train:
    """One training step: parameters and moments in float32, products in bfloat16."""

    batch: int = 1024
    """Sequences a step, over all devices."""
    sequence: int = 4096
    """Tokens of one."""
    qat: bool = True
    """MXFP4 expert weights and MXFP8 expert inputs in the forward pass."""
    remat: bool = True
    """Recompute each unit of layers in the backward pass."""
    grad_accum: int = 1
    """Parts the batch is computed in."""
    optimizer: Literal["adamw"] = "adamw"
    """The product's."""

    @property
    def tokens(self) -> int:
        """That a step learns from."""
        return self.batch * self.sequence


@dataclass(frozen=True)
class Serve:
    """One serving step: a token of every row (decode), or a piece of every prompt (prefill), in bfloat16."""

    phase: Literal["prefill", "decode"] = "decode"
    """Which of the two."""
    batch: int = 1
    """Rows, over all devices."""
    context: int = 131072
    """Tokens a row's cache has room for; in decoding it is full."""
    piece: int = 8192
    """Tokens of every row that one prefill step takes."""
    experts: Literal["packed", "dequantized"] = "packed"
    """Routed experts in memory: MXFP4, or bfloat16."""

    @property
    def new(self) -> int:
        """Tokens a row that a step takes."""
        return 1 if self.phase == "decode" else min(self.piece, self.context)

    @property
    def tokens(self) -> int:
        """That a step yields or reads."""
        return self.batch * self.new

    def rows(self, mesh: Mapping[str, int]) -> int:
        """On a device: where the mesh does not split them evenly, the model fills up with empty ones."""
        return -(-self.batch // pieces("batch", mesh))


Workload = Train | Serve


@dataclass(frozen=True)
class Strategy:
    """Devices along each mesh axis, and the exchange of the experts' rows: see `k3jax.ops.experts.apply_experts`."""

    mesh: MeshConfig
    exchange: Literal["fixed", "ragged"] = "ragged"

    def __str__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in vars(self.mesh).items() if size > 1]
        return " ".join(sizes) or "one device"


def check(config: ModelConfig, workload: Workload, strategy: Strategy) -> None:
    """Refuses sizes that do not fit together.

    Raises:
        ValueError: one line, naming the key, what was found and what would be right.
    """
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if not isinstance(value, (bool, str)) and value < 1:
            raise ValueError(f"{field.name}={value}: must be at least 1")
    mesh = strategy.mesh
    if isinstance(workload, Train):
        data = DataConfig(seq_len=workload.sequence, batch_size=workload.batch)
        options = {"qat": workload.qat, "remat": workload.remat, "grad_accum": workload.grad_accum}
        train = TrainConfig(**options, quantile_balancing=False)  # which a plan says nothing of
        RunConfig(model=config, data=data, train=train, mesh=mesh).validate()
        return
    # A prompt of one token a device stands in for any: the rest must fit as in training.
    data = DataConfig(seq_len=max(4 * mesh.context, 1) * mesh.tensor, batch_size=pieces("batch", vars(mesh)))
    train = TrainConfig(qat=workload.experts == "packed", quantile_balancing=False)
    RunConfig(model=config, data=data, train=train, mesh=mesh).validate()
    seq = pieces("seq", vars(mesh))
    if workload.new > 1 and workload.new % seq:
        raise ValueError(f"piece={workload.new}: must be a multiple of mesh.context*mesh.tensor={seq}")


def mesh_for(mesh: MeshConfig, devices: int) -> MeshConfig:
    """The mesh on so many devices, an axis of -1 taking what the others leave.

    Raises:
        ValueError: its sizes do not make up the devices.
    """
    found = mesh.on(devices)
    if found.size != devices:
        axes = "*".join(f"mesh.{axis}" for axis in vars(found))
        raise ValueError(f"devices={devices}: must be {axes}={found.size}")
    return found
