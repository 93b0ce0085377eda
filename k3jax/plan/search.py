"""All strategies for a number of devices: the ones that fit, ranked, and the front of step time against memory."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3jax.config import ModelConfig
from k3jax.plan import analytic
from k3jax.plan.analytic import Prediction
from k3jax.plan.hardware import Hardware
from k3jax.plan.setting import Serve, Strategy, Workload, check
from k3jax.rules import MESH_AXES
from k3jax.run_config import MeshConfig

ACCUMULATIONS = (1, 2, 4)
TIGHT = 5  # of what does not fit, so many are told


@dataclass(frozen=True)
class Found:
    """A search's result.

    Attributes:
        ranked: what fits, fastest first. tight: what does not, the least memory first.
        tried: how many were predicted. refused: how many whose sizes do not divide.
    """

    ranked: list[Prediction]
    tight: list[Prediction]
    tried: int
    refused: int

    @property
    def front(self) -> list[Prediction]:
        """Of those that fit: none is both faster and smaller than one of these; fastest first."""
        kept, least = [], float("inf")
        for prediction in self.ranked:
            if prediction.memory < least:
                kept.append(prediction)
                least = prediction.memory
        return kept

    @property
    def best(self) -> Prediction:
        """The fastest.

        Raises:
            ValueError: none fits; says by how much the smallest does not.
        """
        if self.ranked:
            return self.ranked[0]
        if self.tight:
            raise ValueError(f"nothing fits; the smallest is {analytic.shortfall(self.tight[0])}")
        raise ValueError("no mesh divides the model and the workload; another number of devices or another batch may")


def factorisations(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `devices` as an ordered product of `axes` numbers.

    Example:
        >>> list(factorisations(4, 2))
        [(1, 4), (2, 2), (4, 1)]
    """
    if axes == 1:
        yield (devices,)
        return
    for first in range(1, devices + 1):
        if devices % first == 0:
            for rest in factorisations(devices // first, axes - 1):
                yield (first, *rest)


def search(
    config: ModelConfig, workload: Workload, hardware: Hardware, devices: int, price: float | None = None
) -> Found:
    """Predicts every mesh of `devices`, and in training each with and without remat and with the batch in parts.

    Example:
        >>> search(cfg, Train(), HARDWARE["v5p"], 1024).best.row
        'fsdp=64 expert=16'
    """
    if devices < 1:
        raise ValueError(f"devices={devices}: must be at least 1")
    fits, tight, refused = [], [], 0
    for sizes in factorisations(devices, len(MESH_AXES)):
        strategy = Strategy(MeshConfig(*sizes))
        for same, choice in choices(workload):
            try:
                check(config, same, strategy)
            except ValueError:
                refused += len(choice)
                continue
            for option in choice:
                memory = analytic.memory_bytes(config, option, strategy, hardware)
                (fits if memory <= analytic.capacity(hardware) else tight).append((memory, option, strategy))
    evaluate = lambda found: analytic.evaluate(config, *found[1:], hardware, price)  # noqa: E731
    ranked = sorted(map(evaluate, fits), key=lambda p: (p.step_seconds, p.serial_seconds, p.memory))
    least = sorted(tight, key=lambda found: found[0])[:TIGHT]
    return Found(ranked, list(map(evaluate, least)), len(fits) + len(tight), refused)


def choices(workload: Workload) -> list[tuple[Workload, list[Workload]]]:
    """(one, all) of every set of variants that divide alike: the workload itself in serving; in training the batch in
    one, two or four parts, each with and without remat."""
    if isinstance(workload, Serve):
        return [(workload, [workload])]
    parts = [dataclasses.replace(workload, grad_accum=n) for n in sorted({*ACCUMULATIONS, workload.grad_accum})]
    return [(x, [dataclasses.replace(x, remat=remat) for remat in (True, False)]) for x in parts]


def smallest(
    config: ModelConfig, workload: Workload, hardware: Hardware, counts: Sequence[int], price: float | None = None
) -> Prediction:
    """The fastest strategy on the first of `counts` devices on which any fits.

    Raises:
        ValueError: none does.
    """
    for devices in counts:
        found = search(config, workload, hardware, devices, price)
        if found.ranked:
            return found.best
    raise ValueError(f"devices: nothing fits on any of {', '.join(map(str, counts))} {hardware.name}")


def write_csv(path: str | Path, predictions: Sequence[Prediction]) -> None:
    """One line a strategy: mesh, memory, times, rates."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*MESH_AXES, "exchange", "remat", "grad_accum", *COLUMNS])
        for p in predictions:
            chosen = (getattr(p.workload, "remat", ""), getattr(p.workload, "grad_accum", ""))
            sizes = vars(p.strategy.mesh).values()
            writer.writerow([*sizes, p.strategy.exchange, *chosen, *(getattr(p, name) for name in COLUMNS)])


COLUMNS = (
    "hardware",
    "devices",
    "fits",
    "memory",
    "capacity",
    "compute_seconds",
    "memory_seconds",
    "communication_seconds",
    "bound",
    "step_seconds",
    "serial_seconds",
    "tokens_per_second",
    "mfu",
    "cost_per_million_tokens",
)
