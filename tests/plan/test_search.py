"""The analytic model as a whole, and the search over it."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from k3jax.plan import analytic, answer, presets, search, setting
from k3jax.plan.hardware import HARDWARE, find
from k3jax.plan.setting import Serve, Strategy, Train
from k3jax.run_config import MeshConfig
from k3jax.settings import STRATEGIES, load_model

ROOT = Path(__file__).parents[2]
KIMI_K3 = load_model(STRATEGIES.parent / "kimi_k3.py")
KIMI_LINEAR = load_model(STRATEGIES.parent / "kimi_linear_48b.py")
V5P, H200 = HARDWARE["v5p"], HARDWARE["h200"]

TIMED = """
import sys, time
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.search import search
from k3jax.plan.setting import Train
from k3jax.settings import STRATEGIES, load_model
model = load_model(STRATEGIES.parent / "kimi_k3.py")
start = time.process_time()
found = search(model, Train(), HARDWARE["v5p"], 1024)
print(time.process_time() - start, found.tried)
loaded = {"jax", "flax", "orbax", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""


def test_a_search_over_1024_devices_takes_seconds_and_no_jax():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    seconds, tried = done.stdout.split()
    assert float(seconds) <= 10 and int(tried) > 1000


@pytest.fixture(scope="module")
def found():
    return search.search(KIMI_LINEAR, Train(batch=16, qat=False), H200, 8, price=3.0)


def test_factorisations_are_all_and_each_once():
    for devices, axes in ((1, 3), (12, 2), (64, 5), (96, 5)):
        every = list(search.factorisations(devices, axes))
        assert len(set(every)) == len(every) and all(math.prod(sizes) == devices for sizes in every)
        # Stars and bars for each prime's power.
        powers = {1: (), 12: (2, 1), 64: (6,), 96: (5, 1)}[devices]
        assert len(every) == math.prod(math.comb(n + axes - 1, axes - 1) for n in powers)


def test_the_ranking_and_the_front(found):
    assert found.ranked and all(p.fits for p in found.ranked) and not any(p.fits for p in found.tight)
    times = [p.step_seconds for p in found.ranked]
    assert times == sorted(times) and found.best is found.ranked[0]
    assert {p.workload.remat for p in found.ranked + found.tight} == {True, False}
    beats = lambda a, b: a.memory <= b.memory and a.step_seconds <= b.step_seconds and a is not b  # noqa: E731
    front = {p.row + str(p.workload) for p in found.front}
    for p in found.ranked:
        on_front = p.row + str(p.workload) in front
        assert on_front != any(beats(other, p) for other in found.ranked)


def test_a_prediction_adds_up(found):
    p = found.best
    assert p.memory == pytest.approx(sum(p.arguments.values()) + sum(p.temporaries.values()))
    rooflines = {name: getattr(p, f"{name}_seconds") for name in ("compute", "memory", "communication")}
    assert max(rooflines.values()) <= p.step_seconds <= p.serial_seconds
    assert p.bound == "communication" if p.step_seconds == p.communication_seconds else rooflines[p.bound] > 0
    assert p.tokens_per_second == pytest.approx(16 * 4096 / p.step_seconds)
    assert p.mfu == pytest.approx(6 * 3_106_972_544 * p.tokens_per_second / (8 * 989.5e12))
    assert p.cost_per_million_tokens == pytest.approx(8 * 3.0 / 3600 / p.tokens_per_second * 1e6)
    assert sum(p.by_purpose.values()) == pytest.approx(sum(n for by in p.communication.values() for n in by.values()))
    again = json.loads(json.dumps(p.to_json()))
    assert again["mesh"] == p.row and again["temporaries"] == p.temporaries


def test_every_device_of_the_table_is_plausible_and_has_a_source():
    assert set(HARDWARE) == {"v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "b200", "gb200", "mi355x"}
    for h in HARDWARE.values():
        assert h.bf16 <= h.fp8 <= h.fp4 and 1e10 < h.memory < 1e12 and h.network < h.links < h.bandwidth
        assert len(h.source) > 20
    assert find("TPU7x") is HARDWARE["tpu7x"]


def test_more_of_everything_takes_more():
    small = analytic.predict(KIMI_K3, Serve(batch=64), Strategy(MeshConfig(expert=16, tensor=8)), V5P)
    long = analytic.predict(KIMI_K3, Serve(batch=64, context=262144), Strategy(MeshConfig(expert=16, tensor=8)), V5P)
    assert long.arguments["MLA cache"] == 2 * small.arguments["MLA cache"]
    assert long.arguments["KDA state"] == small.arguments["KDA state"] and long.step_seconds > small.step_seconds
    kept, anew = (
        analytic.predict(KIMI_K3, Train(remat=remat), Strategy(MeshConfig(fsdp=64, expert=16)), V5P)
        for remat in (False, True)
    )
    assert kept.memory > anew.memory and kept.compute_seconds < anew.compute_seconds
    prefill = analytic.predict(KIMI_K3, Serve("prefill", 64), Strategy(MeshConfig(expert=16, tensor=8)), V5P)
    assert prefill.tokens_per_second > 10 * small.tokens_per_second


@pytest.mark.parametrize(
    "workload, mesh, says",
    [
        (
            Train(batch=6),
            {"fsdp": 4},
            "data.batch_size=6: must be a multiple of mesh.data*mesh.fsdp*mesh.expert*train.grad",
        ),
        (Train(batch=0), {}, "batch=0: must be at least 1"),
        (Train(), {"tensor": 64}, "num_attention_heads=96: must be a multiple of mesh.tensor=64"),
        (Serve("prefill", piece=24), {"context": 16}, "piece=24: must be a multiple of mesh.context*mesh.tensor=16"),
        (Serve(batch=256), {"expert": 256}, "num_experts=896: must be a multiple of mesh.expert*mesh.tensor=256"),
    ],
)
def test_what_does_not_divide_is_refused(workload, mesh, says):
    with pytest.raises(ValueError) as error:
        analytic.predict(KIMI_K3, workload, Strategy(MeshConfig(**mesh)), V5P)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("phase, batch, full", [("decode", 1, 8), ("decode", 9, 16), ("prefill", 5, 8)])
def test_rows_that_the_mesh_does_not_divide_are_filled_up(phase, batch, full):
    """It holds, computes and sends what the next number of rows does; what it yields is what was asked for."""
    strategy = Strategy(MeshConfig(data=2, expert=4))
    some, all_ = (analytic.predict(KIMI_K3, Serve(phase, rows, 4096), strategy, V5P) for rows in (batch, full))
    assert some.arguments == all_.arguments and some.temporaries == all_.temporaries
    assert some.compute_seconds == all_.compute_seconds and some.communication == all_.communication
    assert some.tokens_per_second * some.step_seconds == pytest.approx(all_.tokens_per_second * all_.step_seconds * batch / full)
    assert some.memory_seconds <= all_.memory_seconds  # empty rows choose no experts


def test_what_does_not_fit_says_by_how_much_and_where():
    with pytest.raises(
        ValueError, match=r"nothing fits; the smallest is .*: needs \S+ GB a device, \S+ GB more than h200's"
    ):
        answer.best(KIMI_K3, Train(batch=8), H200, 8)
    with pytest.raises(ValueError, match="no mesh divides the model and the workload"):
        answer.best(KIMI_K3, Train(batch=8), H200, 11)
    with pytest.raises(ValueError, match="devices=8: must be mesh.data.*=4"):
        setting.mesh_for(MeshConfig(fsdp=4), 8)
    with pytest.raises(ValueError, match="hardware=v9: must be one of v5e, v5p, v6e, tpu7x, h100"):
        find("v9")


def test_files(found, tmp_path):
    search.write_csv(tmp_path / "a.csv", found.ranked)
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(rows) == len(found.ranked) and float(rows[0]["step_seconds"]) == found.best.step_seconds
    assert {axis: int(rows[0][axis]) for axis in vars(found.best.strategy.mesh)} == vars(found.best.strategy.mesh)
    only = answer.Answer("?", "!", found.ranked[:2], dataclasses.replace(found, ranked=found.ranked[:3]))
    answer.write_json(tmp_path / "a.json", [only])
    read = json.loads((tmp_path / "a.json").read_text())
    assert len(read["answers"][0]["ranked"]) == 3 and read["hardware"]["h200"]["memory"] == 141e9


def test_the_presets_answer():
    four = presets.PRESETS["four-bits"](None)
    assert "1,446 GB packed and 5,445 GB as bfloat16, 3.76 times" in four[0].text
    fast, slow = four[0].chosen
    assert fast.fits and slow.fits and fast.step_seconds < slow.step_seconds
    for name, ask in presets.PRESETS.items():
        answers = four if name == "four-bits" else ask(2.0)
        assert answers and all(x.question.endswith("?") and x.text and x.chosen for x in answers), name
        assert all(answer.table(x) for x in answers)


@pytest.mark.parametrize(
    "number, unit, text",
    [(7.56e12, "FLOP", "7.56 TFLOP"), (123e9, "B", "123 GB"), (45.6e3, "B", "45.6 kB"), (7, "B", "7 B")],
)
def test_amounts(number, unit, text):
    assert answer.amount(number, unit) == text


@pytest.mark.parametrize("workload", [Train(batch=24, sequence=96), Serve("prefill", 8, 4096, 1536)])
def test_what_is_left_out_of_a_search_is_what_does_not_fit(workload):
    every = [MeshConfig(*sizes) for sizes in search.factorisations(96, 5)]
    variants = search.choices(workload)
    fits = [len(choice) for mesh in every for same, choice in variants if search._fits(KIMI_K3, same, mesh)]
    found = search.search(KIMI_K3, workload, V5P, 96)
    assert found.tried == sum(fits) > 0
    assert found.tried + found.refused == len(every) * sum(len(choice) for _, choice in variants)


@pytest.mark.parametrize(
    "devices, workload",
    [
        (2**20, Train()),
        (720720, Train()),
        (720720, Train(batch=720720, sequence=2520)),  # as many divisors as can be
        (1000003, Serve("decode", 1024)),  # a prime
    ],
)
def test_a_search_over_a_million_devices_ends(devices, workload):
    start = time.process_time()
    search.search(KIMI_K3, workload, V5P, devices)
    assert time.process_time() - start < 10
