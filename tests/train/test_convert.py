"""Import and export in pieces: the same bytes, however often they were stopped, and nothing that is not whole."""

import dataclasses
import errno
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import k3jax
from k3jax.hf import load_hf, pieces
from k3jax.hf.files import INDEX, CheckpointError, open_checkpoint
from k3jax.hf.load import released_arrays
from k3jax.hf.shards import JOURNAL, UNFINISHED
from k3jax.hf.synthesize import synthesize
from k3jax.lock import LOCK
from k3jax.nn.model import init_variables, model_shardings
from k3jax.train import inspect
from k3jax.train.checkpoint import Checkpoints, resolve
from k3jax.train.convert import export_checkpoint, import_checkpoint
from k3jax.train.loop import restore_weights

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
FORMS = [("k3_tiny", "packed"), ("k3_tiny", "dequantized"), ("kimi_linear_tiny", "dequantized")]


@pytest.fixture
def small_pieces(monkeypatch):
    """Many pieces, with smaller ones at the ends of axes, where there would be one a leaf."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 5000)


def tensors(folder):
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.problems
    return {name: (header, checkpoint.tensor(name).tobytes()) for name, header in checkpoint.headers.items()}


# ---- what comes of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, experts", FORMS)
def test_golden_logits_on_eight_devices_of_an_import_and_of_the_release(name, experts, tmp_path):
    import_checkpoint(DATA / name, tmp_path, experts=experts)
    cfg = k3jax.ModelConfig.from_hf(DATA / name)
    mesh = k3jax.make_mesh(fsdp=2, expert=4)
    with jax.set_mesh(mesh):
        direct = load_hf(DATA / name, param_dtype=jnp.float64, experts=experts, mesh=mesh)
        shardings = model_shardings(cfg, mesh, experts=experts)
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), direct, shardings)
        restored, meta = Checkpoints(tmp_path / "checkpoints").restore(0, abstract, partial=True, widen=True)
        for variables in (direct, restored):
            chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, variables), shardings)
        chex.assert_trees_all_equal(direct, restored)
        if (name, experts) != ("k3_tiny", "dequantized"):  # whose logits on a mesh tests/test_mesh.py has
            golden = np.load(DATA / name / "golden.npz")
            tokens = np.tile(golden["input_ids"], (4, 1))  # a row a device
            model = k3jax.K3(cfg, jnp.float64, jnp.float64, experts=experts)
            found = np.asarray(jax.jit(lambda v, x: model.apply(v, x).logits)(restored, tokens)).reshape(4, *golden["logits"].shape)
            assert np.max(np.abs(found - golden["logits"])) / np.max(np.abs(golden["logits"])) <= 1e-9
    assert meta["experts"] == experts and k3jax.ModelConfig.from_hf(meta["model"]) == cfg


@pytest.mark.parametrize("name, experts", FORMS)
def test_import_and_export_give_every_byte_back(name, experts, tmp_path, small_pieces):
    import_checkpoint(DATA / name, tmp_path / "in", experts=experts)
    assert sorted(os.listdir(tmp_path / "in" / "checkpoints")) == ["0"]
    stored = Checkpoints(tmp_path / "in" / "checkpoints").pieced(0)
    assert any(len(list(leaf.boxes())) > 1 for leaf in stored.values())
    export_checkpoint(tmp_path / "in", tmp_path / "out", max_shard_size=300_000)
    assert tensors(tmp_path / "out") == tensors(DATA / name)
    shards = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(shards) > 4 and max(shards.values()) < 330_000  # headers come on top
    released, exported = (
        json.loads((folder / "config.json").read_text()) for folder in (DATA / name, tmp_path / "out")
    )
    quantization = lambda config: config.get("text_config", config).get("quantization_config")  # noqa: E731
    assert quantization(released) == quantization(exported)


@pytest.mark.parametrize(
    "changes, lost",
    [
        ({"tie_word_embeddings": True}, "lm_head"),
        ({"num_shared_experts": 0}, "shared_experts"),
        ({"first_k_dense_replace": 2}, "block_sparse_moe"),
    ],
    ids=["tied", "none shared", "no experts"],
)
def test_models_with_less_than_released_ones_come_back(tmp_path, tiny, changes, lost):
    cfg = dataclasses.replace(tiny, **changes)
    synthesize(cfg, tmp_path / "released")
    assert k3jax.hf.report(tmp_path / "released").problems == {}
    assert not any(lost in name for name in open_checkpoint(tmp_path / "released").headers)
    import_checkpoint(tmp_path / "released", tmp_path / "in")
    assert inspect.report(tmp_path / "in").problems == {}
    found, variables, _ = restore_weights(tmp_path / "in")
    assert found == cfg and ("router" in variables) == cfg.has_experts
    chex.assert_trees_all_equal(variables, load_hf(tmp_path / "released"))
    export_checkpoint(tmp_path / "in", tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(tmp_path / "released")
    k3jax.save_hf(tmp_path / "saved", cfg, load_hf(tmp_path / "released", experts="packed"))
    assert tensors(tmp_path / "saved") == tensors(tmp_path / "released")


def test_a_head_of_its_own_is_not_taken_for_a_shared_one(tmp_path, tiny):
    synthesize(tiny, tmp_path / "released")
    config = json.loads((tmp_path / "released" / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "released" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="1 problem: language_model.lm_head.weight: not a tensor of this model"):
        import_checkpoint(tmp_path / "released", tmp_path / "in")


def test_a_run_of_many_devices_is_exported_as_from_memory(tmp_path, tiny, files):
    """Leaves that lie in pieces on every axis, in Orbax's own files."""
    mesh = k3jax.make_mesh(fsdp=2, expert=2, tensor=2)
    shardings = model_shardings(tiny, mesh)
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: nn.unbox(init_variables(k3jax.K3(tiny), jax.random.key(0))))
    weights = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
    placed = jax.tree.map(jax.device_put, weights, shardings)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        meta = {"kind": "run", "model": tiny.to_hf()}
        checkpoints.save(3, placed | {"opt_state": {"mu": placed["params"]}}, meta)
    assert len(list(Checkpoints(tmp_path / "run" / "checkpoints").pieced(3)["params.embed_tokens"].boxes())) == 4
    export_checkpoint(tmp_path / "run", tmp_path / "streamed")
    k3jax.save_hf(tmp_path / "whole", tiny, weights)
    assert files(tmp_path / "streamed") == files(tmp_path / "whole")


def test_a_prefix_needs_only_its_own_shards(tmp_path):
    cfg = k3jax.ModelConfig.from_hf(DATA / "k3_tiny")
    k3jax.save_hf(tmp_path / "k3", cfg, load_hf(DATA / "k3_tiny", experts="packed"), max_shard_size=300_000)
    last = max((tmp_path / "k3").glob("*.safetensors"))
    last.unlink()
    import_checkpoint(tmp_path / "k3", tmp_path / "three", layers=3)
    first, variables, _ = restore_weights(tmp_path / "three")
    assert (first.num_hidden_layers, first.kda_layers, first.full_attn_layers) == (3, (1, 2, 3), ())
    whole = load_hf(DATA / "k3_tiny")["params"]

    def layer_2(cfg, params):
        s, r, j = cfg.layer_address(2)
        return jax.tree.map(lambda x: x[r], params[f"segment_{s}"][f"layer_{j}"])

    chex.assert_trees_all_equal(layer_2(first, variables["params"]), layer_2(cfg, whole))
    with pytest.raises(
        CheckpointError, match=f"1 problem: {last.name}: the index names this shard, but there is no such"
    ):
        import_checkpoint(tmp_path / "k3", tmp_path / "all")
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("layers", [0, 10])
def test_a_prefix_longer_than_the_model(tmp_path, layers):
    with pytest.raises(ValueError, match=f"layers: found {layers}, must be from 1 to num_hidden_layers=9"):
        import_checkpoint(DATA / "k3_tiny", tmp_path / "out", layers=layers)


def test_a_device_reads_only_its_own_bytes(monkeypatch):
    cfg = k3jax.ModelConfig.from_hf(DATA / "k3_tiny")
    checkpoint = open_checkpoint(DATA / "k3_tiny")
    read = []
    original = type(checkpoint).read
    monkeypatch.setattr(
        type(checkpoint), "read", lambda self, spans, out: original(self, [read.append(s) or s for s in spans], out)
    )
    leaf = released_arrays(cfg, checkpoint, np.dtype(np.float32), "dequantized")[
        "params", "segment_3", "layer_0", "block_sparse_moe", "experts", "w2"
    ]
    assert leaf.shape == (3, 12, 32, 64)
    leaf.read((slice(1, 2), slice(5, 6), slice(8, 16), slice(32, 64)))
    name = "language_model.model.layers.5.block_sparse_moe.experts.5.w2.weight_"
    # Of rows 8..15, of 32 bytes each, the last 16; of their two scales the second.
    assert read == [(f"{name}packed", 32 * row + 16, 16) for row in range(8, 16)] + [
        (f"{name}scale", 2 * row + 1, 1) for row in range(8, 16)
    ]


# ---- stopped, and gone on ----------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from k3jax.hf import pieces
from k3jax.train import convert
what, source, destination, calls = sys.argv[1:]
pieces.PIECE_BYTES = 5000
left, function = int(calls), "rename" if what == "import_checkpoint" else "pwrite"
original = getattr(os, function)
def counted(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(os, function, counted)
getattr(convert, what)(source, destination)
"""


def killed(what, source, destination, calls):
    command = [sys.executable, "-c", KILLED, what, str(source), str(destination), str(calls)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_killed_and_gone_on(tmp_path, small_pieces, files, monkeypatch):
    source = DATA / "k3_tiny"
    import_checkpoint(source, tmp_path / "import")
    export_checkpoint(tmp_path / "import", tmp_path / "export", max_shard_size=10**12)

    killed("import_checkpoint", source, tmp_path / "import 2", 350)
    with pytest.raises(ValueError, match="no whole checkpoint"):
        resolve(tmp_path / "import 2")
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "import 2").rglob("c/**/*") if path.is_file()}
    assert len(begun) > 50
    with pytest.raises(ValueError, match="holds the beginning of another import; remove it first"):
        import_checkpoint(source, tmp_path / "import 2", experts="packed")
    import_checkpoint(source, tmp_path / "import 2")
    assert files(tmp_path / "import 2") == files(tmp_path / "import")
    kept = {path.stat().st_mtime_ns for path in (tmp_path / "import 2").rglob("c/**/*")}
    whole = [stamp for path, stamp in begun.items() if path.suffix != ".part"]
    assert kept.issuperset(whole)  # they were not written again

    killed("export_checkpoint", tmp_path / "import", tmp_path / "export 2", 700)
    assert {path.suffix for path in (tmp_path / "export 2").iterdir() if path.name != LOCK} == {UNFINISHED}
    done = (tmp_path / "export 2" / JOURNAL).read_text().count("\n") - 1
    assert done > 5
    with pytest.raises(ValueError, match="config.json|no such"):
        load_hf(tmp_path / "export 2")
    with pytest.raises(CheckpointError, match="holds the beginning of another export; remove it"):
        export_checkpoint(tmp_path / "import 2", tmp_path / "export 2")
    written = []
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(1) or pwrite(*arguments))
    export_checkpoint(tmp_path / "import", tmp_path / "export 2")
    assert len(written) < 828 * 2
    found = files(tmp_path / "export 2")
    assert set(found) == {"config.json", INDEX, "model-00001-of-00001.safetensors"}
    assert tensors(tmp_path / "export 2") == tensors(tmp_path / "export") == tensors(source)


@pytest.mark.parametrize("renamed", range(6))
def test_a_commit_cut_short_is_not_a_checkpoint(tmp_path, monkeypatch, renamed):
    """Export renames four files here; the import before it hundreds."""
    import_checkpoint(DATA / "kimi_linear_tiny", tmp_path / "import")
    rename, done = os.rename, []

    def stop(old, new):
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(new)
        return rename(old, new)

    out = tmp_path / "out"
    monkeypatch.setattr(os, "rename", stop)
    if renamed < 4:
        with pytest.raises(KeyboardInterrupt):
            export_checkpoint(tmp_path / "import", out, max_shard_size=2_000_000)
        with pytest.raises(ValueError):
            load_hf(out)
        monkeypatch.undo()
    export_checkpoint(tmp_path / "import", out, max_shard_size=2_000_000)
    assert tensors(out) == tensors(DATA / "kimi_linear_tiny")
    assert len(os.listdir(out)) == 4


def test_a_finished_import_and_export_are_left_alone(tmp_path):
    import_checkpoint(DATA / "kimi_linear_tiny", tmp_path / "in")
    with pytest.raises(ValueError, match="already holds step 0; choose another folder"):
        import_checkpoint(DATA / "kimi_linear_tiny", tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out")
    with pytest.raises(CheckpointError, match="out: already exists; choose a new or empty folder"):
        export_checkpoint(tmp_path / "in", tmp_path / "out")


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk():
    """While it is called for, no file can grow beyond 20,000 bytes: writing on fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda full: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if full else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failing(call, at):
    """`call`, but that the disk is full when it is called for the `at`-th time."""
    calls = itertools.count(1)

    def counted(*arguments):
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*arguments)

    return counted


def test_no_space_left(tmp_path, full_disk, monkeypatch):
    source, before = DATA / "k3_tiny", set(os.listdir(tmp_path))
    needs = "bytes of disk are needed; the same command goes on from what was written"

    full_disk(True)
    with pytest.raises(CheckpointError, match=rf"in: writing failed \(File too large\); [0-9]+ {needs}$"):
        import_checkpoint(source, tmp_path / "in")
    full_disk(False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(os.fsync, 300))
        with pytest.raises(CheckpointError, match=rf"in: writing failed \(No space left on device\); [0-9]+ {needs}$"):
            import_checkpoint(source, tmp_path / "in")
    assert os.listdir(tmp_path / "in" / "checkpoints") == ["unfinished"]
    assert len([path for path in (tmp_path / "in").rglob("c/**/*") if path.is_file()]) > 50
    import_checkpoint(source, tmp_path / "in")

    full_disk(True)
    with pytest.raises(CheckpointError, match=rf"out: writing failed \(File too large\); 1296800 {needs}$"):
        export_checkpoint(tmp_path / "in", tmp_path / "out")
    full_disk(False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing(os.fdatasync, 1))
        with pytest.raises(CheckpointError, match=rf"out: writing failed \(No space left on device\); 1296800 {needs}$"):
            export_checkpoint(tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError):
        load_hf(tmp_path / "out")
    export_checkpoint(tmp_path / "in", tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(source)
    assert set(os.listdir(tmp_path)) - before == {"in", "out"}  # nothing beside them


def test_what_is_wrong_is_found_before_a_byte_is_written(copy_golden, tmp_path):
    copy = copy_golden("k3_tiny")
    copy.edit_index(**{"language_model.lm_head.weight": None})
    with pytest.raises(CheckpointError, match="1 problem: language_model.lm_head.weight"):
        import_checkpoint(copy.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("experts", ["packed", "dequantized"])
def test_a_scale_that_is_nan_is_named(copy_golden, tmp_path, experts):
    copy = copy_golden("k3_tiny")
    name = "language_model.model.layers.5.block_sparse_moe.experts.3.w2.weight_scale"
    copy.edit(
        name, lambda scale: np.where(np.arange(scale.size).reshape(scale.shape) == 7, 0xFF, scale).astype(np.uint8)
    )
    with pytest.raises(CheckpointError, match=f"{name}: 1 of its 64 scale codes are 0xFF"):
        import_checkpoint(copy.folder, tmp_path / "out", experts=experts)
    assert os.listdir(tmp_path / "out" / "checkpoints") == ["unfinished"]


def test_a_weight_that_is_nan_is_named_and_imported_when_it_is_allowed(copy_golden, tmp_path):
    copy = copy_golden("kimi_linear_tiny")
    name = "model.layers.1.self_attn.A_log"
    copy.edit(name, lambda a: np.where(np.arange(a.size).reshape(a.shape) == 2, np.nan, a).astype(np.float32))
    message = f"{name}: 1 of its 3 values are NaN or infinite; allow_nonfinite takes what it names as it is"
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(copy.folder, tmp_path / "out")
    assert os.listdir(tmp_path / "out" / "checkpoints") == ["unfinished"]
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(copy.folder, tmp_path / "two", layers=2)
    import_checkpoint(copy.folder, tmp_path / "one", layers=1)  # which does not hold it
    import_checkpoint(copy.folder, tmp_path / "out", allow_nonfinite=["*.1.*.A_log"])  # goes on from what was written
    found = flatten_dict(restore_weights(tmp_path / "out")[1])
    assert sum(int(np.isnan(x).sum()) for x in found.values()) == 1


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_a_damaged_import_is_not_taken_for_zeros(tmp_path, small_pieces, damage):
    import_checkpoint(DATA / "kimi_linear_tiny", tmp_path / "in")
    piece = tmp_path / "in" / "checkpoints" / "0" / "state" / "params.embed_tokens" / "c" / "1" / "0"
    piece.unlink() if damage == "missing" else piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{piece}: {damage}"):
        restore_weights(tmp_path / "in")
    with pytest.raises(ValueError, match="'params.embed_tokens' cannot be read"):
        export_checkpoint(tmp_path / "in", tmp_path / "out")


def test_a_source_that_changed_is_another_one(copy_golden, tmp_path, monkeypatch):
    copy = copy_golden("kimi_linear_tiny")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "k3jax.train.checkpoint.PieceWriter.commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        import_checkpoint(copy.folder, tmp_path / "out")
    copy.edit("model.norm.weight", lambda a: a * 2)
    with pytest.raises(ValueError, match="holds the beginning of another import"):
        import_checkpoint(copy.folder, tmp_path / "out")


def test_an_export_of_a_run_without_the_tower_says_so(tmp_path):
    cfg = k3jax.ModelConfig.from_hf(DATA / "k3_tiny")
    import_checkpoint(DATA / "k3_tiny", tmp_path / "in")
    _, variables, _ = restore_weights(tmp_path / "in")
    for name in ("vision_tower", "mm_projector"):
        del variables["params"][name]
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, variables, {"kind": "run", "model": cfg.to_hf()})
    with pytest.raises(CheckpointError, match="vision_tower: missing, but cfg.vision is set"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
