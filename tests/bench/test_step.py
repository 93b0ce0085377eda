"""`bench step` on a small model: what it says, and that a wrong loss gets no time."""

import dataclasses
import json

import numpy as np
import pytest

from k3jax.bench import step as bench
from k3jax.bench.timing import write_json
from k3jax.run_config import DataConfig, RunConfig, TrainConfig


@pytest.fixture(scope="module")
def config(tiny):
    # One layer, of latent attention and experts: little to compile.
    layers = {"num_hidden_layers": 1, "kda_layers": (), "full_attn_layers": (1,), "first_k_dense_replace": 0}
    model = dataclasses.replace(tiny, **layers, attn_res_block_size=1)
    return RunConfig(model=model, data=DataConfig(seq_len=16, batch_size=2), train=TrainConfig(qat=False, remat=False))


def test_report(config, tmp_path):
    report = bench.run(config, 1, 2)
    write_json(tmp_path / "report.json", report)
    assert json.loads((tmp_path / "report.json").read_text()) == report and bench.wrong(report) == []
    assert list(report["training"]) == list(report["decoding"]) == [bench.MIXED, bench.PLAIN]
    assert report["settings"]["tokens"] == 32 and report["settings"]["parameters"] == config.model.num_parameters
    for name, model in ((bench.MIXED, config.model), (bench.PLAIN, dataclasses.replace(config.model, attn_res_block_size=None))):
        row = report["training"][name]
        assert np.isclose(row["loss"], np.log(256), atol=0.5)
        assert row["tokens_per_second"] == 32 / row["seconds"]
        flops = 6 * model.num_active_parameters * row["tokens_per_second"]
        assert np.isclose(row["utilisation"], flops / report["matmul_flops_per_second"])
    for kind in ("training", "decoding"):
        mixed, plain = (report[kind][name]["seconds"] for name in (bench.MIXED, bench.PLAIN))
        assert report["overhead"][kind] == mixed / plain - 1
    printed = bench.text(report)
    assert "1 layers of width 32" in printed and "training: attention residuals cost" in printed


def test_a_wrong_loss_gets_no_time(config, monkeypatch):
    real = bench.training.batch_loss

    def halved(model, *arguments):
        loss, stats = real(model, *arguments)
        return loss / 2 if model.cfg.attn_res_block_size else loss, stats

    monkeypatch.setattr(bench.training, "batch_loss", halved)
    report = bench.run(config, 1, 0)
    assert "seconds" not in report["training"][bench.MIXED] and "seconds" in report["training"][bench.PLAIN]
    (said,) = bench.wrong(report)
    assert said.startswith("attention residuals: first loss 2.7") and said.endswith("of a guess 5.545")
    assert report["overhead"]["training"] is None and said.split(": ", 1)[1] in bench.text(report)
