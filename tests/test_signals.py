"""SIGINT and SIGTERM to a run: one ends it after a step with a checkpoint, two at once; resumed, it ends with the same bits."""

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from k3jax import signals
from k3jax.train.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]

# A run whose batches take a while, so that there is time to stop it; one of them can take for ever.
CONFIG = """
import os, time
from k3jax.config import ModelConfig
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train.data import ByteDataset

batch = ByteDataset.batch

def slow(self, step, rows=slice(None)):
    time.sleep(1000 if step == int(os.environ.get("STUCK", -1)) else float(os.environ.get("SECONDS", 0)))
    return batch(self, step, rows)

ByteDataset.batch = slow
config = RunConfig(
    model=ModelConfig.from_hf({model}),
    data=DataConfig(paths=({text!r},), seq_len=16, batch_size=2, held_out=0.2),
    train=TrainConfig(
        steps=30, learning_rate=1e-2, checkpoint_every=7, keep_checkpoints=1, log_every=5, eval_windows=2, remat=False, qat=False
    ),
    mesh=MeshConfig(fsdp=2),
    cpu_devices=2,
)
"""
# A shell that starts pytest in the background has it ignore SIGINT, and all that it starts.
LISTENING = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
LINE = "stopped by {} after step {} of 30, which is saved; the same command with resume=auto goes on"


class Place:
    """A folder for runs of the configuration, with one cache of compiled programs."""

    def __init__(self, folder, model):
        self.folder = folder
        (folder / "text").mkdir()
        rng = np.random.default_rng(0)
        for i in range(5):
            (folder / "text" / f"{i}.txt").write_text("".join(rng.choice(["alpha ", "beta ", "gamma\n"], size=100)))
        (folder / "config.py").write_text(CONFIG.format(model=model.to_hf(), text=str(folder / "text")))

    def start(self, name, *settings, processes=1, **env) -> subprocess.Popen:
        command = [sys.executable, "-m", "k3jax", "train"]
        if processes > 1:
            command = [sys.executable, str(ROOT / "launch" / "local.py"), str(processes)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "K3JAX_CACHE": str(self.folder / "cache"), "JAX_PLATFORMS": "cpu"} | env
        command += [f"--config={self.folder / 'config.py'}", f"--out={self.folder / name}", *settings]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", LISTENING, *command], env=env, cwd=self.folder, **pipes)

    def finish(self, name, *settings, **options) -> list[str]:
        """What a run says that ends by itself."""
        process = self.start(name, *settings, **options)
        said = process.communicate(timeout=500)[1]
        assert process.returncode == 0, said
        return said.splitlines()

    def steps(self, name):
        return Checkpoints(self.folder / name / "checkpoints").steps()

    def state(self, name):
        """All values of the newest checkpoint, which is whole."""
        checkpoints = Checkpoints(self.folder / name / "checkpoints")
        step = checkpoints.latest()
        found = checkpoints.pieced(step)
        return step, {key: [array.read(box).tobytes() for box in array.boxes()] for key, array in found.items()}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny):
    least = dataclasses.replace(tiny, num_hidden_layers=1, kda_layers=(), full_attn_layers=(1,))
    return Place(tmp_path_factory.mktemp("signals"), least)


@pytest.fixture(scope="module")
def whole(place):
    """The end of a run that nothing disturbs, of one process and of two."""
    ends = {}

    def end(processes):
        if processes not in ends:
            place.finish(f"whole-{processes}", processes=processes)
            ends[processes] = place.state(f"whole-{processes}")
        return ends[processes]

    return end


def until(process, begins) -> list[str]:
    """Lines on stderr up to the first that begins so."""
    said = []
    for line in process.stderr:
        said.append(line.rstrip("\n"))
        if line.startswith(begins):
            return said
    raise AssertionError(said)


@pytest.mark.parametrize("to_the_end", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stopped", "to the end"])
def test_a_run_that_is_stopped_and_killed_ends_with_the_same_bits(place, whole, to_the_end):
    """One signal: the step is ended and saved. Two: it ends at once, and goes on from the checkpoint before."""
    shutil.rmtree(place.folder / "stopped", ignore_errors=True)
    first = place.start("stopped", "resume=auto", SECONDS="0.1")
    until(first, "step 1/30")
    time.sleep(random.uniform(0, 1))
    first.send_signal(signal.SIGTERM)
    *_, begun, last = first.communicate(timeout=60)[1].splitlines()
    assert first.returncode == 143
    (step,) = place.steps("stopped")
    assert 1 <= step < 30 and last == LINE.format("SIGTERM", step)
    assert begun == f"SIGTERM: stops after step {step}; once more ends at once"

    second = place.start("stopped", "resume=auto", SECONDS="0.1", STUCK=str(step + 3))
    until(second, f"step {step + 1}/30")
    time.sleep(1)
    second.send_signal(signal.SIGINT)
    until(second, f"SIGINT: stops after step {step + 4}; once more ends at once")
    second.send_signal(signal.SIGINT)
    started = time.monotonic()
    said = second.communicate(timeout=60)[1]
    assert second.returncode == 130 and time.monotonic() - started < 3
    assert said == "SIGINT again: ended at once; what was saved before is whole\n"

    if not to_the_end:
        return
    place.finish("stopped", "resume=auto")
    assert place.state("stopped") == whole(1)
    assert [json.loads(line)["step"] for line in (place.folder / "stopped" / "metrics.jsonl").read_text().splitlines()][-1] == 30

    (place.folder / "stopped" / "result.json").unlink()  # as of a run that was killed while it was evaluated
    place.finish("stopped", "resume=auto")
    again, once = (json.loads((place.folder / name / "result.json").read_text()) for name in ("stopped", "whole-1"))
    assert {key: again[key] for key in ("step", "held_out_loss", "train_loss")} == {
        key: once[key] for key in ("step", "held_out_loss", "train_loss")
    }


def caught(pid: int) -> int:
    """Bits of the signals that a process has handlers for."""
    return int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)


@pytest.mark.parametrize("number", signals.SIGNALS, ids=["SIGINT", "SIGTERM"])
def test_a_signal_before_the_first_step_ends_at_once(place, number):
    process = place.start("early", STUCK="0")
    while not caught(process.pid) >> (signal.SIGTERM - 1) & 1:
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(random.uniform(0, 4))
    process.send_signal(number)
    started = time.monotonic()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number and time.monotonic() - started < 5
    assert said.splitlines()[-1:] == [f"stopped by {signal.Signals(number).name} before the first step"] and "Traceback" not in said
    assert place.steps("early") == []


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both_after_one_step(place):
    with contextlib.ExitStack() as ended:
        pair = start_two(place, "both", ended, SECONDS="0.2")
        until(pair[0], "step 1/30")
        pair[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=100)[1].splitlines() for process in pair]
    assert [process.returncode for process in pair] == [143, 143]
    (step,) = place.steps("both")
    assert said[0][-2:] == [f"SIGTERM to process 1: stops after step {step}; once more ends at once", LINE.format("SIGTERM", step)]
    assert said[1][-2:] == [f"SIGTERM: stops after step {step}; once more ends at once", LINE.format("SIGTERM", step)]


@pytest.mark.slow
def test_a_last_save_that_fails_is_no_end(place):
    process = place.start("unsaved", "train.checkpoint_every=100", SECONDS="0.05")
    until(process, "step 1/30")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (5000, 5000))  # enough for the numbers of the steps
    *_, last = process.communicate(timeout=200)[1].splitlines()
    assert process.returncode == 2
    assert re.fullmatch(r"error: \S+/unsaved/checkpoints/30: could not be saved \(.*\); there is no earlier one", last)
    assert place.steps("unsaved") == [] and not (place.folder / "unsaved" / "result.json").exists()


def start_two(place, name, ended, *settings, of_one=(), **env):
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    shared = ["processes.count=2", f"processes.coordinator=localhost:{port}", *settings]
    pair = [place.start(name, *shared, f"processes.index={index}", **(env | dict(of_one if index else ()))) for index in (0, 1)]
    for process in pair:
        ended.callback(process.kill)
    return pair


# ---- the object itself -------------------------------------------------------------------------------------


def test_steps_go_up_to_the_one_that_all_have_begun():
    stop, made = signals.Stop(), []
    stop.agree = lambda begun: begun + 2
    for number, batch in stop.steps(iter("abcdefgh"), 10, 18):
        if number == 11:
            stop.starts(number)
        if number == 13:
            asking = threading.Thread(target=stop.ask, args=(signal.SIGTERM,))
            asking.start()
            asking.join(5)
        made.append((number, batch))
    assert made == list(zip(range(11, 16), "abcde", strict=True))
    assert str(stop.stopped(15, 18)).startswith("stopped by SIGTERM after step 15 of 18") and stop.stopped(15, 18).code == 143


def test_nobody_asked_means_all_steps():
    stop = signals.Stop()
    assert [number for number, _ in stop.steps(iter("abc"), 0, 3)] == [1, 2, 3]
    assert list(stop.steps(iter(""), 3, 3)) == []


# ---- many times over ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_signals_at_random_moments(place, whole, processes):
    name, stopped = f"twenty-{processes}", 0
    for turn in range(20):
        process = place.start(name, "resume=auto", f"train.checkpoint_every={random.randint(3, 9)}", processes=processes, SECONDS="0.1")
        until(process, "step ")
        time.sleep(random.uniform(0, 0.4))
        number = random.choice(signals.SIGNALS)
        process.send_signal(number)
        said = process.communicate(timeout=200)[1]
        found = place.steps(name)
        if process.returncode == 0:  # it was at its end
            break
        assert process.returncode == 128 + number, said
        assert re.search(re.escape(LINE.format(number.name, found[-1])), said), said
        stopped += 1
    place.finish(name, "resume=auto", processes=processes)
    assert stopped >= 5 and place.state(name) == whole(processes)


@pytest.mark.slow
def test_fifty_kills_with_one_checkpoint_kept(place, whole):
    had = -1
    for turn in range(50):
        process = place.start("killed", "resume=auto", "train.checkpoint_every=1", SECONDS="0.02")
        with contextlib.suppress(AssertionError):
            until(process, "step ")
        time.sleep(random.uniform(0, 0.5))
        process.kill()
        process.communicate()
        steps = place.steps("killed")
        assert not steps or place.state("killed")[0] == steps[-1] >= had
        had = steps[-1] if steps else had
        if had == 30:
            place.finish("killed", "resume=auto")
            assert place.state("killed") == whole(1)
            for path in (place.folder / "killed").iterdir():
                subprocess.run(["rm", "-rf", path], check=True)
            had = -1
    place.finish("killed", "resume=auto")
    assert place.state("killed") == whole(1)


@pytest.mark.slow
def test_twenty_full_disks(place, whole):
    """No file may become longer than so many bytes, from a random moment on: saves, numbers or the cache fail."""
    failed = 0
    for turn in range(20):
        process = place.start("full", "resume=auto", "train.checkpoint_every=3", SECONDS="0.1")
        if not any(line.startswith("step ") for line in process.stderr):  # only what follows the last step had failed
            assert process.wait(200) == 0
            break
        time.sleep(random.uniform(0, 1))
        limit = random.choice((0, 500, 5000, 50_000))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        said = process.communicate(timeout=200)[1]
        if process.returncode == 0:
            break
        failed += 1
        assert process.returncode == 2 and said.splitlines()[-1].startswith("error: "), said
        assert not place.steps("full") or place.state("full")
    place.finish("full", "resume=auto")
    assert failed and place.state("full") == whole(1)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_is_stopped_is_named(place, index):
    with contextlib.ExitStack() as ended:
        pair = start_two(place, f"sigstop-{index}", ended, "processes.timeout=20", SECONDS="0.2")
        until(pair[0], "step 1/30")
        pair[index].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        said = pair[1 - index].communicate(timeout=100)[1].splitlines()
        assert time.monotonic() - started < 60 and pair[1 - index].returncode == 75
        assert re.fullmatch(rf"error: process {index}: nothing heard of it for \d+ s; it is stopped, or its machine is", said[-1]), said


@pytest.mark.slow
def test_a_process_that_is_blocked_in_its_data_is_named_by_both(place):
    with contextlib.ExitStack() as ended:
        pair = start_two(place, "blocked", ended, "processes.timeout=20", of_one={"STUCK": "10"}, SECONDS="0.1")
        said = [process.communicate(timeout=200)[1].splitlines()[-1] for process in pair]
        assert [process.returncode for process in pair] == [75, 75]
        assert said[0] == said[1]
        assert re.fullmatch(r"error: process 1: waits for the data of step 11 for \d+ s \(processes.timeout=20\)", said[0])
