"""The benchmark of import and export, on a checkpoint of a size that says nothing about speed."""

import pytest

from k3jax.bench import convert
from k3jax.cli.bench import BenchConvert


@pytest.fixture
def small(monkeypatch, tiny):
    monkeypatch.setattr(convert, "model", lambda gib: tiny)


def test_rates_are_of_whole_commands(small, tmp_path):
    report = convert.run(BenchConvert(folder=str(tmp_path), gib=0.001, repeats=1, index=False))
    rows = {row["what"]: row for row in report["rates"]}
    assert list(rows) == ["synthesize", "cp", "import, packed", "export"]
    assert rows["cp"]["bytes"] == rows["export"]["bytes"] > 100_000
    assert all(row["rate"] == row["bytes"] / row["seconds"] for row in rows.values())
    assert 2**26 < rows["import, packed"]["memory"] < 2**31
    text = convert.text(report)
    assert "/ cp" in text and "of a copy of the result" in text
    assert list(tmp_path.iterdir()) == []
    report["rates"][0]["memory"] = 2**32
    report["rates"][2]["rate"] = report["rates"][1]["rate"] / 2
    report["rates"][3]["rate"] = report["rates"][1]["rate"] * 0.5
    report["dequantize"] = {"dequantize": 1.6, "copy": 1.0}
    assert convert.wrong(report) == [
        "synthesize: 4.00 GiB of memory, above 3",
        "import, packed: 0.50 of the rate of cp, below 0.6",
        "dequantisation: 1.60 of a copy, above 1.5",
    ]


def test_size_of_the_model():
    assert convert.stored_bytes(convert.model(8)) / 2**33 == pytest.approx(1, abs=0.01)


def test_kills_are_told(small, tmp_path):
    report = convert.run(BenchConvert(folder=str(tmp_path), gib=0, repeats=1, index=False, kills=1))
    assert [(row["what"], row["differing"]) for row in report["kills"]] == [("import", 0), ("export", 0)]
    assert "import killed 1 times" in convert.text(report)
    report["kills"][1]["differing"] = 1
    assert "export gone on: 1 ended with other bytes" in convert.wrong(report)


def test_a_command_that_fails_stops_the_benchmark(capfd):
    with pytest.raises(ValueError, match="_command failed, see above"):
        convert._child(convert._command, "convert", "import", "none", "out")
    assert "none" in capfd.readouterr().err
