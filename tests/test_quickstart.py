"""The main job from end to end, in a process of its own, with three layers and a few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
    "model.num_hidden_layers=3",
    "model.kda_layers=1",
    "model.full_attn_layers=2,3",
    "model.attn_res_block_size=2",
    "data.seq_len=64",
    "train.steps=5",
    "train.checkpoint_every=3",
    "train.eval_windows=16",
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_quickstart(tmp_path, dtype):
    # Neither cache nor folder of the user's is touched, and the working directory is not the project's.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "K3JAX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, ROOT / "launch" / "quickstart.py", *SMALL, f"train.dtype={dtype}", f"--out={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["state_values_differing"] == 0
    assert summary["logits_differing"] == 0
    assert summary["step"] == 5
    assert summary["generated"].startswith("def ")
    assert 0 <= summary["waited"] < 1
    for name in ("waiting", "held-out", "byte bigram", "resumed", "packed export", "generation"):
        assert name in done.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "resumed" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] == 4 and steps[-1] == 5
    assert (tmp_path / "run" / "export" / "model.safetensors.index.json").is_file()
    assert any((tmp_path / "cache").iterdir())
