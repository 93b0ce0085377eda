"""Predictions beside what the TPU compiler said of the same programs, kept by `python -m k3jax.plan.compiled`."""

import dataclasses
import json
from pathlib import Path

import pytest

from k3jax.plan import compare
from k3jax.plan.analytic import predict
from k3jax.plan.compiled import PROGRAMS, program
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.setting import Serve, Strategy, Train

COMPILED = json.loads((Path(__file__).parents[1] / "data" / "plan" / "compiled.json").read_text())


def prediction(p):
    if p.phase == "train":
        model, workload = p.model, Train(p.batch, p.length, p.qat, p.remat, p.grad_accum)
    else:  # a step that is given no images is not given what only they pass through
        model = dataclasses.replace(p.model, vision=None)
        workload = Serve(p.phase, p.batch, p.length, p.piece, p.experts)
    return predict(model, workload, Strategy(p.mesh), HARDWARE[p.topology.partition(":")[0]])


@pytest.mark.parametrize("name", COMPILED)
def test_memory(name):
    p, compiled = program(name), COMPILED[name]["memory"]
    predicted = prediction(p)
    assert compare.program(p.model, predicted, p.topology, p.quick) == p
    # TPUs pad the smallest arrays to tiles, which shows in small models alone.
    small = p.model.num_parameters < 10**9
    assert sum(predicted.arguments.values()) == pytest.approx(compiled["arguments"], rel=0.015 if small else 0.003)
    assert sum(predicted.temporaries.values()) == pytest.approx(compiled["temporaries"], rel=0.25)


@pytest.mark.parametrize("kind", ["all-gather", "ragged-all-to-all"])
@pytest.mark.parametrize("name", COMPILED)
def test_bytes_sent(name, kind):
    compiled = sum(row["sent_bytes"] for row in COMPILED[name]["collectives"] if row["kind"] == kind)
    predicted = sum(prediction(program(name)).communication.get(kind, {}).values())
    # The small model's projections are gathered twice in the derivative, before and after they are flattened.
    twice = (name, kind) == ("midsize train fsdp=2 expert=4", "all-gather")
    assert predicted == pytest.approx(compiled, rel=0.16 if twice else 0.1, abs=10**6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_fit_together(name):
    program(name).validate()
