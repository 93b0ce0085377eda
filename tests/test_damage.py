"""Every file of a run, an import and an export damaged in every way, then read by every command: one line, or right."""

import functools
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax import cli
from k3jax.lock import LOCK
from k3jax.run_config import DataConfig, RunConfig, TrainConfig
from k3jax.serve import generate
from k3jax.train import loop
from k3jax.train import step as training

DAMAGES = {
    "emptied": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "brace": lambda file: file.write_text("{"),
    "list": lambda file: file.write_text("[1,2]"),
    "bytes": lambda file: file.write_bytes(b"\xff\xfe\x80abc\n\xc3("),
    "removed": lambda file: file.unlink(),
    "folder": lambda file: (file.unlink(), file.mkdir()),
}
# What Orbax had begun to read when something failed; commands do not show it, and pytest has filters of its own.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine '_read_array_index_and_device_put' was never awaited:RuntimeWarning")
TIMES = ("_CHECKPOINT_METADATA", "commit_success.txt", "identity", LOCK)  # when, and from which files, it was made


@functools.cache
def _states():
    return {}


def once(function, *arguments):
    """What a function gives that is traced, and always gives the same here."""
    if function.__name__ not in _states():
        _states()[function.__name__] = function(*arguments)
    return _states()[function.__name__]


class Started(Exception):
    """Training has everything it reads."""


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A run with two checkpoints, its export, and an import of that, made by the commands; the file of its configuration."""
    root = tmp_path_factory.mktemp("whole")
    (root / "text").mkdir()
    for i in range(5):
        (root / "text" / f"{i}.txt").write_text("".join(np.random.default_rng(i).choice(["alpha ", "beta\n"], size=50)))
    config = RunConfig(
        model=tiny,
        data=DataConfig(paths=(str(root / "text"),), seq_len=16, batch_size=1, held_out=0.2),
        train=TrainConfig(steps=2, checkpoint_every=1, eval_windows=1, remat=False, log_every=1),
        out=str(root / "run"),
    )
    text = f"from k3jax.config import *\nfrom k3jax.run_config import *\nconfig = {config!r}\n"
    (root / "config.py").write_text(text)
    kept = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K3JAX_CACHE", str(root / "cache"))
        loop.train(config)
        for line in (f"export {root}/run {root}/export", f"import {root}/export {root}/import"):
            assert cli.main(["convert", *line.split()]) == 0
        yield root
    jax.config.update("jax_compilation_cache_dir", kept[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", kept[1])


def commands(kind, root, folder, out):
    """Every command that reads a folder of the kind, by name."""
    found = {
        "generate": ["generate", folder, "--prompt", "a", "--max-tokens", "1"],
        "inspect": ["inspect", folder],
    }
    if kind == "export":
        return found | {"import": ["convert", "import", folder, out]}
    train = ["train", f"--config={root}/config.py", "train.steps=9", "resume_with=schedule", f"resume={folder}"]
    found |= {"export": ["convert", "export", folder, out], "resume": [*train, f"out={out}"]}
    return found | ({"in place": [*train, f"out={folder}"]} if kind == "run" else {})


@pytest.fixture
def outcome(monkeypatch, capsys):
    """What a command says when it fails, or else everything it has read; nothing is compiled for long."""
    read = []

    def stop(*_):
        raise Started

    first_state = loop._first_state
    for name in ("init_state", "abstract_state"):
        monkeypatch.setattr(training, name, partial(once, getattr(training, name)))
    monkeypatch.setattr(loop, "_first_state", lambda *arguments: read.append(found := first_state(*arguments)) or found)
    monkeypatch.setattr(training, "make_train_step", stop)
    monkeypatch.setattr(generate, "generate_tokens", lambda model, variables, *_: read.append(variables) or iter(()))

    def run(argv, out: Path, folder: Path):
        read.clear()
        capsys.readouterr()
        try:
            code = cli.main(list(map(str, argv)))
        except Started:
            code = 0
        said = capsys.readouterr()
        if code:
            assert code == 2 and said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
            return said.err.rstrip("\n")
        assert said.err == ""
        leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves([tree[0] if isinstance(tree, tuple) else tree for tree in read])]
        written = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.name not in TIMES and path.is_file()}
        return said.out.replace(str(folder), "FOLDER"), leaves, written

    return run


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def small_files(kind):
    """Of many files of one sort, one: patterns of what a folder holds."""
    if kind == "export":
        return ["config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors"]
    step = ["_CHECKPOINT_METADATA", "commit_success.txt", "state/_METADATA", "state/_sharding", "state/array_metadatas/process_0"]
    if kind == "import":
        step += ["identity", "state/params.embed_tokens/zarr.json", "state/params.embed_tokens/c/0/0"]
        return [f"checkpoints/0/{name}" for name in step]
    step += ["state/manifest.ocdbt", "state/d/*", "state/ocdbt.process_0/d/*", "state/ocdbt.process_0/manifest.ocdbt"]
    return [f"checkpoints/2/{name}" for name in step] + ["metrics.jsonl", "result.json", "training.png"]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize(
    "kind, pattern", [(kind, pattern) for kind in ("run", "import", "export") for pattern in small_files(kind)]
)
def test_damage_is_named_or_does_not_matter(made, outcome, tmp_path, kind, pattern, every):
    """`every` command after each damage, or another one after each."""
    folder, out = tmp_path / "damaged", tmp_path / "out"
    whole = [made / kind, *([made / "run" / "checkpoints" / "1"] if kind == "run" else [])]
    if not (matches := sorted((made / kind).glob(pattern))):
        pytest.skip("this version of Orbax writes no such file")
    file = folder / matches[0].relative_to(made / kind)

    def right(name):
        """What the commands give for the undamaged folder, and for its older checkpoint."""
        for source in whole:
            shutil.rmtree(out, ignore_errors=True)
            yield outcome(commands(kind, made, source, out)[name], out, made / kind)

    rights = {}
    number = small_files(kind).index(pattern)
    for turn, (damage, spoil) in enumerate(DAMAGES.items(), number):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made / kind, folder)
        spoil(file)
        before = contents(folder)
        names = list(reading := commands(kind, made, folder, out))
        if not every and kind != "export":
            names = names[-1:] if file.parent == folder else [names[turn % len(names)], names[-1]]
        for name in names:
            argv = reading[name]
            shutil.rmtree(out, ignore_errors=True)
            found = outcome(argv, out, folder)
            assert contents(folder) == before, (damage, name)
            if isinstance(found, str):
                named = [f"{file}: ", f"{file.name}: ", f"{folder}: "]  # or the step, of a mark and of what holds the values
                named += [f"{folder}/checkpoints/2: "] * any(part in pattern for part in ("ocdbt", "/d/", *TIMES))
                assert any(name in found for name in named), (damage, name, found)
                if kind == "run" and "checkpoints/2/" in found and "whole checkpoint" not in found:
                    assert f"an older checkpoint is whole: resume={folder}/checkpoints/1" in found
                assert len(found.replace(str(folder), "")) < 500
                assert name == "export" or not out.exists(), (damage, name)  # what an export has begun can be gone on with
            elif kind != "export" or name != "inspect":  # whose report says what is wrong
                rights[name] = rights.get(name) or list(right(name))
                assert found in rights[name], (damage, name)
