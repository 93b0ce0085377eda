"""Between a run's checkpoints and the released layout, in pieces: neither side is ever whole in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np

from k3jax.config import ModelConfig
from k3jax.hf.files import Checkpoint, CheckpointError, released_names
from k3jax.hf.layouts import Form
from k3jax.hf.load import open_checked, released_arrays
from k3jax.hf.names import tree_shapes
from k3jax.hf.pieces import Box, Pieced
from k3jax.hf.save import SHARD_BYTES, write_released
from k3jax.hf.stream import MEMORY, Job, run
from k3jax.lock import LOCK, claimed
from k3jax.paths import expand
from k3jax.text import copy_tokenizer, tokenizer_files
from k3jax.train.checkpoint import PieceWriter, open_model


class ImportPlan(NamedTuple):
    """What an import will do: leaves to be read from a checkpoint that has been checked, and what is noted with them."""

    checkpoint: Checkpoint
    leaves: dict[tuple[str, ...], Pieced]
    meta: dict[str, Any]
    identity: str  # of all that the result depends on: not of what may be NaN, for a stopped import goes on when that is allowed


def plan_import(
    source: str | Path,
    experts: Literal["dequantized", "packed"] = "dequantized",
    layers: int | None = None,
    allow_nonfinite: Sequence[str] = (),
) -> ImportPlan:
    """Checks a released checkpoint, by its headers, and says what `import_checkpoint` writes; it writes nothing itself."""
    whole = ModelConfig.from_hf(source)
    cfg = whole if layers is None else whole.first_layers(layers)
    prefix = {} if layers is None else {"of": whole, "wanted": released_names(cfg)}
    checkpoint = open_checked(source, cfg, experts, **prefix)
    leaves = released_arrays(cfg, checkpoint, np.dtype(ml_dtypes.bfloat16), experts, allow_nonfinite)
    meta = {"kind": "weights", "model": cfg.to_hf(), "experts": experts}
    identity = hashlib.sha256(json.dumps([checkpoint.fingerprint, meta]).encode()).hexdigest()
    return ImportPlan(checkpoint, leaves, meta, identity)


def import_checkpoint(
    source: str | Path,
    destination: str | Path,
    experts: Literal["dequantized", "packed"] = "dequantized",
    layers: int | None = None,
    memory: int = MEMORY,
    allow_nonfinite: Sequence[str] = (),
) -> None:
    """Writes a released checkpoint as one that a run can start from, on any mesh: step 0 of `destination`.

    Weights keep the types they are stored in, and float32 where the release has it; routed experts stay packed or become
    bfloat16, both exact. The files of a tokenizer come along. `layers` takes
    the first ones alone, and only the shards that hold them need to be there. After an error or a kill, the same call goes
    on from the pieces that were written. Of several processes all make the same call, with a `destination` that all see:
    each reads and writes its share of the pieces.

    Raises `CheckpointError` naming all that is wrong with the headers before anything is written, and a tensor with a value
    that is NaN or infinite, and that no pattern of `allow_nonfinite` names, when it comes to it.
    """
    destination = Path(expand(destination))
    with claimed(destination, lambda: _plan(source, destination, experts, layers, allow_nonfinite)) as plan:
        _import(plan, destination, memory)


def _plan(source, destination: Path, *options) -> tuple[ImportPlan, dict[str, str]]:
    """The plan of an import, and of it what all processes must have found."""
    plan = plan_import(source, *options)
    known = {LOCK, "checkpoints", *(path.name for path in tokenizer_files(source))}
    if strange := [path.name for path in destination.iterdir() if path.name not in known]:
        raise CheckpointError(f"{destination}: already holds {min(strange)}; choose a new or empty folder")
    return plan, {f"what {source} holds": plan.identity}


def _import(plan: ImportPlan, destination: Path, memory: int) -> None:
    try:
        writer = PieceWriter(destination / "checkpoints", 0, plan.leaves, plan.meta, plan.identity)
        jobs, written = [], set()
        for path, leaf in plan.leaves.items():
            for number, box in enumerate(leaf.boxes()):
                job = Job(f"{'/'.join(path)} {number}", _bytes(leaf, box), partial(_copy, leaf, writer, path, box))
                jobs.append(job)
                if writer.has(path, box):
                    written.add(job.key)
        if jax.process_index() == 0:
            copy_tokenizer(plan.checkpoint.path, destination)
        share = jobs[jax.process_index() :: jax.process_count()]
        run(share, "import", lambda job: None, written.__contains__, memory)
        writer.commit()
    except OSError as error:
        total = sum(leaf.nbytes for leaf in plan.leaves.values())
        raise CheckpointError(
            f"{destination}: writing failed ({error.strerror or error}); {total} bytes of disk are needed; "
            "the same command goes on from what was written"
        ) from error


def export_checkpoint(
    source: str | Path,
    destination: str | Path,
    max_shard_size: int = SHARD_BYTES,
    memory: int = MEMORY,
    form: Form = Form(),
) -> None:
    """Writes the weights of a run's checkpoint as a released checkpoint: bfloat16, experts packed to MXFP4, or in another form.

    A model trained with QAT gives the same logits, bit for bit, when its export runs packed. An import comes back byte
    for byte, and the files of its tokenizer with it. After an error or a kill, the same call goes on from what was written.
    """
    checkpoints, number, cfg, meta = open_model(source)
    found = checkpoints.pieced(number)
    shapes = tree_shapes(cfg, meta.get("experts", "dequantized"))
    leaves = {path: found[".".join(path)] for path in shapes if ".".join(path) in found}
    leaves = {path: _whole_rows(leaf) if "experts" in path else leaf for path, leaf in leaves.items()}
    written = (checkpoints.folder / str(number) / "_CHECKPOINT_METADATA").stat()
    identity = hashlib.sha256(json.dumps([meta, written.st_mtime_ns, written.st_size]).encode()).hexdigest()
    options = {"form": form, "memory": memory, "beside": tokenizer_files(checkpoints.folder.parent)}
    write_released(destination, cfg, leaves, max_shard_size, identity=identity, **options)


def _copy(leaf: Pieced, writer: PieceWriter, path: tuple[str, ...], box: Box) -> None:
    writer.write(path, box, leaf.read(box))


def _bytes(leaf: Pieced, box: Box) -> int:
    return leaf.dtype.itemsize * int(np.prod([part.stop - part.start for part in box]))


def _whole_rows(leaf: Pieced) -> Pieced:
    """Pieces that hold whole blocks of values that share a scale."""
    return Pieced(leaf.shape, leaf.dtype, (*leaf.piece[:-1], leaf.shape[-1]), leaf.read)
