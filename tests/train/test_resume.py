"""What a run that goes on may change: every setting, and where its data goes on."""

import dataclasses
import typing

import numpy as np
import pytest

from k3jax.run_config import DataConfig, RunConfig, TrainConfig, get, keys
from k3jax.train import loop, resume
from k3jax.train.data import ByteDataset
from k3jax.values import hints

FREE = {
    "train.remat", "train.grad_accum", "train.checkpoint_every", "train.keep_checkpoints", "train.eval_windows",
    "train.eval_every", "train.log_every", "out", "resume", "resume_with", "start", "cpu_devices", "processes.count",
    "processes.index", "processes.coordinator", "processes.timeout", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.context",
    "mesh.tensor",
}  # fmt: skip
SCHEDULE = {"train.steps", "train.learning_rate", "train.final_learning_rate", "train.warmup_fraction"}
IDENTITY = {"tokenizer": "a" * 64, "sources": "b" * 64, "held-out sources": "c" * 64}


@pytest.fixture(scope="module")
def config(tiny):
    return RunConfig(model=tiny, data=DataConfig(paths=("text",)), resume="runs/k3")


SETTINGS = [f"{group}.{name}" for group, cls in (("data", DataConfig), ("train", TrainConfig)) for name in hints(cls)]


def other(hint, value):
    """A value of the same type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return next(choice for choice in args if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1 if isinstance(value, int) else value / 2
    return ("other",) if isinstance(value, tuple) else "other"


def changed(config, key, value):
    group, _, name = key.rpartition(".")
    if not group:
        return dataclasses.replace(config, **{name: value})
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **{name: value})})


def meta(config):
    return loop.describe(config) | {"identity": IDENTITY}


def test_every_setting_is_of_a_kind(config):
    for key in keys(config):
        expected = None if key in FREE else "schedule" if key in SCHEDULE else {"data": "data", "train": "step"}.get(key.split(".")[0])
        assert resume.kind(key) == expected, key
    assert (resume.kind("data.new"), resume.kind("train.new")) == ("data", "step")  # until somebody says that they are free


@pytest.mark.parametrize("key", SETTINGS)
def test_each_setting_changed(config, key):
    """Refused with both values and what allows it, and nothing else does; or free."""
    group, _, name = key.partition(".")
    before = get(config, key)
    after = other(hints(type(getattr(config, group)))[name], before)
    asked = changed(config, key, after)
    if key in FREE or key in ("data.paths", "data.pairs", "data.held_out_paths", "data.tokenizer"):  # what they hold is compared
        assert resume.check(asked, meta(config), 900, IDENTITY) == ""
        return
    needed = "schedule" if key in SCHEDULE else {"data": "data", "train": "step"}[group]
    for allowed in ((), tuple({"data", "schedule", "step"} - {needed})):
        with pytest.raises(ValueError) as error:
            resume.check(dataclasses.replace(asked, resume_with=allowed), meta(config), 900, IDENTITY)
        shown = [",".join(map(str, value)) or "None" if isinstance(value, tuple) else value for value in (before, after)]
        assert str(error.value).startswith(f"resume=runs/k3: {key} was {shown[0]} and is {shown[1]}")
        assert str(error.value).endswith(f"; set it back, or allow it with resume_with={','.join([*allowed, needed])}")
    assert resume.check(dataclasses.replace(asked, resume_with=(needed,)), meta(config), 900, IDENTITY).startswith(key)


@pytest.mark.parametrize("key", ["mesh.fsdp", "out", "cpu_devices", "processes.count", "processes.timeout"])
def test_mesh_processes_and_devices_are_free(config, key):
    asked = changed(config, key, "elsewhere" if key == "out" else 8)
    assert resume.check(asked, meta(config), 900, IDENTITY) == ""


def test_several_are_named_in_one_line(config):
    asked = changed(changed(changed(config, "data.batch_size", 8), "train.steps", 2000), "train.qat", False)
    made = changed(config, "train.learning_rate", 2e-3)
    with pytest.raises(ValueError) as error:
        resume.check(asked, meta(made), 900, IDENTITY)
    assert "\n" not in str(error.value)
    parts = ("data.batch_size was 16 and is 8", "train.steps was 1000 and is 2000 (the next learning rate", "train.qat was True and is")
    assert all(part in str(error.value) for part in (*parts, "train.learning_rate was 0.002 and is 0.001", "resume_with=data,schedule,step"))


def test_the_jump_of_the_learning_rate_is_said(config):
    with pytest.raises(ValueError, match=r"train.steps was 1000 and is 2000 \(the next learning rate 0.000122 and 0.000628\)"):
        resume.check(changed(config, "train.steps", 2000), meta(config), 900, IDENTITY)


def test_steps_are_free_where_the_learning_rate_does_not_jump(config):
    flat = changed(changed(config, "train.final_learning_rate", 1.0), "train.warmup_fraction", 0.01)
    assert resume.check(changed(flat, "train.steps", 2000), meta(flat), 900, IDENTITY) == ""


def test_accumulation_matters_where_tokens_are_dropped(config):
    dropping = changed(config, "train.capacity_drop", True)
    with pytest.raises(ValueError, match="train.grad_accum was 1 and is 2; .*resume_with=step"):
        resume.check(changed(dropping, "train.grad_accum", 2), meta(dropping), 900, IDENTITY)


@pytest.mark.parametrize("name", IDENTITY)
def test_other_content_is_refused(config, name):
    found = IDENTITY | {name: "d" * 64}
    with pytest.raises(ValueError, match=rf"the content of its {name}.* was {IDENTITY[name][:8]} and is dddddddd; .*resume_with=data"):
        resume.check(config, meta(config), 900, found)
    allowed = dataclasses.replace(config, resume_with=("data",))
    assert resume.check(allowed, meta(config), 900, found).startswith("the content")


def test_a_setting_that_was_not_there_yet_was_at_its_default(config):
    made = meta(config)
    del made["train"]["weight_decay"]
    assert resume.check(config, made, 900, IDENTITY) == ""
    with pytest.raises(ValueError, match="train.weight_decay was 0.1 and is 0.2"):
        resume.check(changed(config, "train.weight_decay", 0.2), made, 900, IDENTITY)


def test_content_decides_the_identity_of_data(tmp_path):
    documents = [b"alpha beta gamma" * 4, b"delta" * 9]
    made = ByteDataset(documents, 8, 2).identity
    assert ByteDataset(documents, 16, 4, seed=3).identity == made
    assert ByteDataset(documents[::-1], 8, 2).identity != made
    assert ByteDataset([documents[0][:-1], documents[0][-1:] + documents[1]], 8, 2).identity != made


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (4, 6, 10)])
def test_the_data_goes_on_at_the_next_sample(config, monkeypatch, sizes):
    """With batches of another size, once and again: no sample is missing and none comes twice."""
    data = ByteDataset([bytes(range(256)) * 8], 8, 1)
    order = [data.batch(n)["tokens"][0] for n in range(400)]
    seen, step, made = [], 0, None
    for size in sizes:
        asked = dataclasses.replace(changed(config, "data.batch_size", size), resume_with=("data",))
        now = ByteDataset([bytes(range(256)) * 8], 8, size)
        monkeypatch.setattr(resume.Checkpoints, "read_model", lambda self, number, made=made: (config.model, made))
        said = resume.go_on(asked, made and ("folder", step), meta(asked), now)
        assert said == (f"resume=runs/k3: data.batch_size was {made['data']['batch_size']} and is {size}; "
                        f"the next sample is number {len(seen)}" if made else "")
        for step in range(step, step + 15):
            seen += list(now.batch(step)["tokens"])
        step += 1
        made = meta(asked) | {"kind": "run", "samples": now.offset + step * size}
    np.testing.assert_array_equal(seen, order[: len(seen)])
    assert len(seen) == 15 * sum(sizes)


def test_a_checkpoint_that_does_not_count_samples(config, monkeypatch):
    asked = dataclasses.replace(changed(config, "data.batch_size", 8), resume_with=("data",))
    made = meta(changed(config, "data.batch_size", 4)) | {"kind": "run"}
    monkeypatch.setattr(resume.Checkpoints, "read_model", lambda self, number: (config.model, made))
    data = ByteDataset([bytes(256)], 8, 8)
    assert resume.go_on(asked, ("folder", 15), meta(asked), data).endswith("the next sample is number 60")
    assert data.offset + 15 * 8 == 60


def test_settings_that_do_not_fit_together(config):
    dataclasses.replace(config, resume="auto", start="runs/other").validate()  # begins with its weights, then goes on
    with pytest.raises(ValueError, match="start=runs/other: must be None beside resume"):
        dataclasses.replace(config, start="runs/other").validate()
    with pytest.raises(ValueError, match="resume_with=data,step: must be empty without resume"):
        dataclasses.replace(config, resume=None, resume_with=("data", "step")).validate()
