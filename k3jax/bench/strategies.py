"""One model's training step under every sharding strategy: time, memory, and what each collective moves."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax

from k3jax.bench.timing import interleaved, machine, progress, table
from k3jax.plan.hlo import SENT, collectives
from k3jax.run_config import MeshConfig, RunConfig
from k3jax.sharding import make_mesh
from k3jax.train import step as training
from k3jax.train.loop import open_data

TOLERANCE = 1e-4  # of the first step's loss, from strategy to strategy
REFERENCE = "fsdp"  # or, where that is not run, the first


def run(config: RunConfig, meshes: Mapping[str, MeshConfig], steps: int) -> dict[str, Any]:
    """Times `steps` rounds of training steps of `config` on every mesh; what `text` prints, fit for JSON.

    All start from the same state and see the same batch. Their states are held at the same time, so that they
    take turns.

    Example:
        >>> run(config, {"fsdp": MeshConfig(fsdp=-1), "ep": MeshConfig(expert=-1)}, 5)["strategies"]["ep"]["seconds"]
        0.41
    """
    batch = open_data(config)[0].batch(0)
    state = _initial_state(config)
    rows, calls = {}, {}
    for name, mesh in progress(list(meshes.items()), "compile"):
        try:
            placed = dataclasses.replace(config, mesh=mesh).on(jax.device_count())
            dataclasses.replace(placed, cpu_devices=0).validate()
        except ValueError as error:
            rows[name] = {"unfit": str(error)}
        else:
            rows[name], calls[name] = _compile(placed, state, batch)
    _compare(rows)
    calls = {name: call for name, call in calls.items() if "wrong" not in rows[name]}
    for name, taken in interleaved(calls, steps, "rounds").items():
        rows[name] |= taken._asdict()
    return {
        "settings": {"tokens": batch["tokens"].size, "seq_len": config.data.seq_len, "steps": steps}
        | {"parameters": config.model.num_parameters, "dtype": config.train.dtype},
        "machine": machine(),
        "strategies": rows,
    }


def _initial_state(config: RunConfig) -> training.TrainState:
    """In the host's memory, made on one device: it is the same on any mesh."""
    one = make_mesh()
    with jax.set_mesh(one):
        return jax.device_get(training.init_state(dataclasses.replace(config, mesh=MeshConfig()), one)[0])


def _compile(config: RunConfig, state, batch) -> tuple[dict[str, Any], Callable[[], Any]]:
    """What one strategy's program says of itself, and a call that takes its next step."""
    mesh = make_mesh(**vars(config.mesh))
    with jax.set_mesh(mesh):
        _, shardings = training.abstract_state(config, mesh)
        state = jax.device_put(state, shardings, may_alias=False)  # a step overwrites it
        batch = training.shard_batch(batch, mesh)
        start = time.perf_counter()
        program = training.make_train_step(config, shardings).lower(state, batch).compile()
        seconds = time.perf_counter() - start
    memory, text = program.memory_analysis(), program.as_text()
    state, metrics = program(state, batch)
    kept = [state]

    def call():
        state, metrics = program(kept.pop(), batch)
        kept.append(state)
        return state, metrics

    row = {
        "mesh": {axis: size for axis, size in vars(config.mesh).items() if size > 1},
        "loss": float(metrics["loss"]),
        "compile_seconds": seconds,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    return row | _moved(text, mesh.shape), call


def _moved(text: str, mesh: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Bytes that a device sends in a step, by kind of collective and by the mesh axes they cross."""
    kinds, axes = Counter(dict.fromkeys(SENT, 0)), Counter()
    for collective, times in collectives(text).items():
        kinds[collective.kind] += times * collective.sent
        axes["*".join(collective.axes(mesh))] += times * collective.sent
    return {"sent_bytes": dict(kinds), "sent_bytes_by_axes": dict(axes.most_common())}


def _compare(rows: dict[str, dict[str, Any]]) -> None:
    """Notes who starts with another loss than the reference."""
    losses = {name: row["loss"] for name, row in rows.items() if "loss" in row}
    if not losses:
        return
    reference = REFERENCE if REFERENCE in losses else next(iter(losses))
    truth = losses[reference]
    for name, loss in losses.items():
        if not abs(loss - truth) <= TOLERANCE * abs(truth):  # nor is nan
            rows[name]["wrong"] = f"first loss {loss:.6f}, under {reference} {truth:.6f}"


def wrong(report: Mapping[str, Any]) -> list[str]:
    """Whose loss is wrong, and how."""
    return [f"{name}: {row['wrong']}" for name, row in report["strategies"].items() if "wrong" in row]


def text(report: Mapping[str, Any]) -> str:
    """The report as tables to read."""
    rows = report["strategies"]
    kinds = [kind for kind in SENT if any(row.get("sent_bytes", {}).get(kind) for row in rows.values())]
    heading = ("", "mesh", "ms a step", "spread", "compile s", "arguments", "temporary", *kinds, "first loss")
    crossed = (f"{name}: {_crossed(row)}" for name, row in rows.items() if "loss" in row)
    sizes = "{parameters:,} parameters, {tokens} tokens a step in sequences of {seq_len}, {dtype}, {steps} rounds"
    return "\n".join(
        [
            sizes.format(**report["settings"]),
            "JAX {jax}, {devices} {backend} ({device}), {cpus} CPUs".format(**report["machine"]),
            "",
            "MB a device: memory of the program, and what a step sends by each collective",
            table([heading, *((name, *_columns(row, kinds)) for name, row in rows.items())]),
            "",
            "MB a device that a step sends, by the mesh axes crossed",
            *crossed,
        ]
    )


def _crossed(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{axes} {n / 1e6:.1f}" for axes, n in row["sent_bytes_by_axes"].items()) or "nothing"


def _columns(row: Mapping[str, Any], kinds: list[str]) -> list[str]:
    if said := row.get("wrong") or row.get("unfit"):
        return [f"{'wrong' if 'wrong' in row else 'does not fit'}: {said}"]
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items())
    times = f"{row['seconds'] * 1e3:.1f}", f"{row['spread_seconds'] * 1e3:.1f}", f"{row['compile_seconds']:.1f}"
    memory = (row["argument_bytes"], row["temp_bytes"], *(row["sent_bytes"][kind] for kind in kinds))
    return [mesh, *times, *(f"{n / 1e6:.1f}" for n in memory), f"{row['loss']:.6f}"]
