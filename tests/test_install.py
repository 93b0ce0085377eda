"""The wheel, built and installed in a folder of its own: every command works from an empty folder, without the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Runs commands one after the other in one process, and says what each ended with.
COMMANDS = """
import shlex, sys
from pathlib import Path
import k3jax
from k3jax.cli import main
assert Path(k3jax.__file__).is_relative_to(sys.argv[1]), k3jax.__file__
for line in sys.argv[2:]:
    print("\\n$", line, flush=True)
    print("\\n=", main(shlex.split(line)), flush=True)
"""

TINY = """
from k3jax.config import ModelConfig
from k3jax.run_config import *

config = RunConfig(
    model={model!r},
    data=DataConfig(paths=("text",), seq_len=32, batch_size=2),
    train=TrainConfig(steps=2, eval_windows=1),
    out="run",
    cpu_devices=2,
)
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", "77", reason="requirements.txt names it")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("k3jax", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", built, source)
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", target, wheel)
    return target


@pytest.fixture
def commands(installed, tmp_path):
    """Runs command lines in an empty folder; [(line, exit code, output)]."""

    def run_all(*lines):
        # What pytest put on the path is the checkout.
        environment = os.environ | {"PYTHONPATH": str(installed), "K3JAX_CACHE": str(tmp_path / "cache")}
        script = [sys.executable, "-c", COMMANDS, str(installed), *lines]
        out = run(*script, cwd=tmp_path, env=environment)
        parts = [part.partition("\n") for part in out.split("\n$ ")[1:]]
        return [(line, int(rest.rpartition("= ")[2]), rest) for line, _, rest in parts]

    return run_all


def test_the_wheel_holds_what_the_program_finds_by_name(wheel):
    with zipfile.ZipFile(wheel) as opened:
        held = {name: opened.read(name) for name in opened.namelist() if name.startswith("k3jax/configs/")}
        entry = next(name for name in opened.namelist() if name.endswith("entry_points.txt"))
        assert "k3jax = k3jax.__main__:command" in opened.read(entry).decode()
    files = (ROOT / "configs").rglob("*.py")
    assert held == {f"k3jax/configs/{file.relative_to(ROOT / 'configs')}": file.read_bytes() for file in files}


def test_the_command_passes_its_exit_code_on(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    done = subprocess.run([installed / "bin" / "k3jax", "plan", "--mesh", "zero"], **options)
    assert done.returncode == 2 and done.stderr.startswith("error: strategy=zero: must be one of cp, dp, ep, ")
    assert not any(tmp_path.iterdir())
    done = subprocess.run([installed / "bin" / "k3jax", "plan", "--mesh", "fsdp=32,expert=32"], **options)
    assert done.returncode == 0 and "1024 v5p: fsdp=32 expert=32" in done.stdout


def test_plan_in_every_form(commands):
    presets = ("long-context", "fine-tune", "kimi-linear", "four-bits")
    lines = (
        "plan --mesh ep_tp --workload decode --batch 64 --hardware tpu7x --devices 64",
        "plan --search --devices 64 --batch 64 --workload decode --hardware tpu7x --report plan.html",
        *(f"plan --preset {preset}" for preset in presets),
    )
    for line, code, out in commands(*lines):
        assert code == 0, (line, out)


def test_each_command_from_an_empty_folder(commands, tiny, tmp_path):
    (tmp_path / "tiny.py").write_text(TINY.format(model=tiny))
    (tmp_path / "text").mkdir()
    for i in range(4):
        (tmp_path / "text" / f"{i}.txt").write_text("One day the sun rose, and then it set. " * 20)
    bench = "--repeats 1 --long-tokens 0 --decode-batch 0"
    lines = (
        "train --config tiny.py strategy=ep_tp",
        "generate run --prompt One --max-tokens 2",
        "convert export run released",
        "convert import released imported",
        "convert synthesize released/config.json made",
        "inspect run",
        "inspect released",
        f"bench kda --tokens 64 --heads 1 --key-dim 16 --value-dim 16 {bench} --out kda.json",
    )
    for line, code, out in commands(*lines):
        assert code == 0, (line, out)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tiny.py", "text", "cache", "run", "released", "imported", "made", "kda.json"
    }  # fmt: skip


SMALL = (
    "model.num_hidden_layers=2 model.kda_layers=1 model.full_attn_layers=2 model.attn_res_block_size=2 "
    "model.hidden_size=64 model.intermediate_size=64 data.seq_len=32"
)


@pytest.mark.slow
def test_measurements_with_their_own_configurations(commands):
    lines = (
        f"bench strategies --strategies ep_tp --steps 1 cpu_devices=8 {SMALL}",
        f"bench step --repeats 1 --decode-batch 1 {SMALL}",
    )
    for line, code, out in commands(*lines):
        assert code == 0, (line, out)
