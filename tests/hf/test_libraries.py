"""Exports as other programs read them."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from k3jax.config import ModelConfig
from k3jax.hf import load_hf, save_hf
from k3jax.hf.files import open_checkpoint

EXPERT = "language_model.model.layers.5.block_sparse_moe.experts.{}.{}"


@pytest.fixture
def export(copy_golden, tmp_path):
    """An export of the small Kimi K3 whose experts were quantised from their values."""
    folder = copy_golden("k3_tiny").folder
    save_hf(tmp_path / "out", ModelConfig.from_hf(folder), load_hf(folder), max_shard_size=300_000)
    return tmp_path / "out"


def test_safetensors_reads_every_tensor(export):
    ours = open_checkpoint(export)
    seen = 0
    for shard in ours.shards:
        with safe_open(export / shard, "numpy") as file:
            for name in file.keys():
                seen += 1
                tensor = file.get_tensor(name)
                assert tensor.dtype == ours.tensor(name).dtype and tensor.tobytes() == ours.tensor(name).tobytes(), name
    assert seen == len(ours.headers) == 828


def test_compressed_tensors_gives_the_same_values(export):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    config = json.loads((export / "config.json").read_text())["text_config"]["quantization_config"]
    quantization = QuantizationConfig.model_validate(config)
    scheme = quantization.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    values = load_hf(export)["params"]["segment_3"]["layer_0"]["block_sparse_moe"]["experts"]  # layers 4, 5 and 6
    weight_map = open_checkpoint(export).weight_map
    for matrix in ("w1", "w2", "w3"):
        for e in range(12):
            name = f"{EXPERT.format(e, matrix)}.weight"
            tensors = load_file(export / weight_map[f"{name}_packed"])
            stored = {part: tensors[name.removesuffix("weight") + part] for part in ("weight_packed", "weight_scale")}
            found = compressor.decompress(stored, scheme)["weight"]
            assert found.dtype == torch.bfloat16
            found = found.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(found.astype(np.float32), np.asarray(values[matrix][1, e]))
