"""The comparison of strategies: what is measured, and that a wrong loss gets no time."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from k3jax.bench import strategies as bench
from k3jax.plan.hlo import SENT
from k3jax.bench.timing import write_json
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.settings import load_strategy

MESHES = {"ep": MeshConfig(expert=-1, fsdp=2), "fsdp": MeshConfig(fsdp=-1), "tp": MeshConfig(tensor=-1)}


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("the quick brown fox jumps over the lazy dog. " * 40)
    # One layer, of latent attention and experts: little to compile.
    layers = {"num_hidden_layers": 1, "kda_layers": (), "full_attn_layers": (1,), "first_k_dense_replace": 0}
    model = dataclasses.replace(tiny, **layers, attn_res_block_size=None)
    data = DataConfig(paths=(str(folder),), seq_len=16, batch_size=8, held_out=0.5)
    return RunConfig(model=model, data=data, train=TrainConfig(qat=False), cpu_devices=8)


@pytest.fixture(scope="module")
def report(config):
    return bench.run(config, MESHES, 1)


def test_report(report, config, tmp_path):
    write_json(tmp_path / "report.json", report)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert report["settings"]["tokens"] == 8 * 16 and report["machine"]["devices"] == 8
    rows = report["strategies"]
    assert list(rows) == ["ep", "fsdp", "tp"] and bench.wrong(report) == []
    assert rows["tp"] == {"unfit": "model.num_attention_heads=2: must be a multiple of mesh.tensor=8"}
    assert rows["ep"]["mesh"] == {"fsdp": 2, "expert": 4} and rows["fsdp"]["mesh"] == {"fsdp": 8}
    for name in ("ep", "fsdp"):
        row = rows[name]
        assert min(row["seconds"], row["compile_seconds"], row["temp_bytes"]) > 0
        assert np.isclose(row["loss"], rows["fsdp"]["loss"], rtol=1e-5) and 5 < row["loss"] < 6  # log 256 = 5.5
        assert sum(row["sent_bytes"].values()) == sum(row["sent_bytes_by_axes"].values()) > 0
    # Parameters, two moments and the batch in eight parts; small vectors and the router's bias everywhere.
    whole = 3 * 4 * config.model.num_parameters
    assert whole / 8 < rows["fsdp"]["argument_bytes"] < rows["ep"]["argument_bytes"] < whole / 2
    assert rows["fsdp"]["sent_bytes"]["all-gather"] > rows["ep"]["sent_bytes"]["all-gather"]
    assert list(rows["fsdp"]["sent_bytes_by_axes"]) == ["fsdp"]
    assert set(rows["ep"]["sent_bytes_by_axes"]) == {"fsdp", "expert", "fsdp*expert"}


def test_experts_exchange_their_rows(report, config):
    """Their inputs go out, outputs come back, and the gradients of both, with room for each of four devices."""
    rows = 24  # to a device: of 16 tokens with two experts each it needs 8, and three sigma are 8.5
    once = 4 * rows * config.model.latent_size * 4 * 3 // 4
    sent = {name: report["strategies"][name]["sent_bytes"]["all-to-all"] for name in ("ep", "fsdp")}
    numbers = 4 * rows * 4 * 3 // 4  # of the rows' experts
    # What XLA moves by itself is not counted here.
    assert 4 * once + numbers <= sent["ep"] < 8 * once and sent["fsdp"] < once


def test_text(report):
    lines = bench.text(report).split("\n")
    assert "128 tokens a step in sequences of 16, float32, 1 rounds" in lines[0]
    assert lines[1].startswith(f"JAX {jax.__version__}, 8 cpu (cpu), ")
    heading = next(line for line in lines if "ms a step" in line)
    assert "all-gather" in heading and "all-to-all" in heading
    start = lines.index(heading)
    assert [line.split()[0] for line in lines[start + 1 : start + 4]] == ["ep", "fsdp", "tp"]
    assert lines[start + 1].split()[1:3] == ["fsdp=2", "expert=4"]
    assert "does not fit: model.num_attention_heads=2: must be a multiple of mesh.tensor=8" in lines[start + 3]
    assert lines[-2].startswith("ep: ") and lines[-1].startswith("fsdp: fsdp ")


@pytest.fixture
def losses(config, monkeypatch):
    """Runs the benchmark on programs that do nothing and claim these losses."""
    monkeypatch.setattr(bench, "_initial_state", lambda config: None)

    def run(**claimed):
        claimed = dict(claimed)
        row = {"mesh": {}, "compile_seconds": 1.0, "argument_bytes": 1, "temp_bytes": 1}
        row |= {"sent_bytes": dict.fromkeys(SENT, 0), "sent_bytes_by_axes": {}}
        made = iter(claimed.values())
        monkeypatch.setattr(bench, "_compile", lambda *_: (row | {"loss": next(made)}, lambda: None))
        return bench.run(config, dict.fromkeys(claimed, MeshConfig(fsdp=-1)), 1)

    return run


def test_a_wrong_loss_gets_no_time(losses):
    report = losses(dp=5.0004, fsdp=5.0, ep=5.0006, cp=float("nan"))
    timed = {name for name, row in report["strategies"].items() if "seconds" in row}
    assert timed == {"dp", "fsdp"}
    assert bench.wrong(report) == [
        "ep: first loss 5.000600, under fsdp 5.000000",
        "cp: first loss nan, under fsdp 5.000000",
    ]
    assert "wrong: first loss 5.000600, under fsdp 5.000000" in bench.text(report)
    assert "fsdp: nothing" in bench.text(report)


def test_without_fsdp_the_first_is_the_reference(losses):
    report = losses(dp=5.001, ep=5.0)
    assert bench.wrong(report) == ["ep: first loss 5.000000, under dp 5.001000"]


def test_nothing_fits(config, losses):
    losses()
    report = bench.run(config, {"tp": load_strategy("tp")}, 1)
    assert list(report["strategies"]["tp"]) == ["unfit"] and "does not fit" in bench.text(report)
