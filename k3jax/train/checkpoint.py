"""Checkpoints of a run: asynchronous saves that are whole or absent, restored bit for bit onto any mesh.

A run folder keeps them under `checkpoints/<step>`. A step is written beside its final name and renamed when
it is complete, so a save that was killed or ran out of disk never shows up. With several processes the folder is
one that all of them see; each writes and reads what its own devices hold.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

# Orbax logs the traceback of a failed save from each of its threads; here the failure is raised, as one line.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)

_TEMPORARY = ".orbax-checkpoint-tmp"  # suffix of a step that is not whole
_LATE_MS = 3_600_000  # a process that died is noticed by its heartbeat; one that compiles for long is waited for
_meetings = itertools.count()
_COMMITTED = ("_CHECKPOINT_METADATA", "commit_success.txt")  # what a whole step holds besides its arrays


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, read or written, or that does not fit; one line."""


def meet(what: str) -> None:
    """Returns when all processes have called it; all make the same calls in the same order.

    Needs no collective: on CPU, those give up after 30 s if a process is that late.
    """
    multihost.get_barrier_sync_fn()(key=f"k3jax {next(_meetings)} {what}", timeout_ms=_LATE_MS)


def resolve(path: str | Path) -> tuple[Path, int]:
    """(checkpoints folder, step) meant by `path`: a run folder or its checkpoints folder mean the newest.

    Raises `CheckpointError` if there is no whole checkpoint at `path`.

    Example:
        >>> resolve("runs/k3")
        (PosixPath('runs/k3/checkpoints'), 400)
        >>> resolve("runs/k3/checkpoints/200")
        (PosixPath('runs/k3/checkpoints'), 200)
    """
    path = Path(path)
    for folder in (path / "checkpoints", path):
        if steps := _steps(folder):
            return folder, steps[-1]
    if path.name.isdecimal() and int(path.name) in _steps(path.parent):
        return path.parent, int(path.name)
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; expected a run folder or one of its checkpoints")
    raise CheckpointError(f"{path}: no whole checkpoint; expected a run folder or one of its checkpoints")


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
        self.folder = Path(folder).absolute()
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
        self.wait()
        newest = self.latest()
        if newest is not None and step <= newest:
            raise CheckpointError(f"{self.folder}: cannot save step {step}, it already holds step {newest}")
        for folder in _step_folders(self.folder):
            if newest is None or folder > newest:  # Orbax would keep it as the newest, and drop this save
                raise CheckpointError(f"{self.folder}/{folder}: not a whole checkpoint; remove it first")
        for name, leaf in _leaves(state).items():
            array = isinstance(leaf, (jax.Array, np.ndarray)) and leaf.size
            if not array or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise CheckpointError(f"{self.folder}: cannot save '{name}', only non-empty number arrays")
        try:
            if self._orbax is None:
                context = ocp.Context()
                # Replicas share the writing of large arrays only: each shape they cut costs a compilation.
                context.array.saving.min_slice_bytes_for_replica_parallel = 2**26
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

    def restore(self, step: int, abstract_state: Any, partial: bool = False) -> tuple[Any, dict[str, Any]]:
        """(state, meta) of `step`, each leaf with the sharding of its `jax.ShapeDtypeStruct`.

        A leaf without a sharding goes to this process' first device. `partial` leaves what `abstract_state` does not
        name unread, e.g. the optimizer's state.

        Raises `CheckpointError` naming the first leaf that is missing, extra, or of another shape or dtype.
        """
        metadata = self._metadata(step)
        path = self.folder / str(step)
        _check(path, _leaves(metadata.metadata), _leaves(abstract_state), partial)
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
            raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error
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
        path = self.folder / str(step)
        try:
            metadata = ocp.metadata(path)
        except Exception as error:
            raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error
        if not _leaves(metadata.metadata):  # Orbax shrugs off damaged indices here
            raise CheckpointError(f"{path}: cannot be read (its arrays are missing or damaged)")
        return metadata

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


def _steps(folder: Path) -> list[int]:
    steps = _step_folders(folder)
    return [step for step in steps if all((folder / str(step) / name).exists() for name in _COMMITTED)]


def _step_folders(folder: Path) -> list[int]:
    """What Orbax takes for checkpoints: it trusts a folder's name, which one copied in part has as well."""
    if not folder.is_dir():
        return []
    return sorted(found.step for found in ocp.path.step.standard_name_format().find_all(folder))


def _leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, in which tuples and lists, and named tuples and dicts, look alike."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _check(path: Path, found: dict[str, Any], wanted: dict[str, Any], partial: bool) -> None:
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
        if name in found and _describe(found[name]) != _describe(leaf)
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        raise CheckpointError(f"{path}: {wrong[0]}{more}")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'", text)
    return os.strerror(int(code[1])) if code else text
