"""Sets JAX up for a command: its devices, the processes it runs in, and the cache of compiled programs."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from k3jax.run_config import ProcessesConfig

_HEARTBEAT_SECONDS = 60  # after which a process that died without a word is given up, and all end
_ECHO_SECONDS = 10  # that a failed collective keeps silent: whoever started the processes ends them before


def setup(cpu_devices: int = 0, processes: ProcessesConfig = ProcessesConfig()) -> None:
    """Call before the first use of JAX.

    `cpu_devices` > 0 runs on that many simulated CPU devices, an equal share in each of the `processes`; 0 on the
    machine's own. Returns when all processes are there. Compiled programs are kept in `$K3JAX_CACHE`, or
    `~/.cache/k3jax/xla`; where that cannot be written, one line says so and the run goes on without.

    Raises `ValueError` if JAX already started with another number of devices, and if the processes do not meet.

    Example:
        >>> setup(8, ProcessesConfig(count=2, index=0, coordinator="localhost:1234"))  # 4 of the 8 devices are here
    """
    import jax

    share = cpu_devices // processes.count
    if cpu_devices and jax.config.jax_num_cpu_devices != share:
        try:
            jax.config.update("jax_num_cpu_devices", share)
        except RuntimeError:
            raise ValueError(
                f"cpu_devices={cpu_devices}: JAX already runs on {jax.device_count()} devices in this process"
            ) from None
    if cpu_devices:
        jax.config.update("jax_platforms", "cpu")
    _keep_programs(jax)
    if processes.coordinator:
        _join(jax, processes)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """A failure inside ends this process as soon as it is told, and with it all that work with it.

    Without, JAX would wait at exit for the other processes, which wait for this one.
    """
    import jax

    try:
        yield
    except BaseException as error:
        if jax.distributed.is_initialized():
            code = 2 if isinstance(error, (ValueError, OSError)) else 130 if isinstance(error, KeyboardInterrupt) else 1
            atexit.register(_exit, code)  # runs before what JAX registered
            if isinstance(error, jax.errors.JaxRuntimeError):
                # Most often the echo of another process' failure, whose message is the one to be read.
                time.sleep(_ECHO_SECONDS)
        raise


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(jax, processes: ProcessesConfig) -> None:
    known = {}
    if processes.coordinator != "auto":
        known = {
            "coordinator_address": processes.coordinator,
            "num_processes": processes.count,
            "process_id": processes.index,
        }
    try:
        jax.distributed.initialize(**known, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
    except (ValueError, RuntimeError) as error:
        what = f"no meeting of {processes.count} processes" if known else "no cluster that JAX knows"
        reason = " ".join(str(error).split())
        raise ValueError(f"processes.coordinator={processes.coordinator}: {what} ({reason})") from error


def _keep_programs(jax) -> None:
    folder = Path(os.environ.get("K3JAX_CACHE") or Path.home() / ".cache" / "k3jax" / "xla")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        print(f"{folder}: cannot be written ({reason}), compiled programs are not kept", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Every program counts: the many small ones together take as long to compile as the large one.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def show_what_can_be_shown() -> None:
    """What a terminal's encoding cannot show is printed as a question mark, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what replaces it in tests and notebooks takes any text
            stream.reconfigure(errors="replace")


def compiler_options() -> dict[str, str] | None:
    """For the compiler of a step, of JAX's default platform.

    Left alone, TPU 7x's lays 16-bit weights out anew before they are multiplied: all of them, at once, in every step. And
    TPUs' breaks a product with an operand to be gathered into a ring of small ones, once for every product that the operand
    has: more is sent and there is more to compile. (That what a ring hides is less is reasoned, not measured.)
    """
    import jax

    if jax.default_backend() != "tpu" or jax.__version_info__ < (0, 12):
        return None
    return {
        "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    }


def peak_memory() -> int:
    """The most bytes of memory that this process has held; unlike `getrusage`, not what its parent held when it began."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
