"""Two processes of four devices do what one of eight does, continue each other's runs, and end together."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import k3jax
from k3jax.settings import apply_overrides, load_config
from k3jax.train import loop
from k3jax.train import step as training
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.data import ByteDataset

ROOT = Path(__file__).parents[1]

# A run in float64, whose every process sees to it that it reads its own rows of the batch and no others. Process 1 can
# be made to fail before the first step, while process 0 waits for it to look at the checkpoints.
CONFIG = """
import json, os, time
import jax
import jax.numpy as jnp
from k3jax.config import ModelConfig
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import step
from k3jax.train.checkpoint import Checkpoints
from k3jax.train.data import ByteDataset

jax.config.update("jax_enable_x64", True)
make_model, batch, discard_after = step.make_model, ByteDataset.batch, Checkpoints.discard_after
step.make_model = lambda config: make_model(config).clone(dtype=jnp.float64, param_dtype=jnp.float64)

def watched(self, step, rows):
    share = self.batch_size // jax.process_count()
    assert rows.tolist() == list(range(jax.process_index() * share, (jax.process_index() + 1) * share))
    return batch(self, step, rows)

def failing(self, step):
    if jax.process_index() == 1:
        FAILURE
    discard_after(self, step)

ByteDataset.batch, Checkpoints.discard_after = watched, failing
config = RunConfig(
    model=ModelConfig.from_hf(json.loads(r'''MODEL''')),
    data=DataConfig(paths=("TEXT",), seq_len=32, batch_size=8, held_out=0.2),
    train=TrainConfig(
        steps=12, learning_rate=1e-2, checkpoint_every=10, log_every=1, eval_windows=16, remat=False, qat=False
    ),
    mesh=MeshConfig(fsdp=2, expert=2, tensor=2),
    cpu_devices=8,
)
"""


class Launcher:
    """Runs of the configuration in one folder, with one cache of compiled programs."""

    def __init__(self, folder: Path, model):
        self.folder, self.model = folder, json.dumps(model.to_hf())
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "K3JAX_CACHE": str(folder / "cache")}
        text = folder / "text"
        text.mkdir()
        rng = np.random.default_rng(0)
        for i in range(10):
            (text / f"{i}.txt").write_text("".join(rng.choice(["alpha ", "beta ", "gamma\n", "delta "], size=200)))

    def file(self, failure: str = "pass") -> Path:
        path = self.folder / "config.py"
        text = CONFIG.replace("TEXT", str(self.folder / "text")).replace("MODEL", self.model)
        path.write_text(text.replace("FAILURE", failure))
        return path

    @contextlib.contextmanager
    def config(self, name, *overrides):
        """The configuration of a run in this process."""
        with pytest.MonkeyPatch.context() as patch:
            for place, key in ((training, "make_model"), (ByteDataset, "batch"), (Checkpoints, "discard_after")):
                patch.setattr(place, key, getattr(place, key))  # the file sets them: put back afterwards
            yield apply_overrides(load_config(self.file()), [f"out={self.folder / name}", *overrides])

    def local(self, name, *overrides, failure="pass") -> subprocess.CompletedProcess:
        """A run of two processes."""
        return self.run([sys.executable, ROOT / "launch" / "local.py", 2], name, *overrides, failure=failure)

    def run(self, command, name, *overrides, failure="pass", **env) -> subprocess.CompletedProcess:
        command = [*map(str, command), f"--config={self.file(failure)}", f"--out={self.folder / name}", *overrides]
        env = self.env | env
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300)

    def state(self, name, step):
        """Leaves of a checkpoint, by name."""
        with self.config(name) as config:
            mesh = k3jax.make_mesh(**asdict(config.mesh))
            with jax.set_mesh(mesh):
                abstract, _ = training.abstract_state(config, mesh)
                state, _ = Checkpoints(self.folder / name / "checkpoints").restore(step, abstract)
        return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}

    def checkpoint(self, name, step) -> str:
        return str(self.folder / name / "checkpoints" / str(step))


def difference(found, expected):
    """(largest difference relative to its leaf's largest value, that leaf)."""
    assert found.keys() == expected.keys()
    worst = (0.0, "")
    for name, b in expected.items():
        assert b.dtype in (np.float64, np.int32) and np.isfinite(b).all()
        scale = np.max(np.abs(b)) or 1.0
        worst = max(worst, (float(np.max(np.abs(found[name] - b)) / scale), name))
    return worst


@pytest.fixture(scope="module")
def launcher(tmp_path_factory, tiny):
    return Launcher(tmp_path_factory.mktemp("processes"), tiny)


@pytest.fixture(scope="module")
def runs(launcher):
    """Twelve steps by this one process of eight devices, and by two of four; what the two said."""
    with launcher.config("one") as config:
        loop.train(config)
    two = launcher.local("two")
    assert (two.returncode, two.stdout) == (0, ""), two.stderr[-2000:]
    return two.stderr


def test_two_processes_equal_one(launcher, runs):
    for step in (10, 12):
        worst, leaf = difference(launcher.state("two", step), launcher.state("one", step))
        print(f"step {step}: {worst:.1e} {leaf}")
        assert worst <= 1e-12, leaf
    one, two = (json.loads((launcher.folder / name / "result.json").read_text()) for name in ("one", "two"))
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=1e-12)
    assert (two["eval_bytes"], two["bigram_loss"]) == (one["eval_bytes"], one["bigram_loss"])


def test_process_0_writes_the_log(launcher, runs):
    lines = (launcher.folder / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    shown = [line.split(",")[0] for line in runs.splitlines() if line.startswith("step ")]
    assert shown[0] == "step 1/12" and shown[-1] == "step 12/12" and len(set(shown)) == len(shown)
    left = sorted(path.name for path in (launcher.folder / "two").iterdir())
    assert left == ["checkpoints", "metrics.jsonl", "result.json", "training.png"]
    assert sorted(path.name for path in (launcher.folder / "two" / "checkpoints").iterdir()) == ["10", "12"]


def test_one_process_with_one_device_continues_two(launcher, runs):
    one_device = ("mesh.fsdp=1", "mesh.expert=1", "mesh.tensor=1", "cpu_devices=0")
    with launcher.config("alone", f"resume={launcher.checkpoint('two', 10)}", *one_device) as config:
        loop.train(config)
    worst, leaf = difference(launcher.state("alone", 12), launcher.state("one", 12))
    assert worst <= 1e-12, leaf


def test_two_processes_of_slurm_continue_one(launcher, runs, tmp_path):
    """launch/slurm.sh with a stand-in for SLURM: two tasks of one node, whose places JAX finds in the environment."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "_env.sh").write_text(f"venv={tmp_path}\n")
    scripts = {
        "python": f'exec {sys.executable} "$@"',
        "srun": """
            [[ $1 == --kill-on-bad-exit=1 ]] && shift
            for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done
            wait -n && wait -n""",
    }
    (tmp_path / "bin").mkdir()
    for name, text in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": str(tmp_path), "JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "2"}
    env = {f"SLURM_{key}": value for key, value in slurm.items()}
    env |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JAX_NUM_CPU_DEVICES": "4"}
    settings = (f"--resume={launcher.checkpoint('one', 10)}", "cpu_devices=0")
    run = launcher.run(["bash", ROOT / "launch" / "slurm.sh"], "slurm", *settings, **env)
    assert run.returncode == 0, run.stderr[-2000:]
    worst, leaf = difference(launcher.state("slurm", 12), launcher.state("one", 12))
    assert worst <= 1e-12, leaf


@pytest.mark.parametrize(
    "failure, code, message",
    [
        ("raise ValueError('the text is damaged')", 2, "error: process 1: the text is damaged"),
        ("os.kill(os.getpid(), 9)", 137, "error: process 1 was ended by signal 9 (Killed)"),
    ],
    ids=["error", "killed"],
)
def test_the_failure_of_one_ends_all_with_its_message(launcher, tmp_path, failure, code, message):
    failing = f"time.sleep(1); open({str(tmp_path / 'when')!r}, 'w').write(str(time.time())); {failure}"
    run = launcher.local(f"failed-{code}", failure=failing)
    seconds = time.time() - float((tmp_path / "when").read_text())
    assert run.returncode == code and run.stderr == f"{message}\n", run.stderr[-2000:]
    assert seconds < 10


LINES = {
    "train.learning_rate=0.002": "train.learning_rate: 0.01 in process 0, 0.002 in process 1; all processes need the same settings",
    "data.batch_size=16 model.moe_renormalize=False": (
        "model.moe_renormalize: True in process 0, False in process 1 (and 1 more); all processes need the same settings"
    ),
    "data.batch_size=3": "data.batch_size=3: must be a multiple of mesh.data*mesh.fsdp*mesh.expert*train.grad_accum=4",
    "resume=nowhere": "resume: None in process 0, nowhere in process 1; all processes need the same settings",
}


@pytest.mark.parametrize("override", LINES)
def test_what_only_one_process_was_given_is_told_by_both(launcher, override):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    both = []
    for index in (0, 1):
        command = [sys.executable, "-m", "k3jax", "train", f"--config={launcher.file()}", f"--out={launcher.folder}/unlike"]
        command += [f"processes.{key}" for key in (f"coordinator=localhost:{port}", "count=2", f"index={index}")]
        command += override.split() if index else []
        both.append(subprocess.Popen(command, env=launcher.env, stderr=subprocess.PIPE, text=True, cwd=launcher.folder))
    said = [process.communicate(timeout=100)[1] for process in both]
    line, whose = LINES[override], "process 1: " if "must be" in LINES[override] else ""
    assert said == [f"error: {whose}{line}\n", f"error: {line}\n"]
    assert [process.returncode for process in both] == [2, 2]
    assert time.monotonic() - started < 60  # of which most is Python's and JAX's start
    assert not (launcher.folder / "unlike").exists()


def test_a_mistake_of_all_is_told_once(launcher):
    run = launcher.local("mistaken", "data.batch_size=3")
    assert run.returncode == 2
    assert run.stderr == "error: data.batch_size=3: must be a multiple of mesh.data*mesh.fsdp*mesh.expert*train.grad_accum=4\n"


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("count=0", "processes.count=0: must be at least 1"),
        ("count=2", "processes.coordinator=: must be host:port of process 0 (such as localhost:1234), or auto"),
        ("count=2 coordinator=localhost", "processes.coordinator=localhost: must be host:port of"),
        ("count=2 coordinator=:80", "processes.coordinator=:80: must be host:port of"),
        ("count=2 coordinator=a:65536", "processes.coordinator=a:65536: must be host:port of"),
        ("count=2 index=2 coordinator=a:80", "processes.index=2: must be 0 or more and below processes.count=2"),
        ("count=3 coordinator=a:80", "cpu_devices=8: must be a multiple of processes.count=3"),
        ("count=2 coordinator=auto", "processes.count=2: must be left to processes.coordinator=auto"),
        ("coordinator=auto", "cpu_devices=8: must be 0 with processes.coordinator=auto"),
    ],
)
def test_bad_settings_are_named(overrides, message):
    config = load_config(ROOT / "configs" / "quickstart.py")
    with pytest.raises(ValueError) as error:
        apply_overrides(config, [f"processes.{override}" for override in overrides.split()]).validate()
    assert str(error.value).startswith(message)


def test_processes_that_do_not_meet(launcher):
    run = launcher.run([sys.executable, "-m", "k3jax", "train"], "lost", "processes.coordinator=auto", "cpu_devices=0")
    assert run.returncode == 2
    assert run.stderr.startswith("error: processes.coordinator=auto: no cluster that JAX knows (")
    assert run.stderr.count("\n") == 1


def test_scripts_are_well_formed():
    for script in (ROOT / "launch").glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    service, job = yaml.safe_load_all((ROOT / "launch" / "gke.yaml").read_text())
    spec = job["spec"]
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (spec["completionMode"], spec["backoffLimit"], spec["completions"]) == ("Indexed", 0, spec["parallelism"])
    (container,) = spec["template"]["spec"]["containers"]
    hosts, chips = spec["parallelism"], container["resources"]["limits"]["google.com/tpu"]
    overrides = container["command"][4:]
    assert overrides[-1] == "processes.coordinator=auto" and f"mesh.fsdp={hosts * chips}" in overrides
    topology = spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert np.prod([int(size) for size in topology.split("x")]) == hosts * chips
