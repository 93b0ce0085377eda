"""The report of a checkpoint."""

import json
import subprocess
import sys

import numpy as np

from k3jax.hf import report
from k3jax.hf.files import Checkpoint
from k3jax.text import copy_tokenizer


def test_report_of_a_whole_checkpoint(copy_golden, monkeypatch):
    folder = copy_golden("k3_tiny").folder
    monkeypatch.setattr(Checkpoint, "read", None)  # headers are enough
    lines = report(folder).text.splitlines()
    assert lines[0] == f"checkpoint  {folder}: 2 shards"
    assert lines[1] == "family      kimi_k3, 1,027,234 text parameters, 576,482 active a token"
    assert lines[2] == "layers      9: (KDA dense) + 2 x (KDA) + (MLA) + 3 x (KDA) + 2 x (MLA)"
    assert lines[3] == "experts     3 of 12 routed, 2 shared; MXFP4, one scale for 32 values"
    rows = {line[:18].strip(): line[18:].split() for line in lines[6:18]}
    # 8 layers * 12 experts * 3 matrices of 64 * 32
    assert rows["routed experts"] == ["576", "589,824", "313,344", "U8"]
    assert rows["embeddings"] == ["2", "16,384", "32,768", "BF16"]  # 2 * 128 * 64
    assert rows["KDA"][-2:] == ["BF16,", "F32"]
    assert rows["all"] == ["828", "1,076,098", "1,296,800"]  # text and 48,864 of vision
    parts = [[int(cell.replace(",", "")) for cell in row[:3]] for name, row in rows.items() if name != "all"]
    assert [sum(column) for column in zip(*parts, strict=True)] == [828, 1_076_098, 1_296_800]
    assert lines[20] == "            32,768  mm_projector.proj.0.weight [128, 128]"
    assert lines[-1] == "problems    none"


def test_report_names_what_is_wrong(copy_golden):
    copy = copy_golden("kimi_linear_tiny")
    copy.edit("lm_head.weight", lambda a: a.astype(np.float64))
    copy.edit("extra", lambda _: np.zeros(7, bool))
    copy.edit_index(**{"extra": "model-00001-of-00002.safetensors", "model.norm.weight": "lost.safetensors"})
    lines = report(copy.folder).text.splitlines()
    rows = {line[:18].strip(): line[18:].split() for line in lines}
    assert rows["not of this model"] == ["1", "0", "7", "BOOL"]
    assert rows["embeddings"][2:] == ["81,920", "BF16,", "F64"]
    assert lines[-3].startswith("index       says total_size 2,580,888, the shards hold ")
    assert lines[-2].startswith("ignored     1 thing: model.norm.weight: in model-00002-of-00002.safetensors, but the index says lost")
    assert "experts     3 of 12 routed, 1 shared; not quantised" in lines
    assert lines[-1] == (
        "problems    3 problems: extra: not a tensor of this model; "
        "lm_head.weight: found F64 [128, 64], expected BF16 [128, 64]; "
        "lost.safetensors: the index names this shard, but there is no such file"
    )


def test_inspecting_imports_no_jax(copy_golden):
    folder = copy_golden("k3_tiny").folder
    code = f"import sys, k3jax.hf; print(k3jax.hf.report({str(folder)!r})); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "problems    none" in done.stdout, done.stderr


def test_single_shard_without_metadata(copy_golden):
    copy = copy_golden("kimi_linear_tiny")
    index = copy.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": copy.weight_map}))
    assert report(copy.folder).problems == {}


def test_a_tokenizer_that_is_not_the_models_is_a_problem(copy_golden, words):
    folder = copy_golden("k3_tiny").folder
    copy_tokenizer(words, folder)
    found = report(folder)
    wrong = f"{folder}: its tokenizer (tiktoken) has 2560 ids, must have at most the model's vocab_size=128"
    assert found.problems == {"tokenizer": wrong}
    assert found.text.splitlines()[-1] == f"problems    1 problem: tokenizer: {wrong}"
    (folder / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes()[:1001])
    assert report(folder).problems["tokenizer"].startswith(f"{folder}/tiktoken.model:")
