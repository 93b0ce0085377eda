"""Statistics of single tensors, against values worked out by hand."""

import ml_dtypes
import numpy as np
import pytest

from k3jax.hf import CheckpointError, pieces
from k3jax.hf.files import Checkpoint
from k3jax.hf.statistics import tensor_report

NORM = "language_model.model.norm.weight"
EXPERT = "language_model.model.layers.5.block_sparse_moe.experts.3.w1.weight_"  # [64, 16] bytes, [64, 1] scales


def test_moments(copy_golden, monkeypatch):
    copy = copy_golden("k3_tiny")
    monkeypatch.setattr(pieces, "PIECE_BYTES", 32)  # of 128 bytes
    values = np.array([-3, 0, 0, 5, np.inf, np.nan] + [1] * 58, ml_dtypes.bfloat16)
    copy.edit(NORM, lambda _: values)
    # of the 62 finite ones: sum 60, squares 9 + 25 + 58 = 92
    assert tensor_report(copy.folder, NORM).splitlines() == [
        f"tensor      {NORM}",
        "stored      BF16 [64] in model-00002-of-00002.safetensors, 128 bytes",
        "range       -3 to 5",
        f"mean        {60 / 62:.6g}, standard deviation {np.sqrt(92 / 62 - (60 / 62) ** 2):.6g}",
        "zeros       2 of 64, not finite 2",
    ]


@pytest.mark.parametrize("part", ["packed", "scale"])
def test_codes_and_scales(copy_golden, part):
    copy = copy_golden("k3_tiny")
    codes = np.full((64, 16), 0xF2, np.uint8)  # 1 and -6
    codes[0] = 0x80  # 0 and -0
    scales = np.array([0, 255] + [130] * 62, np.uint8)[:, None]
    copy.edit(f"{EXPERT}packed", lambda _: codes)
    copy.edit(f"{EXPERT}scale", lambda _: scales)
    lines = tensor_report(copy.folder, EXPERT + part).splitlines()
    assert lines[0] == f"tensor      {EXPERT}packed"
    assert lines[2] == "values      2,048 of E2M1, 50.0% with a minus sign"
    counts = dict(line.split()[:2] for line in lines[3:11])
    assert counts == {"0": "32", "0.5": "0", "1": "1,008", "1.5": "0", "2": "0", "3": "0", "4": "0", "6": "1,008"}
    assert lines[13] == "scales      64 of E8M0"
    assert [line.split()[:3] for line in lines[14:]] == [
        ["2^-127", "1", "1.6%"],
        ["2^3", "62", "96.9%"],
        ["NaN", "1", "1.6%"],
    ]
    assert lines[15].endswith("#" * 40)


def test_nothing_else_is_read(copy_golden, monkeypatch):
    copy = copy_golden("k3_tiny")
    read, original = set(), Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, spans, out: original(self, [read.add(s[0]) or s for s in spans], out)
    )
    tensor_report(copy.folder, f"{EXPERT}packed")
    assert read == {f"{EXPERT}packed", f"{EXPERT}scale"}


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("lm_head.bias", lambda copy: None, "lm_head.bias: no such tensor"),
        (
            NORM,
            lambda copy: (copy.folder / "model-00002-of-00002.safetensors").write_bytes(b""),
            "the shard is cut short",
        ),
        (
            NORM,
            lambda copy: copy.edit(NORM, lambda a: a.astype(np.float64)),
            rf"{NORM}: found F64 \[64\], must be one of",
        ),
    ],
)
def test_what_cannot_be_told(copy_golden, name, change, message):
    copy = copy_golden("k3_tiny")
    change(copy)
    with pytest.raises(CheckpointError, match=message):
        tensor_report(copy.folder, name)
