"""Questions about a model, answered: what the command line prints, and what the report draws."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3jax.config import ModelConfig
from k3jax.plan import analytic
from k3jax.plan.analytic import Prediction
from k3jax.plan.hardware import HARDWARE, Hardware
from k3jax.plan.search import Found, search
from k3jax.plan.setting import Serve, Strategy, Workload, mesh_for
from k3jax.run_config import MeshConfig

ASSUMPTIONS = (
    "Times are rooflines: peak rates of matrix products, memory and links. A measured step is longer.",
    "A step takes, for each kind of layer, the longer of its compute and memory time; or its communication, if that is "
    "longer than all of them: everything that is sent overlaps with what is computed.",
    "Products that ask for highest precision in float32 (the KDA recurrence) take six bfloat16 products.",
    "Experts' loads are balanced, which the router's balancing aims at; experts that no token chose are not read. "
    "Packed experts are multiplied packed on TPUs where rows are few, and unpacked a layer at a time elsewhere.",
    "Memory is arguments and temporaries of the worst moment; 2 % of a device's memory is left to fragments.",
    "A chip of TPU 7x is two devices. The mesh's last axes lie nearest to each other.",
    "On a torus a group takes its share of the dimensions; an exchange of all with all is bound by the middle of its "
    "longest ring. Between domains of GPUs each device has its network adapter to itself.",
    "Utilisation is 6 FLOPs (training) or 2 (serving) an active parameter and token, over the bfloat16 peak.",
)


@dataclass(frozen=True)
class Answer:
    """A question in words, its answer in words, and what was predicted.

    Attributes:
        chosen: the strategies the answer is about, first the one it is about most.
        found: the search behind it, if there was one.
        compared: a compiler's own figures beside the first of `chosen`, as rows of a table.
    """

    question: str
    text: str
    chosen: list[Prediction]
    found: Found | None = None
    compared: list[dict] = field(default_factory=list)

    def to_json(self) -> dict:
        """Plain values, fit for `json.dump`."""
        ranked = [] if self.found is None else [p.to_json() for p in self.found.ranked]
        return {
            "question": self.question,
            "answer": self.text,
            "chosen": [p.to_json() for p in self.chosen],
            "ranked": ranked,
            "compared": self.compared,
        }


def question(config: ModelConfig, workload: Workload, hardware: Hardware, devices: int) -> str:
    """In words."""
    place = f"{devices:,} {hardware.name} device{'s' * (devices > 1)}"
    name = f"{config.model_type} ({config.num_parameters / 1e9:,.0f} B parameters)"
    if isinstance(workload, Serve):
        what = "decode a token of" if workload.phase == "decode" else f"read {workload.new:,} prompt tokens of each of"
        rows = f"{workload.batch:,} sequence{'s' * (workload.batch > 1)} of up to {workload.context:,} tokens"
        return f"What does it take to {what} {rows} with {name}, experts {workload.experts}, on {place}?"
    kind = "quantisation-aware training" if workload.qat else "training"
    return f"What does a step of {kind} of {name} on {workload.batch:,} x {workload.sequence:,} tokens take on {place}?"


def sentence(p: Prediction) -> str:
    """What was found of one strategy, in words."""
    per_million = "" if p.cost_per_million_tokens is None else f", {p.cost_per_million_tokens:,.2f} per million tokens"
    room = f"{p.memory / 1e9:.1f} of {p.capacity / 1e9:.1f} GB a device"
    return (
        f"{p.row}{variant(p)}: {room}, {duration(p.step_seconds)} a step bound by {p.bound}, "
        f"{p.tokens_per_second:,.0f} tokens/s, {percent(p.mfu)} of the peak rate{per_million}"
    )


def variant(p: Prediction) -> str:
    """What a strategy chose beside its mesh."""
    if isinstance(p.workload, Serve):
        return "" if p.workload.experts == "packed" else ", bfloat16 experts"
    parts = f", batch in {p.workload.grad_accum} parts" if p.workload.grad_accum > 1 else ""
    return (", recomputing" if p.workload.remat else ", keeping activations") + parts


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def amount(n: float, unit: str) -> str:
    """Three digits and a prefix.

    Example:
        >>> amount(7.56e12, "FLOP")
        '7.56 TFLOP'
    """
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= scale:
            return f"{n / scale:.{2 - min(int(math.log10(n / scale)), 2)}f} {prefix}{unit}"
    return f"{n:.0f} {unit}"


def percent(share: float) -> str:
    """To a tenth, or two digits below one."""
    return f"{100 * share:.1f} %" if share >= 0.01 else f"{100 * share:.2g} %"


def one(
    config: ModelConfig,
    workload: Workload,
    hardware: Hardware,
    devices: int,
    mesh: MeshConfig,
    price: float | None = None,
) -> Answer:
    """Of one mesh.

    Raises:
        ValueError: sizes that do not fit together.
    """
    strategy = Strategy(mesh_for(mesh, devices))
    p = analytic.predict(config, workload, strategy, hardware, price)
    text = sentence(p) if p.fits else analytic.shortfall(p)
    return Answer(question(config, workload, hardware, devices), text, [p])


def best(
    config: ModelConfig, workload: Workload, hardware: Hardware, devices: int, price: float | None = None
) -> Answer:
    """Of the fastest mesh that fits.

    Raises:
        ValueError: none fits; says by how much and where.
    """
    found = search(config, workload, hardware, devices, price)
    text = sentence(found.best)
    few = f"{len(found.ranked):,} of {found.tried:,} strategies fit"
    return Answer(question(config, workload, hardware, devices), f"{text}. {few}.", found.ranked[:10], found)


def table(answer: Answer) -> str:
    """The answer as text to read: the sentence, the strategies, and where the first one's bytes and time go."""
    lines = [answer.question, answer.text, ""]
    heading = ("strategy", "GB", "compute", "memory", "sent", "step", "tokens/s", "MFU")
    lines += columns([heading, *map(strategy_row, answer.chosen)])
    if answer.chosen:
        lines += ["", *details(answer.chosen[0])]
    if answer.compared:
        lines += ["", *columns([tuple(answer.compared[0]), *(tuple(row.values()) for row in answer.compared)])]
    return "\n".join(lines)


def strategy_row(p: Prediction) -> tuple[str, ...]:
    """One line of a table of strategies."""
    times = map(duration, (p.compute_seconds, p.memory_seconds, p.communication_seconds, p.step_seconds))
    where = f"{p.devices} {p.hardware}: {p.row}{variant(p)}"
    return (where, f"{p.memory / 1e9:.1f}", *times, f"{p.tokens_per_second:,.0f}", f"{percent(p.mfu)}")


def details(p: Prediction) -> list[str]:
    """Bytes, FLOPs and communication of one strategy, by purpose."""
    listed = lambda found, unit: ", ".join(f"{name} {amount(n, unit)}" for name, n in found.items() if n)  # noqa: E731
    sent = (f"{kind} over {axes} {amount(n, 'B')}" for kind, by in p.communication.items() for axes, n in by.items())
    return [
        f"arguments of a device: {listed(p.arguments, 'B')}",
        f"temporary: {listed(p.temporaries, 'B')}",
        f"products: {listed(p.flops, 'FLOP')}",
        f"moved in memory: {listed(p.bytes, 'B')}",
        f"sent by a device: {', '.join(sent) or 'nothing'}",
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def write_json(path: str | Path, answers: Sequence[Answer]) -> None:
    """All answers, the hardware's figures with their sources, and what is assumed."""
    used = dict.fromkeys(p.hardware for answer in answers for p in answer.chosen)
    report = {
        "answers": [answer.to_json() for answer in answers],
        "hardware": {name: dataclasses.asdict(HARDWARE[name]) for name in used},
        "assumptions": ASSUMPTIONS,
    }
    Path(path).write_text(json.dumps(report, indent=1), encoding="utf-8")
