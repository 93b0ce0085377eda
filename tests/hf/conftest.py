"""Writable copies of the golden checkpoints, and a way to change what is in them."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parents[1] / "data"
INDEX = "model.safetensors.index.json"


class Copy:
    """A copy of a golden checkpoint folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.folder / INDEX).read_text())["weight_map"]

    def edit_index(self, **weight_map: str | None) -> None:
        """Sets entries of the weight map; None removes one."""
        index = json.loads((self.folder / INDEX).read_text())
        entries = (index["weight_map"] | weight_map).items()
        index["weight_map"] = {name: shard for name, shard in entries if shard is not None}
        (self.folder / INDEX).write_text(json.dumps(index))

    def edit(self, name: str, change) -> None:
        """Replaces a tensor by change(tensor), or removes it where that is None; the index stays as it is."""
        file = self.folder / self.weight_map.get(name, "model-00001-of-00002.safetensors")
        tensors = load_file(file)
        tensors[name] = change(tensors.get(name))
        save_file({key: value for key, value in tensors.items() if value is not None}, file)


@pytest.fixture
def copy_golden(tmp_path):
    def copy(name: str) -> Copy:
        folder = tmp_path / name
        folder.mkdir()
        for file in (*(DATA / name).glob("model*"), DATA / name / "config.json"):
            shutil.copy(file, folder)
        return Copy(folder)

    return copy
