"""Reports of runs' checkpoints and of imports."""

from pathlib import Path

import numpy as np
import pytest

import k3jax
from k3jax import cli
from k3jax.hf import inspect as released
from k3jax.hf import statistics
from k3jax.train import inspect
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.convert import import_checkpoint
from k3jax.train.loop import restore_weights

K3 = Path(__file__).parents[1] / "data" / "k3_tiny"
LEAF = "params.segment_3.layer_0.block_sparse_moe.experts.w1"
EXPERT = "language_model.model.layers.5.block_sparse_moe.experts.7.w1.weight_"


@pytest.fixture(scope="module")
def imports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imports")
    for experts in ("packed", "dequantized"):
        import_checkpoint(K3, folder / experts, experts=experts)
    return folder


def rows(text):
    lines = text.splitlines()
    return {line[:18].strip(): line[18:].split() for line in lines[6 : lines.index("", 6)]}


@pytest.mark.parametrize("experts", ["packed", "dequantized"])
def test_an_import_has_the_release_s_parameters(imports, monkeypatch, experts):
    expected = rows(released.report(K3).text)
    found = inspect.report(imports / experts).text
    assert [row[1] for row in rows(found).values()] == [row[1] for row in expected.values()]
    assert found.splitlines()[0] == f"checkpoint  {imports / experts}/checkpoints/0: imported weights"
    assert found.splitlines()[3].endswith("MXFP4, packed" if experts == "packed" else "as numbers")
    size = {"packed": ["24", "589,824", "313,344", "U8"], "dequantized": ["12", "589,824", "1,179,648", "BF16"]}
    assert rows(found)["routed experts"] == size[experts]
    assert found.endswith("problems    none")


def test_a_run_tells_its_other_arrays_and_what_is_wrong(imports, tmp_path, capsys):
    cfg, variables, _ = restore_weights(imports / "dequantized")
    params = variables["params"] | {"norm": np.zeros(3, np.float32)}
    del params["lm_head"]
    state = {"params": params, "router": variables["router"], "opt_state": {"mu": np.zeros((9, 9), np.float32)}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(7, state, {"kind": "run", "model": cfg.to_hf()})
    text = inspect.report(tmp_path).text
    assert "/checkpoints/7: step 7 of a run" in text
    assert rows(text)["optimizer, step"] == ["1", "0", "324", "F32"]
    assert (
        text.splitlines()[-1]
        == "problems    2 problems: params.lm_head: missing; expected [128, 64]; params.norm: found [3], expected [64]"
    )
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr() == (f"{text}\n", f"error: {tmp_path}: 2 problems, see the last line of the report\n")
    assert cli.main(["inspect", str(imports / "packed")]) == 0


def test_one_leaf_or_released_tensor(imports):
    by_name = inspect.tensor_report(imports / "packed", f"{EXPERT}packed").splitlines()
    assert by_name[1] == f"stored      uint8 [64, 16] in {LEAF}_packed"
    assert by_name[2:] == statistics.tensor_report(K3, f"{EXPERT}packed").splitlines()[2:11]
    whole = inspect.tensor_report(imports / "packed", f"{LEAF}_scale").splitlines()
    assert whole[2] == "scales      2,304 of E8M0"  # 3 layers, 12 experts, 64 rows
    values = np.asarray(k3jax.load_hf(K3)["params"]["segment_3"]["layer_0"]["block_sparse_moe"]["experts"]["w1"])
    moments = inspect.tensor_report(imports / "dequantized", LEAF).splitlines()
    assert moments[2] == f"range       {values.min():.6g} to {values.max():.6g}"
    assert (
        moments[3]
        == f"mean        {values.mean(dtype=np.float64):.6g}, standard deviation {values.std(dtype=np.float64):.6g}"
    )
    with pytest.raises(ValueError, match="no such leaf, nor a released tensor"):
        inspect.tensor_report(imports / "dequantized", f"{EXPERT}packed")
