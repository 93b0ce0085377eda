"""The comparison of strategies: what is measured, and that a wrong loss gets no time."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from k3jax.bench import strategies as bench
from k3jax.bench.timing import write_json
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig, load_strategy

MESHES = {"ep": MeshConfig(expert=-1, fsdp=2), "fsdp": MeshConfig(fsdp=-1), "tp": MeshConfig(tensor=-1)}


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("the quick brown fox jumps over the lazy dog. " * 40)
    data = DataConfig(paths=(str(folder),), seq_len=16, batch_size=8, held_out=0.5)
    return RunConfig(model=tiny, data=data, train=TrainConfig(qat=False), cpu_devices=8)


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
    assert whole / 8 < rows["fsdp"]["argument_bytes"] < whole / 8 * 1.2
    assert rows["fsdp"]["argument_bytes"] < rows["ep"]["argument_bytes"] < whole / 2
    assert rows["fsdp"]["sent_bytes"]["all-to-all"] == 0
    assert rows["fsdp"]["sent_bytes"]["all-gather"] > rows["ep"]["sent_bytes"]["all-gather"]
    assert list(rows["fsdp"]["sent_bytes_by_axes"]) == ["fsdp"]
    assert set(rows["ep"]["sent_bytes_by_axes"]) == {"fsdp", "expert", "fsdp*expert"}


def test_exchanged_bytes_are_those_of_the_tokens(report, config):
    """Rows of the experts' width go out, come back, and once more each way for the gradients; padded to the capacity."""
    model, n = config.model, 8 * 16 // 8
    capacity = 8 * int(np.ceil((1.25 * n * 2 / 8 + 2 * (n * 2 / 8) ** 0.5) / 8))
    once = min(n, capacity) * model.num_experts * model.latent_size * 4 * 3 // 4
    moe_layers = model.num_hidden_layers - 1
    assert report["strategies"]["ep"]["sent_bytes"]["all-to-all"] == 4 * once * moe_layers


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


def test_a_wrong_loss_gets_no_time(config, monkeypatch):
    compile_one = bench._compile

    def spoiled(config, state, batch):
        row, call = compile_one(config, state, batch)
        return row | {"loss": row["loss"] * (1 + 2e-4 * config.mesh.data)}, call

    monkeypatch.setattr(bench, "_compile", spoiled)
    rows = bench.run(config, {"dp": MeshConfig(data=-1)}, 1)["strategies"]
    assert "seconds" in rows["dp"]  # it is its own reference
    report = bench.run(config, {"dp": MeshConfig(data=-1), "fsdp": MeshConfig(fsdp=-1)}, 1)
    assert "seconds" in report["strategies"]["fsdp"] and "seconds" not in report["strategies"]["dp"]
    (line,) = bench.wrong(report)
    assert line.startswith("dp: first loss 5.") and ", under fsdp 5." in line
    assert line.removeprefix("dp: ") in bench.text(report)


def test_nothing_fits(config):
    report = bench.run(dataclasses.replace(config), {"tp": load_strategy("tp")}, 1)
    assert list(report["strategies"]["tp"]) == ["unfit"] and "does not fit" in bench.text(report)
