"""Runs as a user starts them, on a tiny model: what they leave behind, how they stop, how they go on."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest

import k3jax
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import loop
from k3jax.train.checkpoint import Checkpoints
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
