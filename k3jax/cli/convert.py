"""`python -m k3jax convert import | export | synthesize` and `python -m k3jax inspect`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, subcommand

from k3jax.cli.options import at_least, check
from k3jax.paths import check_kind
from k3jax.run_config import ProcessesConfig
from k3jax.values import PathText, Seed

MOST_EXPERTS = 2**16  # that are made up for a layer: each has tensors of its own


def _bytes(name: str, value: float, unit: int):
    """For `check`: an amount that is at least a byte."""
    return name, value, value * unit >= 1, "above 0"


@dataclass(frozen=True)
class Import:
    """Write a checkpoint of the released layout as one a run can start from, on any mesh.

    Goes on where the same command was stopped, by whatever. Several processes, one a host as a rule, share the pieces.
    """

    source: Positional[PathText]
    """Folder of the released layout."""
    destination: Positional[PathText]
    """Folder to write, which all processes see."""
    experts: Literal["dequantized", "packed"] = "dequantized"
    """MXFP4 experts as bfloat16, which training needs, or as they are stored."""
    layers: int | None = None
    """Only the first layers, for experiments; only the shards that hold them need to be there."""
    memory_gib: float = 2.0
    """Most memory for data on its way, in each process."""
    allow_nonfinite: UseAppendAction[tuple[str, ...]] = ()
    """Take a tensor that holds NaN or infinity as it is: its released name, or a pattern such as *.A_log; again for each
    further one."""
    processes: ProcessesConfig = ProcessesConfig()

    def run(self) -> None:
        check(*at_least(1, layers=self.layers), _bytes("memory-gib", self.memory_gib, 2**30))
        self.processes.validate()
        check_kind(self.source)
        from k3jax import runtime

        runtime.setup(processes=self.processes)
        from k3jax.train import convert

        options = {"experts": self.experts, "layers": self.layers, "memory": int(self.memory_gib * 2**30)}
        with runtime.ending_together():
            runtime.agree(runtime.versions() | options | {"allow-nonfinite": self.allow_nonfinite})
            convert.import_checkpoint(self.source, self.destination, allow_nonfinite=self.allow_nonfinite, **options)


@dataclass(frozen=True)
class Export:
    """Write a run's checkpoint in the released layout, experts packed, or for other programs.

    Goes on where the same command was stopped, by whatever.
    """

    source: Positional[PathText]
    """Checkpoint of a run or an import: its step folder, or a run folder for its newest one."""
    destination: Positional[PathText]
    """Folder to write."""
    layout: Literal["released", "transformers"] = "released"
    """Names and configuration as released, or as Transformers saves them, which has Kimi-Linear alone."""
    experts: Literal["packed", "bf16"] = "packed"
    """Experts of a quantised model as MXFP4, or as the bfloat16 that it stands for."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the other weights."""
    shard_gb: float = 5.0
    """Largest shard, in 10^9 bytes."""
    memory_gib: float = 2.0
    """Most memory for data on its way."""

    def run(self) -> None:
        check(_bytes("shard-gb", self.shard_gb, 10**9), _bytes("memory-gib", self.memory_gib, 2**30))
        check_kind(self.source)
        from k3jax import runtime

        runtime.setup()
        from k3jax.hf.layouts import Form
        from k3jax.train import convert

        convert.export_checkpoint(
            self.source,
            self.destination,
            max_shard_size=int(self.shard_gb * 10**9),
            memory=int(self.memory_gib * 2**30),
            form=Form(self.layout, self.dtype, self.experts),
        )


@dataclass(frozen=True)
class Synthesize:
    """Write a checkpoint of the released layout with random weights.

    Goes on where the same command was stopped, by whatever.
    """

    config: Positional[PathText]
    """A released config.json or its folder, or a Python file that defines `model`."""
    destination: Positional[PathText]
    """Folder to write."""
    layers: int | None = None
    """Only the first layers."""
    num_experts: int | None = None
    """Another number of routed experts a layer."""
    seed: Seed = 0
    """Of the weights."""
    shard_gb: float = 5.0
    """Largest shard, in 10^9 bytes."""

    def run(self) -> None:
        experts = self.num_experts is None or 1 <= self.num_experts <= MOST_EXPERTS
        check(
            *at_least(1, layers=self.layers),
            ("num-experts", self.num_experts, experts, f"from 1 to {MOST_EXPERTS:,}"),
            _bytes("shard-gb", self.shard_gb, 10**9),
        )
        from k3jax.settings import load_model

        cfg = load_model(self.config)
        cfg = cfg if self.layers is None else cfg.first_layers(self.layers)
        cfg = cfg if self.num_experts is None else dataclasses.replace(cfg, num_experts=self.num_experts)
        from k3jax import runtime

        runtime.setup()
        from k3jax.hf.synthesize import synthesize

        synthesize(cfg, self.destination, seed=self.seed, max_shard_size=int(self.shard_gb * 10**9))


@dataclass(frozen=True)
class Convert:
    """Change a checkpoint's layout, or make one up."""

    direction: (
        Annotated[Import, subcommand("import")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Synthesize, subcommand("synthesize")]
    )

    def run(self) -> None:
        self.direction.run()


@dataclass(frozen=True)
class Inspect:
    """Say what a configuration or checkpoint holds, of which only headers are read; exits with 2 if something is wrong."""

    path: Positional[PathText]
    """A released config.json, a folder of the released layout, or the checkpoint of a run or an import."""
    tensor: str | None = None
    """Statistics of one tensor, which is read: its released name, or in a run's checkpoint a leaf's dotted path."""

    def run(self) -> None:
        check_kind(self.path)
        path = Path(self.path)
        if path.is_dir() and not (path / "config.json").is_file():
            from k3jax.train.inspect import report, tensor_report
        else:
            from k3jax.hf.inspect import report
            from k3jax.hf.statistics import tensor_report
        if self.tensor is not None:
            print(tensor_report(path, self.tensor))
            return
        found = report(path)
        print(found, flush=True)
        if problems := len(found.problems):
            raise ValueError(f"{path}: {problems} problem{'s'[: problems != 1]}, see the last line of the report")
