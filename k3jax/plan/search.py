"""All strategies for a number of devices: the ones that fit, ranked, and the front of step time against memory."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
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


def divisors(n: int) -> list[int]:
    """Of n, ascending."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def factorisations(devices: int, axes: int, sizes: Sequence[Sequence[int]] | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to write `devices` as an ordered product of `axes` numbers, each of them one of its axis' `sizes`.

    Example:
        >>> list(factorisations(4, 2))
        [(1, 4), (2, 2), (4, 1)]
    """
    first, *rest = sizes or [divisors(devices)] * axes
    if axes == 1:
        if devices in first:
            yield (devices,)
        return
    for size in first:
        if devices % size == 0:
            for others in factorisations(devices // size, axes - 1, rest):
                yield (size, *others)


def _count(devices: int, axes: int) -> int:
    """How many factorisations there are, by stars and bars for every prime's power."""
    found, prime = 1, 2
    while devices > 1:
        if prime * prime > devices:
            prime = devices
        power = 0
        while devices % prime == 0:
            devices, power = devices // prime, power + 1
        found *= math.comb(power + axes - 1, axes - 1)
        prime += 1
    return found


def _fits(config: ModelConfig, workload: Workload, mesh: MeshConfig) -> bool:
    try:
        check(config, workload, Strategy(mesh))
    except ValueError:
        return False
    return True


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
    variants = choices(workload)
    # A size that does not fit beside axes of 1 fits in no mesh: what an axis splits it splits whatever the others are.
    alone = lambda axis, size: any(_fits(config, same, MeshConfig(**{axis: size})) for same, _ in variants)  # noqa: E731
    sizes = [[size for size in divisors(devices) if alone(axis, size)] for axis in MESH_AXES]
    fits, tight = [], []
    for mesh in itertools.starmap(MeshConfig, factorisations(devices, len(MESH_AXES), sizes)):
        strategy = Strategy(mesh)
        for option in (option for same, choice in variants if _fits(config, same, mesh) for option in choice):
            memory = analytic.memory_bytes(config, option, strategy, hardware)
            (fits if memory <= analytic.capacity(hardware) else tight).append((memory, option, strategy))
    tried = len(fits) + len(tight)
    refused = _count(devices, len(MESH_AXES)) * sum(len(choice) for _, choice in variants) - tried
    evaluate = lambda found: analytic.evaluate(config, *found[1:], hardware, price)  # noqa: E731
    ranked = sorted(map(evaluate, fits), key=lambda p: (p.step_seconds, p.serial_seconds, p.memory))
    least = sorted(tight, key=lambda found: found[0])[:TIGHT]
    return Found(ranked, list(map(evaluate, least)), tried, refused)


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
