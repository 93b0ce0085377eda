"""Runs as a user starts them, on a tiny model: what they leave behind, how they stop, how they go on."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import k3jax
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import loop
from k3jax.train.checkpoint import Checkpoints
from k3jax.lock import LOCK, Locked, locked
from k3jax.train import folder
from k3jax.train.convert import export_checkpoint, import_checkpoint
from k3jax.train.step import abstract_state

@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for i in range(10):
        words = rng.choice(["alpha ", "beta ", "gamma\n", "delta "], size=200)
        (folder / f"{i}.txt").write_text("".join(words))
    return str(folder)


@pytest.fixture(scope="module")
def config(text, tiny):
    return RunConfig(
        model=tiny,
        data=DataConfig(paths=(text,), seq_len=32, batch_size=8, held_out=0.2),
        train=TrainConfig(
            steps=6, learning_rate=1e-2, checkpoint_every=4, log_every=1, eval_windows=16, remat=True
        ),
        mesh=MeshConfig(fsdp=2, expert=2),
    )


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "first"
    config = dataclasses.replace(config, out=str(out))
    return config, loop.train(config)


def final_state(config, folder, step=6):
    mesh = k3jax.make_mesh(**dataclasses.asdict(config.mesh))
    with jax.set_mesh(mesh):
        return jax.device_get(Checkpoints(folder).restore(step, abstract_state(config, mesh)[0])[0])


def test_run_leaves_numbers_plot_and_checkpoints(run):
    config, result = run
    lines = [json.loads(line) for line in (result.plot.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["expert_load"] >= 1
    assert result.plot.read_bytes().startswith(b"\x89PNG")
    assert Checkpoints(result.checkpoint.parent).steps() == [4, 6]
    assert 0 < result.held_out_loss < lines[0]["loss"] and 0 < result.bigram_loss < 3
    assert result.eval_bytes > 0


def test_resumed_run_ends_with_the_same_bits(run, tmp_path):
    config, result = run
    again = dataclasses.replace(config, out=str(tmp_path / "again"), resume=str(result.checkpoint.parent / "4"))
    resumed = loop.train(again)
    chex.assert_trees_all_equal(
        final_state(config, resumed.checkpoint.parent), final_state(config, result.checkpoint.parent)
    )
    assert resumed.held_out_loss == result.held_out_loss


def test_another_mesh_continues_a_run(run, tmp_path):
    config, result = run
    other = dataclasses.replace(
        config,
        out=str(tmp_path / "other"),
        resume=str(result.checkpoint.parent / "4"),
        mesh=MeshConfig(data=2, tensor=2),
    )
    resumed = loop.train(other)
    assert resumed.held_out_loss == pytest.approx(result.held_out_loss, rel=2e-3)


def test_export_and_import_round_trip(run, tmp_path):
    config, result = run
    export_checkpoint(result.checkpoint, tmp_path / "released")
    import_checkpoint(tmp_path / "released", tmp_path / "imported")
    import_checkpoint(tmp_path / "released", tmp_path / "packed", experts="packed")
    export_checkpoint(tmp_path / "imported", tmp_path / "again")
    files = sorted(path.name for path in (tmp_path / "released").iterdir())
    assert "model.safetensors.index.json" in files
    for name in files:
        assert (tmp_path / "released" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    tuned = dataclasses.replace(config, out=str(tmp_path / "tuned"), resume=str(tmp_path / "imported"))
    from_values = loop.train(tuned)
    assert from_values.train_loss < result.train_loss
    tuned = dataclasses.replace(tuned, out=str(tmp_path / "tuned too"), resume=str(tmp_path / "packed"))
    assert loop.train(tuned).train_loss == from_values.train_loss


def test_divergence_names_the_step_and_keeps_the_last_good_checkpoint(run, tmp_path):
    config, result = run
    train = dataclasses.replace(config.train, learning_rate=1e30, checkpoint_every=1, warmup_fraction=0.0)
    bad = dataclasses.replace(config, train=train, out=str(tmp_path / "bad"))
    with pytest.raises(loop.Diverged, match=r"step 2: \w+ is (nan|inf); training stopped, the last good checkpoint is 1"):
        loop.train(bad)
    assert Checkpoints(tmp_path / "bad" / "checkpoints").steps() == [1]


def test_a_batch_that_teaches_nothing_is_counted_and_warned_of_once(config, tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(512):  # documents that have no second byte fill half of the rows
        (folder / f"{i:04}.txt").write_text("x")
    for i in range(4):
        (folder / f"long {i}.txt").write_text("alpha beta " * 10)
    data = dataclasses.replace(config.data, paths=(str(folder),), held_out=0.5, batch_size=1)
    train = dataclasses.replace(config.train, steps=8, eval_windows=64, checkpoint_every=8)
    short = dataclasses.replace(config, data=data, train=train, out=str(tmp_path / "run"), mesh=MeshConfig())
    result = loop.train(short)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["step"] for line in lines if line.get("skipped")]
    assert 0 < len(skipped) < 8 and all(line["loss"] == 0 for line in lines if line["step"] in skipped)
    assert all(line["loss"] > 0 for line in lines if line["step"] not in skipped)
    assert np.isfinite(result.held_out_loss) and result.eval_bytes > 0
    shown = capsys.readouterr().err
    assert shown.count("no token to learn") == 1 and f"step {skipped[0]}: " in shown


@pytest.mark.parametrize(
    "texts, eval_windows, message",
    [
        ({}, 64, "data.paths: no token to learn"),
        ({"alpha.txt": "abc" * 50}, 64, "no held-out token has a predecessor"),  # it is trained on
        ({"alpha.txt": "abc" * 50, "zoo.txt": "abc" * 50}, 1, "no held-out token .* train.eval_windows=1 takes"),
    ],
)
def test_data_that_cannot_teach_is_refused_before_anything_is_done(config, tmp_path, texts, eval_windows, message):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in ({f"{i}.txt": "x" for i in range(99)} | texts).items():
        (folder / name).write_text(text)
    data = dataclasses.replace(config.data, paths=(str(folder),), held_out=0.5)
    train = dataclasses.replace(config.train, eval_windows=eval_windows)
    with pytest.raises(ValueError, match=message):
        loop.train(dataclasses.replace(config, data=data, train=train, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, r: dataclasses.replace(c, resume=None), "already holds a run; continue it with resume="),
        (lambda c, r: dataclasses.replace(c, resume=c.out), "train.steps=6: the checkpoint is already at step 6"),
        (
            lambda c, r: dataclasses.replace(c, resume=c.out, model=dataclasses.replace(c.model, num_experts_per_token=3)),
            "holds another model",
        ),
        (
            lambda c, r: dataclasses.replace(c, model=dataclasses.replace(c.model, vocab_size=128)),
            "model.vocab_size=128: must be at least 256",
        ),
        (
            lambda c, r: dataclasses.replace(
                c, mesh=MeshConfig(fsdp=16), data=dataclasses.replace(c.data, seq_len=32, batch_size=16)
            ),
            "needs 16 devices; there are 8",
        ),
    ],
)
def test_mistakes_are_named(run, change, message):
    config, result = run
    with pytest.raises(ValueError, match=message):
        loop.train(change(config, result))


# ---- whose folder it is ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("imported")
    export_checkpoint(run[1].checkpoint, path / "released")
    import_checkpoint(path / "released", path / "import")
    return path / "import"


def everything(*folders):
    return {path: path.read_bytes() if path.is_file() else None for folder in folders for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "resume, out, says",
    [
        ("run/checkpoints/4", "other", "out=OUT: holds a run or an import that is not the run resumed, resume=RESUME; name a new"),
        ("run", "other", "out=OUT: holds a run or an import that is not the run resumed"),
        ("run", "import", "out=OUT: holds a run or an import that is not the run resumed"),
        ("import", "other", "out=OUT: holds a run or an import that is not the run resumed"),
        ("import", "import", "out=OUT: holds the import that the run starts from; name a new or empty folder"),
        (None, "import", "out=OUT: already holds a run; continue it with resume=OUT, or name another folder"),
        (None, "other", "out=OUT: already holds a run; continue it with resume=OUT, or name another folder"),
        ("run", "notes", "out=OUT: holds a.txt and 1 more, which is not of a run; name a new or empty folder"),
        (None, "notes", "out=OUT: holds a.txt and 1 more, which is not of a run; name a new or empty folder"),
        ("run", "left", "out=OUT: holds what is left of a run without a whole checkpoint; remove it, or name a new"),
        (None, "left", "out=OUT: holds what is left of a run without a whole checkpoint; remove it, or name a new"),
    ],
)
def test_another_folder_is_refused_untouched(run, imported, tmp_path, resume, out, says):
    config, result = run
    folders = {"run": result.plot.parent, "import": imported} | {name: tmp_path / name for name in ("other", "notes", "left")}
    shutil.copytree(folders["run"], folders["other"])
    for name, files in {"notes": ("a.txt", "b.txt"), "left": ("metrics.jsonl",)}.items():
        folders[name].mkdir()
        for file in files:
            (folders[name] / file).write_text("{}")
    if resume is not None:
        name, _, rest = resume.partition("/")
        resume = str(folders[name] / rest)
    before = everything(*folders.values())
    changed = dataclasses.replace(config, out=str(folders[out]), resume=resume, train=TrainConfig(steps=99, qat=False))
    with pytest.raises(ValueError) as error:
        loop.train(changed)
    assert str(error.value).startswith(says.replace("OUT", changed.out).replace("RESUME", str(resume)))
    assert everything(*folders.values()) == before


def test_what_was_begun_and_holds_nothing_is_begun_again(tmp_path):
    for begun in ("nothing", "checkpoints"):
        (tmp_path / begun / "checkpoints").mkdir(parents=True)
        (tmp_path / begun / "metrics.jsonl").touch()
        (tmp_path / begun / LOCK).touch()
    folder.check(str(tmp_path / "nothing"), None, None)
    folder.check(str(tmp_path / "new"), None, None)
    (tmp_path / "checkpoints" / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(ValueError, match="holds what is left of a run"):
        folder.check(str(tmp_path / "checkpoints"), None, None)


def spoil(run: Path, what: str) -> Path:
    """Puts something in the way of a run that goes on; the file at fault."""
    match what:
        case "unmarked":
            shutil.copytree(run / "checkpoints" / "6", run / "checkpoints" / "9")
            (run / "checkpoints" / "9" / "commit_success.txt").unlink()
            return run / "checkpoints" / "9"
        case "numbers":
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"loss": 1}\n')
            return run / "metrics.jsonl"
        case _:
            (run / what).unlink(missing_ok=True)
            (run / what).mkdir()
            return run / what


@pytest.mark.parametrize("what", ["unmarked", "numbers", "metrics.jsonl", "training.png", "result.json", "result.json.tmp"])
def test_what_would_stop_a_run_at_its_end_stops_it_at_once(run, tmp_path, what):
    config, result = run
    shutil.copytree(result.plot.parent, tmp_path / "run")
    file = spoil(tmp_path / "run", what)
    before = everything(tmp_path)
    train = dataclasses.replace(config.train, steps=99)
    again = dataclasses.replace(config, out=str(tmp_path / "run"), resume=str(tmp_path / "run/checkpoints/4"), train=train)
    with pytest.raises(ValueError, match=f"^{file}: "):
        loop.train(again)
    assert everything(tmp_path) == before


def test_going_back_in_place_says_what_it_discards(run, tmp_path, capsys):
    config, result = run
    shutil.copytree(result.plot.parent, tmp_path / "run")
    (tmp_path / "run" / "export").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    back = {"resume": str(tmp_path / "run/checkpoints/4"), "train": dataclasses.replace(config.train, steps=5)}
    back["resume_with"] = ("schedule",)
    loop.train(dataclasses.replace(config, out=str(tmp_path / "run"), mesh=MeshConfig(), **back))
    differs, first, *_ = capsys.readouterr().err.splitlines()
    was = r"train.steps was 6 and is 5 \(the next learning rate \S+ and \S+\)"
    assert re.fullmatch(rf"resume=\S+/run/checkpoints/4: {was}; the next sample is number 32", differs)
    assert first == f"out={tmp_path}/run: goes back to step 4; the later checkpoints (6) are discarded"
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [4, 5]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints", "export", "metrics.jsonl", "notes.txt", "result.json", "training.png"
    ]


def test_two_runs_into_one_folder(run, tmp_path):
    config, _ = run
    with locked(tmp_path / "run"), pytest.raises(Locked, match=rf"^{tmp_path}/run: process \d+ on \S+ is writing here"):
        loop.train(dataclasses.replace(config, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
