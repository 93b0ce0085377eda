"""What tests of checkpoints share."""

import pytest


@pytest.fixture
def files():
    """Content of every file of a checkpoint's folder but the ones with a time in them."""

    def read(folder):
        found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        times = "_CHECKPOINT_METADATA", "commit_success.txt"
        return {name: path.read_bytes() for name, path in found.items() if path.name not in times}

    return read
