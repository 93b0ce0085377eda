"""A prediction beside the compiler's figures; the compiler itself is tested in test_aot.py."""

import json

import pytest

from k3jax import cli
from k3jax.plan import compare
from k3jax.plan.analytic import predict
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.setting import Serve, Strategy, Train
from k3jax.run_config import MeshConfig

FITS = {
    "fits": True,
    "seconds": {"lowering": 1.0, "compiling": 62.4},
    "peak_rss_bytes": 3 * 2**30,
    "memory": {"arguments": 2e9, "temporaries": 1e9, "total": 3e9},
    "collectives": [
        {"kind": "all-gather", "axes": "fsdp", "times": 3, "sent_bytes": 10**9},
        {"kind": "all-gather", "axes": "expert", "times": 3, "sent_bytes": 10**9},
        {"kind": "collective-permute", "axes": "fsdp", "times": 1, "sent_bytes": 10**6},
    ],
    "accessed_bytes": {"bytes": 9e9, "hbm": 8e9},
}
TOO_LARGE = {"fits": False, "needed_bytes": 5e9, "available_bytes": 4e9, "message": "does not fit: needed 5.0 of 4.0 GB a device"}


@pytest.fixture
def asked(monkeypatch):
    """The programs that were to be compiled; `asked.answers` are taken one after the other."""

    class Asked(list):
        answers: list = []

    programs = Asked()

    def check(program, timeout, shrink, say):
        programs.append((program, timeout))
        return programs.answers.pop(0)

    monkeypatch.setattr(compare, "check", check)
    return programs


def test_figures_side_by_side(tiny, asked):
    asked.answers = [FITS]
    p = predict(tiny, Train(batch=8, sequence=16), Strategy(MeshConfig(fsdp=2, expert=2)), HARDWARE["v5e"])
    text, rows = compare.compared(tiny, p, "v5e:2x2", 60)
    assert "compiled for v5e:2x2 in 62 s and 3.0 GiB: 3.0 GB a device" in text
    by_name = {row["strategy"].partition(": ")[2]: row for row in rows}
    assert by_name["sent by all-gather"]["compiler GB"] == "2.000"  # over both axes together
    assert by_name["sent by collective-permute"]["predicted GB"] == "0.000"
    assert by_name["moved in memory"]["compiler GB"] == "8.000"
    off = 100 * (sum(p.arguments.values()) / 2e9 - 1)
    assert by_name["arguments"]["difference"] == f"{off:+.1f} %"
    (program, timeout), = asked
    assert (program.phase, program.batch, program.length, program.mesh) == ("train", 8, 16, p.strategy.mesh) and timeout == 60
    assert not program.quick


def test_what_does_not_fit_says_what_would(tiny, asked):
    asked.answers = [TOO_LARGE | {"fits_with": "grad_accum=2"}]
    workload = Serve(phase="prefill", batch=8, context=64, piece=16, experts="dequantized")
    p = predict(tiny, workload, Strategy(MeshConfig(expert=2)), HARDWARE["v5e"])
    text, rows = compare.compared(tiny, p, "v5e:2x2", 60)
    assert text.endswith("v5e:2x2: does not fit: needed 5.0 of 4.0 GB a device; grad_accum=2 would fit")
    assert [row["compiler GB"] for row in rows] == ["5.000"]
    ((program, _),) = asked
    assert (program.phase, program.length, program.piece, program.experts) == ("prefill", 64, 16, "dequantized")


def test_the_command_compiles_the_first_of_a_search(asked, tmp_path, capsys):
    asked.answers = [FITS, TOO_LARGE]
    out = tmp_path / "plan.json"
    line = "plan --search --config configs/midsize.py --hardware v5e --devices 4 --batch 16 --sequence 512"
    assert cli.main([*line.split(), "--aot", "v5e:2x2", "--aot-top", "2", "--aot-quick", "--json", str(out)]) == 0
    assert len({str(program.mesh) + str(program.remat) + str(program.grad_accum) for program, _ in asked}) == 2
    assert all(program.quick for program, _ in asked)
    printed = capsys.readouterr().out
    assert "compiled for v5e:2x2 in 62 s" in printed and "does not fit: needed 5.0" in printed
    (answer,) = json.loads(out.read_text())["answers"]
    assert answer["compared"][0]["compiler GB"] == "2.000" and answer["compared"][-1]["compiler GB"] == "5.000"


def test_a_preset_is_not_compiled(capsys):
    assert cli.main(["plan", "--preset", "four-bits", "--aot", "v5p:2x2x1"]) == 2
    assert "--aot v5p:2x2x1: must be left out with --preset" in capsys.readouterr().err
