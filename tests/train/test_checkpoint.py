"""Checkpoints: every bit comes back, on any mesh, and a save that did not finish is as if it never began."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from k3jax.train.checkpoint import CheckpointError, Checkpoints, resolve

ROOT = Path(__file__).parents[2]


class State(NamedTuple):
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def random_bits(dtype, shape, seed=0):
    """Every bit random: NaNs with payloads, denormals and negative zeros included."""
    size = np.prod(shape, dtype=int) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(shape)


def example(seed=0):
    params = {
        "w": random_bits(np.float32, (16, 8), seed),
        "blocks.0": {"w/x": random_bits(ml_dtypes.bfloat16, (8, 3, 4), seed + 1)},
        "wide": random_bits(np.float64, (8,), seed + 2),
        "codes": [random_bits(np.uint8, (8, 2), seed + 3), random_bits(np.int32, (8,), seed + 4)],
    }
    # An optimizer state has what a tree can have: named tuples, empty ones, None.
    adam = optax.ScaleByAdamState(np.array(7, np.int32), {"w": params["w"] + 1}, None)
    opt_state = (optax.EmptyState(), adam, {})
    return State(np.array(seed, np.int32), params, opt_state, random_bits(np.uint32, (2,), seed + 5))


def place(state, on):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(on, spec(x, on))), state)


def abstract(state, on=None):
    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on and NamedSharding(on, spec(x, on)))

    return jax.tree.map(shape, state)


def spec(x, on):
    axes = [axis for axis in ("fsdp", "tensor") if axis in on.axis_names]
    return P(*[axis if size % on.shape[axis] == 0 else None for axis, size in zip(axes, x.shape)])


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def leaf(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def small(value=0.0):
    return {"w": jnp.full((4, 4), value, jnp.float32)}


# ---- what comes back ---------------------------------------------------------------------------------------


def test_bits_survive_onto_another_mesh(tmp_path):
    state, meta = example(), {"data": {"position": 2**60 + 1, "epoch": None}, "text": "naïve", "loss": [2.5]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, place(state, mesh(fsdp=8)), meta)
    other = mesh(fsdp=2, tensor=4)
    found, found_meta = Checkpoints(tmp_path).restore(3, abstract(state, other))
    assert_same_bits(found, state)
    assert found_meta == meta
    w = found.params["w"].sharding
    assert w.mesh == other and w.spec == P("fsdp", "tensor")
    assert found.params["w"].addressable_shards[0].data.shape == (8, 2)


def test_leaves_without_a_sharding_come_to_one_device(tmp_path):
    state = example(5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, place(state, mesh(fsdp=8)), {})
    found, _ = Checkpoints(tmp_path).restore(1, abstract(state))
    assert_same_bits(found, state)
    assert found.params["w"].sharding == SingleDeviceSharding(jax.devices()[0])


def test_buffers_may_be_donated_while_they_are_saved(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    weights = {str(i): np.full((512, 256), i, np.float32) for i in range(8)}
    state = advance(place(weights, mesh(fsdp=8)))
    with Checkpoints(tmp_path) as checkpoints:
        old, state = state, advance(state)
        assert old["0"].is_deleted()
        checkpoints.save(1, state, {})
        for _ in range(20):
            state = advance(state)
    found, _ = Checkpoints(tmp_path).restore(1, abstract(weights))
    for i in range(8):
        assert (np.asarray(found[str(i)]) == i + 2).all()


def test_partial_restore_reads_what_is_asked_for(tmp_path):
    state = example()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"of": "both"})
    wanted = {"params": {"w": state.params["w"], "codes": state.params["codes"]}}
    found, meta = Checkpoints(tmp_path).restore(1, abstract(wanted, mesh(fsdp=8)), partial=True)
    assert_same_bits(found, wanted)
    assert meta == {"of": "both"}
    with pytest.raises(CheckpointError, match=r"'params.v' is missing, expected float32\[3\]"):
        Checkpoints(tmp_path).restore(1, {"params": {"v": leaf("float32", 3)}}, partial=True)


# ---- what does not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda p: p | {"w": leaf("f4", 8, 16)}, "'params.w': found float32[16,8], expected float32[8,16]"),
        (lambda p: p | {"w": leaf("f8", 16, 8)}, "'params.w': found float32[16,8], expected float64[16,8]"),
        (lambda p: p | {"v": leaf("int32")}, "'params.v' is missing, expected int32[]"),
        (lambda p: {k: p[k] for k in p if k != "wide"}, "'params.wide' is not expected, found float64[8]"),
        (lambda p: p | {"codes": p["codes"][:1]}, "'params.codes.1' is not expected, found int32[8]"),
        (lambda p: {}, "(and 4 more)"),
    ],
    ids=["shape", "dtype", "missing", "extra", "shorter list", "several"],
)
def test_a_leaf_that_does_not_fit_is_named(tmp_path, change, says):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, example(), {})
    wanted = abstract(example())
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path).restore(1, wanted._replace(params=change(wanted.params)))
    assert str(error.value).startswith(f"{tmp_path}/1: '") and says in str(error.value)
    assert "\n" not in str(error.value)


def test_float64_is_not_narrowed_in_silence(tmp_path):
    state = {"x": np.float64([1.1])}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    with jax.enable_x64(False), pytest.raises(CheckpointError, match="'x' is .*, which needs jax_enable_x64"):
        Checkpoints(tmp_path).restore(1, abstract(state))


@pytest.mark.parametrize("kind", ["empty", "number", "text", "key"])
def test_only_arrays_are_saved(tmp_path, kind):
    value = {"empty": np.zeros((0, 3)), "number": 3, "text": "text", "key": jax.random.key(0)}[kind]
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="cannot save 'a.b', only non-empty number arrays"):
            checkpoints.save(1, {"a": {"b": value}}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bytes_left, says", [(10, "its arrays are missing"), (1000, "OUT_OF_RANGE")])
def test_a_truncated_checkpoint_says_so(tmp_path, bytes_left, says):
    state = {"w": np.random.default_rng(0).random((256, 256))}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    for data in (tmp_path / "1").rglob("d/*"):
        data.write_bytes(data.read_bytes()[:bytes_left])
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path).restore(1, abstract(state))
    assert str(error.value).startswith(f"{tmp_path}/1: cannot be read ({says}")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


# ---- which checkpoints there are ---------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() is None
        for step in (5, 10, 15, 20):
            checkpoints.save(step, small(step), {"step": step}, wait=True)
            assert checkpoints.latest() == step
        assert checkpoints.steps() == [15, 20]
        assert checkpoints.read_meta(15) == {"step": 15}
        with pytest.raises(CheckpointError, match=r"no whole checkpoint of step 5; found 15, 20"):
            checkpoints.read_meta(5)
        for step in (17, 20):
            with pytest.raises(CheckpointError, match=f"cannot save step {step}, it already holds step 20"):
                checkpoints.save(step, small(), {})
    assert (Checkpoints(tmp_path).restore(15, abstract(small()))[0]["w"] == 15).all()


def test_going_back_discards_what_came_later(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (5, 10, 15):
            checkpoints.save(step, small(step), {})
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.discard_after(5)
        assert checkpoints.steps() == [5]
        checkpoints.save(10, small(-1), {}, wait=True)
        assert checkpoints.steps() == [5, 10]
        assert (checkpoints.restore(10, abstract(small()))[0]["w"] == -1).all()


def test_resolve(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.save(9, small(), {})
        checkpoints.save(10, small(), {})
    assert resolve(tmp_path / "run") == resolve(folder) == resolve(folder / "10") == (folder, 10)
    assert resolve(str(folder / "9")) == (folder, 9)
    (folder / "11").mkdir()
    for path, says in (
        (tmp_path / "other", "no such folder"),
        (folder / "12", "no such folder"),
        (folder / "11", "no whole checkpoint"),
        (tmp_path, "no whole checkpoint"),
    ):
        with pytest.raises(CheckpointError) as error:
            resolve(path)
        assert str(error.value) == f"{path}: {says}; expected a run folder or one of its checkpoints"


# ---- saves that do not finish ------------------------------------------------------------------------------

KILLED = """
import os, sys
import jax, numpy as np
from k3jax.train.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": np.ones((4, 4), np.float32)}, {}, wait=True)
checkpoints.save(2, {"w": np.random.default_rng(0).random((4096, 4096))}, {})
os._exit(0)
"""


def test_a_killed_save_never_shows_up(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, env=environment, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.orbax-checkpoint-tmp"]
    assert resolve(tmp_path) == (tmp_path, 1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert (checkpoints.restore(1, abstract(small()))[0]["w"] == 1).all()
        checkpoints.save(3, small(3), {}, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_folders_that_are_not_whole_are_ignored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small(), {})
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "1", tmp_path / "3")
    (tmp_path / "3" / "commit_success.txt").unlink()
    (tmp_path / "4").mkdir()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [1]
        # Orbax would keep the newest by name, and drop what was just saved.
        with pytest.raises(CheckpointError, match="/3: not a whole checkpoint; remove it first"):
            checkpoints.save(2, small(), {})


@pytest.fixture
def full_disk():
    """While it is called for, no file can grow beyond 1 MiB: writing on fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(full):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 if full else soft, hard))

    yield fill
    fill(False)


@pytest.mark.parametrize("first_noticed_by", ["wait", "save", "close"])
def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, full_disk, caplog, first_noticed_by):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, small(1), {"step": 1}, wait=True)
    full_disk(True)
    checkpoints.save(2, {"w": np.random.default_rng(0).random((1024, 1024))}, {})
    arguments = (3, small(3), {}) if first_noticed_by == "save" else ()
    with pytest.raises(CheckpointError) as error:
        getattr(checkpoints, first_noticed_by)(*arguments)
    full_disk(False)
    message = f"{tmp_path}/2: could not be saved (File too large); the newest whole one is step 1"
    assert str(error.value) == message
    assert not caplog.records  # Orbax has a thousand lines to say about it
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    assert checkpoints.latest() == 1
    assert (checkpoints.restore(1, abstract(small()))[0]["w"] == 1).all()
    # The same object saves again once there is room, and only then lets go of the previous checkpoint.
    checkpoints.save(3, small(3), {}, wait=True)
    assert checkpoints.steps() == [3]
    checkpoints.close()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(CheckpointError) as error:
        checkpoints.save(1, small(), {}, wait=True)
    assert str(error.value).startswith(f"{tmp_path}/file/checkpoints/1: could not be saved (")
    assert str(error.value).endswith("there is no earlier one") and "\n" not in str(error.value)
