"""A prediction beside what the TPU compiler says of the same step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from k3jax.config import ModelConfig
from k3jax.plan.analytic import Prediction
from k3jax.plan.aot import Program, check
from k3jax.plan.setting import Train


def program(config: ModelConfig, p: Prediction, topology: str, quick: bool = False) -> Program:
    """The step that `p` predicts, for a topology such as v5p:8x8x16."""
    w = p.workload
    if isinstance(w, Train):
        options = {"length": w.sequence, "qat": w.qat, "remat": w.remat, "grad_accum": w.grad_accum}
    else:
        options = {"phase": w.phase, "length": w.context, "piece": w.piece, "experts": w.experts}
    return Program(config, p.strategy.mesh, topology, batch=w.batch, quick=quick, **options)


def compared(
    config: ModelConfig, p: Prediction, topology: str, timeout: float, quick: bool = False, say=None
) -> tuple[str, list[dict]]:
    """The compiler's verdict in words, and its figures beside the predicted ones as rows of a table. `quick`: see `Program`.

    Raises:
        ValueError: an unknown topology, no TPU compiler, sizes that do not fit together.
        ChildProcessError: the compiler failed.

    Example:
        >>> workload = Serve("decode", batch=64, context=131072)
        >>> compared(cfg, predict(cfg, workload, strategy, HARDWARE["tpu7x"]), "tpu7x:4x4x2", timeout=600)[0]
        'expert=16 tensor=4, compiled for tpu7x:4x4x2 in 278 s and 2.1 GiB: 74.6 GB a device'
    """
    found = check(program(config, p, topology, quick), timeout, shrink=True, say=say)
    if not found["fits"]:
        change = f"; {found['fits_with']} would fit" if "fits_with" in found else ""
        needed = [row(p, "memory", p.memory, found["needed_bytes"])] if "needed_bytes" in found else []
        return f"{p.row}, {topology}: {found['message']}{change}", needed
    spent = f"{found['seconds']['compiling']:.0f} s and {found['peak_rss_bytes'] / 2**30:.1f} GiB"
    memory = found["memory"]
    rows = [
        row(p, "arguments", sum(p.arguments.values()), memory["arguments"]),
        row(p, "temporaries", sum(p.temporaries.values()), memory["temporaries"]),
        row(p, "memory", p.memory, memory["total"]),
    ]
    sent: Counter[str] = Counter()
    for collective in found["collectives"]:
        sent[collective["kind"]] += collective["sent_bytes"]
    predicted = {kind: sum(axes.values()) for kind, axes in p.communication.items()}
    rows += [row(p, f"sent by {kind}", predicted.get(kind, 0.0), sent[kind]) for kind in sorted({*sent, *predicted})]
    if found["accessed_bytes"]:
        rows.append(row(p, "moved in memory", sum(p.bytes.values()), found["accessed_bytes"]["hbm"]))
    return f"{p.row}, compiled for {topology} in {spent}: {memory['total'] / 1e9:.1f} GB a device", rows


def row(p: Prediction, what: str, predicted: float, compiled: float) -> dict[str, Any]:
    """Gigabytes a device of both, and by how much the prediction is off."""
    difference = f"{100 * (predicted / compiled - 1):+.1f} %" if compiled else "-"
    sizes = {"predicted GB": f"{predicted / 1e9:.3f}", "compiler GB": f"{compiled / 1e9:.3f}"}
    return {"strategy": f"{p.row}: {what}", **sizes, "difference": difference}
