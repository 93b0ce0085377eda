"""Checkpoints of a run: asynchronous saves that are whole or absent, restored bit for bit onto any mesh; and the same
checkpoints written and read piece by piece, for models that do not fit in memory.

A run folder keeps them under `checkpoints/<step>`. A step is written beside its final name and renamed when
it is complete, so a save that was killed or ran out of disk never shows up. With several processes the folder is
one that all of them see; each writes and reads what its own devices hold.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from k3jax import peers
from k3jax.config import ModelConfig
from k3jax.hf.pieces import PIECE_BYTES, Box, Pieced, boxes
from k3jax.paths import expand

# Orbax logs the traceback of a failed save from each of its threads; here the failure is raised, as one line.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)


def _without_echoes(hook):
    """`sys.unraisablehook` without what comes of reads and writes that Orbax no longer waits for.

    When one of many fails, Orbax closes the event loop that all of them report to; the failure itself is raised.
    """

    def told(unraisable):
        closed = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
        code = getattr(unraisable.object, "cr_code", None)  # of a coroutine
        if not closed and f"{os.sep}orbax{os.sep}" not in getattr(code, "co_filename", ""):
            hook(unraisable)

    return told


sys.unraisablehook = _without_echoes(sys.unraisablehook)
warnings.filterwarnings("ignore", "coroutine '_read_array_index_and_device_put' was never awaited", RuntimeWarning)

_TEMPORARY = ".orbax-checkpoint-tmp"  # suffix of a step that is not whole
_LATE_MS = 86_400_000  # `peers` notices a process that died or is stuck; one that works for long is waited for
_meetings = itertools.count()
_ARRAYS = "state"  # what Orbax calls the arrays of a step
_UNFINISHED = "unfinished"  # folder beside the steps, of a step that is written piece by piece
_IDENTITY = "identity"  # file in it: what it is the beginning of
_COMMITTED = ("_CHECKPOINT_METADATA", "commit_success.txt")  # what a whole step holds besides its arrays


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read or written, or that does not fit; one line."""


def meet(what: str) -> None:
    """Returns when all processes have called it; all make the same calls in the same order.

    Needs no collective: on CPU, those give up after 30 s if a process is that late. How long one is waited for is told by
    `peers.Peers`, which ends all with its name.
    """
    peers.note("waits", f"for the others to have {what}")
    multihost.get_barrier_sync_fn()(key=f"k3jax {next(_meetings)} {what}", timeout_ms=_LATE_MS)
    peers.note("works", f"after all have {what}")


def resolve(path: str | Path) -> tuple[Path, int]:
    """(checkpoints folder, step) meant by `path`: a run folder or its checkpoints folder mean the newest.

    Raises `CheckpointError` if there is no whole checkpoint at `path`.

    Example:
        >>> resolve("runs/k3")
        (PosixPath('runs/k3/checkpoints'), 400)
        >>> resolve("runs/k3/checkpoints/200")
        (PosixPath('runs/k3/checkpoints'), 200)
    """
    path = Path(expand(path))
    for folder in (path / "checkpoints", path):
        if steps := _steps(folder):
            return folder, steps[-1]
    if path.name.isdecimal() and int(path.name) in _steps(path.parent):
        return path.parent, int(path.name)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; expected a run folder or one of its checkpoints")
    raise CheckpointError(f"{path}: no whole checkpoint; expected a run folder or one of its checkpoints")


def open_model(path: str | Path) -> tuple[Checkpoints, int, ModelConfig, dict[str, Any]]:
    """(checkpoints, step, model, meta) of what `resolve` finds at `path`."""
    folder, step = resolve(path)
    checkpoints = Checkpoints(folder)
    return checkpoints, step, *checkpoints.read_model(step)


class Checkpoints:
    """The checkpoints in one folder, of which saving keeps the `keep` newest.

    A state is any tree of arrays (PRNG keys as their uint32 key data); `meta` is a JSON object saved with it.
    Only saving and discarding change the folder. Errors name leaves by their dotted paths. Of several processes
    all make the same calls; a save is whole when the last of them has written its part.

    Example:
        >>> with Checkpoints("runs/k3/checkpoints", keep=2) as checkpoints:
        ...     checkpoints.save(100, state, {"position": 12800})
        >>> state, meta = Checkpoints("runs/k3/checkpoints").restore(100, abstract_state)
    """

    def __init__(self, folder: str | Path, keep: int = 1):
        self.folder = Path(expand(folder)).absolute()
        self.keep = keep
        self._orbax: ocp.training.Checkpointer | None = None
        self._saving: int | None = None

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, ascending."""
        return _steps(self.folder)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint; a save in progress does not count."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: dict[str, Any], wait: bool = False) -> None:
        """Starts saving `state`, whose buffers may be donated once this returns; `wait` waits for the disk.

        Raises `CheckpointError` if the save before this one failed, if this one cannot start, and if `step`
        is not after the newest checkpoint.
        """
        peers.note("own", f"saves step {step}")
        self.wait()
        newest = self.latest()
        if newest is not None and step <= newest:
            raise CheckpointError(f"{self.folder}: cannot save step {step}, it already holds step {newest}")
        self.check_whole(after=-1 if newest is None else newest)
        for name, leaf in _leaves(state).items():
            array = isinstance(leaf, (jax.Array, np.ndarray)) and leaf.size
            if not array or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise CheckpointError(f"{self.folder}: cannot save '{name}', only non-empty number arrays")
        try:
            if self._orbax is None:
                context = ocp.Context()
                context.asynchronous.create_directories_asynchronously = False  # see `PieceWriter._lay_out`
                # Replicas share the writing of large arrays only: each shape they cut costs a compilation.
                context.array.saving.min_slice_bytes_for_replica_parallel = 2**26
                # Pieces are what another mesh, or an export, reads at a time.
                context.array.saving.storage_options.chunk_byte_size = PIECE_BYTES
                self._orbax = ocp.training.Checkpointer(
                    self.folder,
                    context=context,
                    preservation_policy=ocp.training.preservation_policies.LatestN(self.keep),
                    cleanup_tmp_directories=True,
                )
            # Without force, Orbax skips a save whenever it thinks another is in progress.
            self._orbax.save_async(step, state, force=True, custom_metadata=meta)
        except Exception as error:
            raise self._failed(step, error) from error
        self._saving = step
        if wait:
            self.wait()
        peers.note("works", f"has begun to save step {step}")

    def check_whole(self, after: int) -> None:
        """Complains of a folder with the name of a step above `after` that is no whole checkpoint: it would be in the way."""
        whole = self.steps()
        for step in _step_folders(self.folder):
            if step > after and step not in whole:  # Orbax would keep it as the newest, and drop what is saved
                raise CheckpointError(f"{self.folder / str(step)}: not a whole checkpoint; remove it first")

    def wait(self) -> None:
        """Returns when the disk holds the last save. Raises `CheckpointError` if that failed."""
        if self._saving is None:
            return
        step, self._saving = self._saving, None
        try:
            self._orbax.wait()
        except Exception as error:
            raise self._failed(step, error) from error

    def close(self) -> None:
        """`wait`, then ends the threads that save."""
        self.wait()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def read_meta(self, step: int) -> dict[str, Any]:
        """The JSON object saved with `step`, without reading any array."""
        return self._metadata(step).custom_metadata

    def read_model(self, step: int) -> tuple[ModelConfig, dict[str, Any]]:
        """(model, meta) of the checkpoint of a run or an import."""
        meta = self.read_meta(step)
        try:
            return ModelConfig.from_hf(meta["model"]), {"kind": meta["kind"], **meta}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            file = self.folder / str(step) / _COMMITTED[0]
            raise self._damaged(step, f"{file}: describes no model of a run or an import ({_reason(error)})") from error

    def pieced(self, step: int) -> dict[str, Pieced]:
        """The arrays of `step` by dotted path, to be read in the pieces they were written in."""
        leaves = _leaves(self._metadata(step).metadata)
        folder = self.folder / str(step) / _ARRAYS
        failed = partial(self._damaged, step)
        return {name: _open(folder, name, leaf, failed) for name, leaf in leaves.items()}

    def restore(
        self, step: int, abstract_state: Any, partial: bool = False, widen: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """(state, meta) of `step`, each leaf with the sharding of its `jax.ShapeDtypeStruct`.

        A leaf without a sharding goes to this process' first device. `partial` leaves what `abstract_state` does not
        name unread, e.g. the optimizer's state. `widen` turns floats into wider ones, which is exact.

        Raises `CheckpointError` naming the first leaf that is missing, extra, or of another shape or dtype.
        """
        metadata = self._metadata(step)
        path = self.folder / str(step)
        peers.note("works", f"reads {path}")
        found, wanted = _leaves(metadata.metadata), _leaves(abstract_state)
        _check(path, found, wanted, partial, widen)
        for name in (name for name in wanted if (path / _ARRAYS / name).is_dir()):
            piece = found[name].storage_metadata.chunk_shape
            size = found[name].dtype.itemsize * int(np.prod(piece))
            for box in boxes(found[name].shape, piece):
                found_size = _size(file := _piece(path / _ARRAYS / name, piece, box))
                if found_size != size:  # Orbax takes what is missing for zeros
                    what = "missing" if found_size is None else f"cut short, {found_size} of {size} bytes"
                    raise self._damaged(step, f"{file}: {what}; import the checkpoint again")
        device = SingleDeviceSharding(jax.local_devices()[0])
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device),
            abstract_state,
        )
        context = ocp.Context()
        context.pytree.loading.partial_load = partial
        try:
            with context:
                state = ocp.load(path, placed)
        except Exception as error:
            raise self._damaged(step, _unreadable(path, _reason(error))) from error
        return state, metadata.custom_metadata

    def discard_after(self, step: int) -> None:
        """Deletes the checkpoints after `step`: a run that goes back to it will write its own."""
        self.close()
        if jax.process_index() == 0:
            for later in self.steps():
                if later > step:
                    # Renamed first: a deletion that is cut short leaves no half checkpoint under a step's name.
                    doomed = (self.folder / str(later)).rename(self.folder / f"{later}{_TEMPORARY}")
                    shutil.rmtree(doomed)
        meet("discarded")  # the other processes look only now

    def _metadata(self, step: int):
        if step not in self.steps():
            found = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.folder}: no whole checkpoint of step {step}; found {found}")
        try:
            return _read_metadata(self.folder / str(step))
        except CheckpointError as error:
            raise self._damaged(step, str(error)) from error

    def _damaged(self, step: int, what: str) -> CheckpointError:
        """Says `what` is wrong with `step`, and which older checkpoint is not."""
        for older in (older for older in reversed(self.steps()) if older < step):
            with contextlib.suppress(CheckpointError):
                _read_metadata(whole := self.folder / str(older))
                return CheckpointError(f"{what}; an older checkpoint is whole: resume={whole}, or {whole} in its place")
        return CheckpointError(what)

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        # Orbax has dropped older steps from its list by now; a new checkpointer reads them from disk again.
        if self._orbax is not None:
            with contextlib.suppress(Exception):
                self._orbax.close()
            self._orbax = None
        shutil.rmtree(self.folder / f"{step}{_TEMPORARY}", ignore_errors=True)
        newest = self.latest()
        kept = "there is no earlier one" if newest is None else f"the newest whole one is step {newest}"
        return CheckpointError(f"{self.folder / str(step)}: could not be saved ({_reason(error)}); {kept}")


class PieceWriter:
    """A checkpoint whose leaves are written piece by piece, by any thread, and which `commit` makes step `step`.

    Until then it lies in a folder beside the steps. A writer of the same `identity` goes on from the pieces that a process
    that was killed had written. Every piece is a file: uncompressed chunks of Zarr 3, in the layout Orbax restores. Of several
    processes all make one and call its `commit`; which of them writes a piece does not matter.

    Raises `CheckpointError` if the step exists, or the beginning of another one does.

    Example:
        >>> writer = PieceWriter("imported/checkpoints", 0, leaves, {"kind": "weights"}, "of k3-2026")
        >>> for name, leaf in leaves.items():
        ...     for box in leaf.boxes():
        ...         if not writer.has(name, box):
        ...             writer.write(name, box, leaf.read(box))
        >>> writer.commit()
    """

    def __init__(self, folder: str | Path, step: int, leaves: Mapping[tuple[str, ...], Pieced], meta: dict, identity: str):
        self.folder, self.step, self._leaves = Path(folder).absolute(), step, leaves
        self._unfinished = self.folder / _UNFINISHED
        if steps := _step_folders(self.folder):
            raise CheckpointError(f"{self.folder}: already holds step {steps[-1]}; choose another folder")
        found = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if strange := sorted(name for name in found if not name.startswith(_UNFINISHED)):
            raise CheckpointError(f"{self.folder}: already holds {strange[0]}; choose another folder")
        begun = self._unfinished.exists()
        meet("looked")  # before any changes it
        if not begun:
            self._lay_out(meta, identity)
        file = self._unfinished / _IDENTITY
        if _size(file) is None or file.read_bytes() != identity.encode():
            raise CheckpointError(f"{self._unfinished}: holds the beginning of another import; remove it first")

    def has(self, path: tuple[str, ...], box: Box) -> bool:
        leaf = self._leaves[path]
        return _size(self._file(path, box)) == leaf.dtype.itemsize * int(np.prod(leaf.piece))

    def write(self, path: tuple[str, ...], box: Box, values: np.ndarray) -> None:
        """Writes a piece: a box of the leaf's `boxes()`."""
        peers.note("works", "writes pieces")
        missing = [(0, step - size) for step, size in zip(self._leaves[path].piece, values.shape, strict=True)]
        if any(after for _, after in missing):  # chunks at the end are stored in full size
            values = np.pad(values, missing)
        _write(self._file(path, box), memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8)))

    def commit(self) -> None:
        """Makes the pieces, of which none may be missing, a checkpoint."""
        meet("written")
        if jax.process_index() == 0:
            for path, leaf in self._leaves.items():
                for box in leaf.boxes():
                    if not self.has(path, box):
                        raise CheckpointError(f"{self._file(path, box)}: missing; it was removed while the others were written")
            os.rename(self._unfinished, self.folder / str(self.step))
            _sync(self.folder)
        meet("committed")

    def _file(self, path: tuple[str, ...], box: Box) -> Path:
        return _piece(self._unfinished / _ARRAYS / ".".join(path), self._leaves[path].piece, box)

    def _lay_out(self, meta: dict, identity: str) -> None:
        """Has Orbax save arrays of one value, which takes all processes; process 0 makes them as large as they will be."""
        skeleton, first = self.folder / f"{_UNFINISHED}.new", jax.process_index() == 0
        if first:
            for left in (skeleton, skeleton.with_name(skeleton.name + _TEMPORARY)):
                shutil.rmtree(left, ignore_errors=True)
        meet("cleared")
        context = ocp.Context()
        context.array.saving.use_ocdbt = False
        # Otherwise threads wait for minutes for a folder that could not be made.
        context.asynchronous.create_directories_asynchronously = False
        tree: dict = {}
        for path, leaf in self._leaves.items():
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = np.zeros(1, leaf.dtype)
        try:
            with context:
                ocp.save(skeleton, tree, custom_metadata=meta)
        except OSError:
            raise
        except Exception as error:
            raise OSError(_reason(error)) from error
        if first:
            for path, leaf in self._leaves.items():
                _enlarge(skeleton / _ARRAYS / ".".join(path), leaf)
            _write(skeleton / _IDENTITY, identity.encode())
            os.rename(skeleton, self._unfinished)
        meet("laid out")


def _enlarge(folder: Path, leaf: Pieced) -> None:
    """Turns an array of one value on disk into one of a leaf's shape without any."""
    description = json.loads((folder / "zarr.json").read_text())
    description["shape"] = leaf.shape
    description["chunk_grid"]["configuration"]["chunk_shape"] = leaf.piece
    endian = {"configuration": {"endian": "little"}} if leaf.dtype.itemsize > 1 else {}
    description["codecs"] = [{"name": "bytes", **endian}]
    _write(folder / "zarr.json", json.dumps(description).encode())
    shutil.rmtree(folder / "c")


def _piece(array: Path, piece: tuple[int, ...], box: Box) -> Path:
    """The file that holds a piece of an array, a chunk of Zarr 3."""
    return array.joinpath("c", *(str(part.start // step) for part, step in zip(box, piece, strict=True)))


def _open(folder: Path, name: str, leaf: Any, failed: Callable[[str], CheckpointError]) -> Pieced:
    """An array of a step on disk: a folder of files, or an entry of the database that Orbax keeps small files in."""
    if (folder / name).exists():
        store = {"driver": "file", "path": f"{folder / name}/"}
    else:
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    specification = {"driver": "zarr3", "kvstore": store, "fill_missing_data_reads": False}

    def read(box: Box) -> np.ndarray:
        try:
            return ts.open(specification, read=True, open=True).result()[box].read().result()
        except ValueError as error:
            raise failed(f"{folder.parent}: '{name}' cannot be read ({_reason(error)})") from error

    return Pieced(tuple(leaf.shape), np.dtype(leaf.dtype), tuple(leaf.storage_metadata.chunk_shape), read)


def _write(file: Path, content: bytes | memoryview) -> None:
    """Writes a file that is whole, and on disk, or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with open(part, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    os.rename(part, file)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_metadata(path: Path):
    """What Orbax has noted of a step beside its arrays' values."""
    try:
        metadata = ocp.metadata(path)
    except Exception as error:
        raise CheckpointError(_unreadable(path, _reason(error))) from error
    if not _leaves(metadata.metadata):  # Orbax shrugs off damaged indices here
        raise CheckpointError(_unreadable(path, "its arrays are missing or damaged"))
    return metadata


def _unreadable(path: Path, reason: str) -> str:
    """Why a step cannot be read: the file at fault, where that is one of the small ones beside the arrays."""
    arrays = path / _ARRAYS
    notes = [path / _COMMITTED[0], arrays / "_METADATA", arrays / "_sharding", *sorted(arrays.glob("*/process_*"))]
    for file in (*notes, *(values.with_name("zarr.json") for values in sorted(arrays.glob("*/c")))):
        try:
            what = "no JSON object" * (not isinstance(json.loads(file.read_bytes()), dict))
        except FileNotFoundError:
            what = "missing" * (file.name in ("_METADATA", "zarr.json"))  # of the others a step need not have all
        except (OSError, ValueError, RecursionError) as error:
            what = " ".join(str(error.strerror if isinstance(error, OSError) else error).split())
        if what:
            return f"{file}: damaged ({what})"
    for file in (arrays / "manifest.ocdbt", *sorted((arrays / "d").glob("*"))):
        if not _size(file) and not any(arrays.glob("*/c")):
            return f"{file}: missing or empty"
    return f"{path}: cannot be read ({reason})"


def _size(file: Path) -> int | None:
    """Bytes of a file, None for what is none."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _steps(folder: Path) -> list[int]:
    steps = _step_folders(folder)
    return [step for step in steps if all((folder / str(step) / name).exists() for name in _COMMITTED)]


def _step_folders(folder: Path) -> list[int]:
    """What Orbax takes for checkpoints: it trusts a folder's name, which one copied in part has as well."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, in which tuples and lists, and named tuples and dicts, look alike."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _check(path: Path, found: dict[str, Any], wanted: dict[str, Any], partial: bool, widen: bool) -> None:
    for name, leaf in wanted.items():
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise CheckpointError(f"{path}: '{name}' is {_describe(leaf)}, which needs jax_enable_x64")
    missing = [name for name in wanted if name not in found]
    extra = [] if partial else [name for name in found if name not in wanted]
    wrong = [f"'{name}' is missing, expected {_describe(wanted[name])}" for name in missing]
    wrong += [f"'{name}' is not expected, found {_describe(found[name])}" for name in extra]
    wrong += [
        f"'{name}': found {_describe(found[name])}, expected {_describe(leaf)}"
        for name, leaf in wanted.items()
        if name in found and _describe(found[name]) != _describe(leaf) and not (widen and _widens(found[name], leaf))
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        raise CheckpointError(f"{path}: {wrong[0]}{more}")


def _widens(found: Any, wanted: Any) -> bool:
    floats = jnp.issubdtype(found.dtype, jnp.floating) and jnp.issubdtype(wanted.dtype, jnp.floating)
    return floats and found.shape == wanted.shape and np.promote_types(found.dtype, wanted.dtype) == wanted.dtype


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text
