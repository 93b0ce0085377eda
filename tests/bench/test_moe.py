"""`bench moe` at small sizes: what it says, and that a wrong result gets no time."""

import json

import pytest

from k3jax.bench import moe
from k3jax.cli import main
from k3jax.cli.bench import BenchMoe

SIZES = {"tokens": 64, "experts": 8, "active": 2, "latent": 32, "width": 32, "repeats": 1}


def test_report(tmp_path, capsys):
    arguments = [f"--{name}={value}" for name, value in SIZES.items()]
    assert main(["bench", "moe", *arguments, f"--out={tmp_path / 'moe.json'}"]) == 0
    report = json.loads((tmp_path / "moe.json").read_text())
    rows = report["rows"]
    assert set(rows) == {"fixed", "dense", "dense, batched", "products alone"}
    assert rows["fixed"]["dense_to_this"] == rows["dense"]["seconds"] / rows["fixed"]["seconds"]
    assert rows["fixed"]["to_products"] == rows["fixed"]["seconds"] / rows["products alone"]["seconds"]
    assert max(rows["fixed"]["errors"].values()) < 1e-5
    assert report["load"]["mean"] == 16 and report["load"]["least"] <= 16 <= report["load"]["most"]
    printed = capsys.readouterr().out
    assert "64 tokens, 2 of 8 experts, L=32, F=32" in printed and "dense, batched" in printed


def test_a_wrong_result_gets_no_time(monkeypatch):
    real = moe.apply_experts
    monkeypatch.setattr(moe, "apply_experts", lambda *a, **k: (1.01 * real(*a, **k)[0], 0))
    report = moe.run(BenchMoe(**SIZES))
    assert "seconds" not in report["rows"]["fixed"] and "seconds" in report["rows"]["dense"]
    (said,) = moe.wrong(report)
    assert said.endswith("off by 1e-02") and said.startswith("fixed: ")
    assert f"wrong: {said.removeprefix('fixed: ')}" in moe.text(report)


@pytest.mark.parametrize("option, said", [
    ("--active=8", "--active 8: must be from 1 to 7, fewer than experts"),
    ("--tokens=63", "--tokens 63: must be such that tokens * active is a multiple of experts"),
    ("--width=0", "--width 0: must be at least 1"),
])
def test_options(option, said, capsys):
    arguments = [f"--{name}={value}" for name, value in SIZES.items() if not option.startswith(f"--{name}")]
    assert main(["bench", "moe", *arguments, option]) == 2
    assert said in capsys.readouterr().err
