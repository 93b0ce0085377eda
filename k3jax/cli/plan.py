"""`python -m k3jax plan`: what a sharding strategy needs and takes, without any device."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Literal

from k3jax.cli.options import at_least, check, writable
from k3jax.checks import LARGEST, shown
from k3jax.values import PathText, parse

MOST_DEVICES = 2**20


@dataclass(frozen=True)
class Plan:
    """Say what it takes to train or serve a model: memory, time, communication, cost.

    Needs no device, and but for --aot no JAX. One mesh: python -m k3jax plan --mesh fsdp=64,expert=16 --hardware v5p --devices 1024.
    All of them, the fastest first: python -m k3jax plan --search --report plan.html
    """

    config: PathText | None = None
    """Python file that defines `model`, or a released config.json. None: Kimi K3."""
    workload: Literal["train", "decode", "prefill"] = "train"
    """What one step does."""
    hardware: str = "v5p"
    """v5e, v5p, v6e, tpu7x, h100, h200, b200, gb200 or mi355x."""
    devices: int = 1024
    """Devices as JAX counts them: two a chip on tpu7x."""
    mesh: str = "fsdp=-1"
    """Devices along each axis, such as fsdp=64,expert=16 (-1 takes the rest), or a strategy of configs/strategies."""
    search: bool = False
    """Try every mesh, and in training remat and parts of the batch; --mesh does not matter."""
    batch: int = 1024
    """Sequences a step, over all devices. In serving any number: rows that the mesh does not divide are filled up."""
    sequence: int = 4096
    """Tokens of a sequence in training."""
    qat: bool = True
    """Quantisation-aware training: MXFP4 expert weights, MXFP8 expert inputs."""
    remat: bool = True
    """Recompute activations in the backward pass."""
    grad_accum: int = 1
    """Parts a training batch is computed in."""
    context: int = 131072
    """Tokens that a row's cache holds in serving, up to 1048576."""
    piece: int = 8192
    """Tokens of a prompt that one prefill step takes."""
    experts: Literal["packed", "dequantized"] = "packed"
    """Routed experts in serving: MXFP4, or bfloat16."""
    price: float | None = None
    """Of a device for an hour; the cost comes in the same currency."""
    preset: Literal["long-context", "fine-tune", "kimi-linear", "four-bits"] | None = None
    """A ready question; of the other settings only --price and the files matter."""
    aot: str | None = None
    """TPU topology, such as v5p:8x8x16, that the step is also compiled for by the real compiler, in minutes."""
    aot_top: int = 1
    """How many strategies of a search, from the first, are compiled."""
    aot_timeout: int = 900
    """Seconds, after which the compiler is stopped."""
    aot_quick: bool = False
    """Compile at a lower level, in about a third of the time: memory is the same within a tenth, collectives may differ."""
    json: PathText | None = None
    """JSON file to write."""
    csv: PathText | None = None
    """CSV file to write: every strategy that was considered and fits."""
    png: PathText | None = None
    """Picture to write: step time against memory of all that fit."""
    report: PathText | None = None
    """Web page to write, complete in one file."""

    def run(self) -> None:
        check(
            ("devices", self.devices, 1 <= self.devices <= MOST_DEVICES, f"from 1 to {MOST_DEVICES:,}"),
            *at_least(1, batch=self.batch, sequence=self.sequence, grad_accum=self.grad_accum),
            *at_least(1, context=self.context, piece=self.piece),
            ("price", self.price, self.price is None or self.price > 0, "positive"),
            ("aot", self.aot, self.aot is None or not self.preset, "left out with --preset"),
            *at_least(1, aot_top=self.aot_top, aot_timeout=self.aot_timeout),
            *(writable(name, getattr(self, name)) for name in ("json", "csv", "png", "report")),
        )
        mesh = None if self.search or self.preset else mesh_of(self.mesh)
        from k3jax.plan import answer

        answers = self._answers(mesh)
        print("\n\n".join(map(answer.table, answers)), flush=True)
        chosen = [p for found in answers for p in (found.found.ranked if found.found else found.chosen)]
        if self.json:
            answer.write_json(self.json, answers)
        if self.csv:
            from k3jax.plan import search

            search.write_csv(self.csv, chosen)
        if self.png:
            from k3jax.plan import pictures

            pictures.write_front(self.png, answers)
        if self.report:
            from k3jax.plan import report

            report.write(self.report, answers)
        if wrong := [found.text for found in answers if not self.preset and not all(p.fits for p in found.chosen)]:
            raise ValueError(f"does not fit: {'; '.join(wrong)}")

    def _answers(self, mesh):
        from k3jax.plan import answer, hardware, presets
        from k3jax.plan.setting import Serve, Train
        from k3jax.settings import CONFIGS, load_model

        if self.preset:
            return presets.PRESETS[self.preset](self.price)
        device = hardware.find(self.hardware)
        model = load_model(self.config or CONFIGS / "kimi_k3.py")
        most = model.max_position_embeddings
        if self.workload == "train":
            tokens = f"such that a step has at most {LARGEST} tokens, with --sequence {self.sequence}"
            check(
                ("sequence", self.sequence, self.sequence <= most, f"at most {most}"),
                ("batch", self.batch, self.batch * self.sequence <= LARGEST, tokens),
            )
            workload = Train(self.batch, self.sequence, self.qat, self.remat, self.grad_accum)
        else:
            check(("context", self.context, self.context <= most, f"at most {most}"))
            workload = Serve(self.workload, self.batch, self.context, self.piece, self.experts)
        if mesh is None:
            found = answer.best(model, workload, device, self.devices, self.price)
        else:
            found = answer.one(model, workload, device, self.devices, mesh, self.price)
        return [self._compiled(model, found) if self.aot else found]

    def _compiled(self, model, found):
        """The answer with what the compiler says of its first strategies."""
        from k3jax.plan.compare import compared

        shown = sys.stderr.isatty()
        say = lambda line: print(f"\r{line}", end="", file=sys.stderr, flush=True)  # noqa: E731
        for prediction in found.chosen[: self.aot_top]:
            options = {"quick": self.aot_quick, "say": say if shown else None}
            text, rows = compared(model, prediction, self.aot, self.aot_timeout, **options)
            found = dataclasses.replace(found, text=f"{found.text}\n{text}", compared=[*found.compared, *rows])
            if shown:
                print(file=sys.stderr)
        return found


def mesh_of(text: str):
    """The mesh of axis=size,... or of a strategy's name.

    Raises:
        ValueError: an unknown axis, one given twice, or a size that is no number.
    """
    from k3jax.run_config import MeshConfig
    from k3jax.settings import load_strategy

    if "=" not in text:
        return load_strategy(text)
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in vars(MeshConfig()):
            axes = ", ".join(vars(MeshConfig()))
            raise ValueError(f"--mesh {shown(text)}: {axis!r} is no axis, must be one of {axes}")
        if axis in sizes:
            raise ValueError(f"--mesh {shown(text)}: {axis} is given twice")
        try:
            sizes[axis] = parse(int, size)
        except ValueError as error:
            raise ValueError(f"--mesh {shown(text)}: {axis} must be {error}") from None
    return MeshConfig(**sizes)
