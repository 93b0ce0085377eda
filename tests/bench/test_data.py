"""The benchmark of tokenising and reading, on sizes that say nothing about speed."""

from k3jax.bench import data
from k3jax.cli.bench import BenchData


def test_rates_memory_and_utilisation_are_told(words, tmp_path):
    options = BenchData(folder=str(tmp_path), mb=0.2, gib=0.002, workers=1, seconds=0.1, tokenizer=str(words))
    report = data.run(options)
    assert [row["what"] for row in report["make"]] == ["texts", "conversations"]
    assert all(row["bytes"] >= 200_000 and row["tokens"] > 20_000 and 0.8 < row["utilisation"] <= 1 for row in report["make"])
    read = report["read"]
    assert read["batches"] >= 1 and 0.9 * 16 * data.SEQ_LEN < read["tokens"] / read["batches"] <= 16 * data.SEQ_LEN
    assert 2**20 < read["memory"] < 2**29 and read["bytes"] > 2_000_000
    assert list(tmp_path.iterdir()) == []
    text = data.text(report)
    assert "MB/s of CPU time" in text and "M tokens/s" in text
    report["make"] = [{"what": "texts", "core_rate": 4e6, "utilisation": 0.96}]
    report["read"] |= {"rate": 19e6, "memory": 2**29}
    assert data.wrong(report) == [
        "texts: 4.0 MB/s of CPU time, below 5",
        "texts: utilisation 96.0%, below 97%",
        "reading: 19.0 M tokens/s, below 20",
        "reading: 512 MiB, above 300",
    ]
