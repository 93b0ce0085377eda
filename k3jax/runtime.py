"""Sets JAX up: around compilers that are known to be wrong, and for a command its devices, processes and compiled programs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import platform
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, NoReturn

from k3jax import peers, signals
from k3jax.run_config import ProcessesConfig

_HEARTBEAT_SECONDS = 300  # of JAX, which ends all with a stack of C++; `peers` notices sooner, and names who is missing
_ECHO_SECONDS = 10  # that a failed collective keeps silent: whoever started the processes ends them before
_AGREE_MS = 7_200_000  # a process that died or is stuck is noticed by `peers`
_HOST_SECONDS = 1  # for which process 0, which the others talk through, outlives what it has told them
_agreements = itertools.count()


class Fault(NamedTuple):
    """What a compiler is known to get wrong, in which versions of jaxlib (both included), and the flag of XLA that cures it."""

    what: str
    issues: tuple[int, ...]  # of github.com/jax-ml/jax
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    cure: str


FAULTS = (
    Fault(
        "wrong numbers from products that are summed, and crashes at ranks of 7 and 8, on CPU",
        (39103, 39257, 40412),
        (0, 10, 2),
        (0, 11, 0),
        "--xla_cpu_experimental_ynn_fusion_type=",
    ),
)


def cure() -> None:
    """Sets the flags of XLA that the installed jaxlib needs to be right, here and in child processes; `import k3jax` calls it.

    XLA reads its flags when JAX is first used. Raises `ImportError`, one line, where that was before and they were not set.

    Example:
        >>> cure()  # in jaxlib 0.10.2
        >>> os.environ["XLA_FLAGS"]
        '--xla_cpu_experimental_ynn_fusion_type='
    """
    installed = metadata.version("jaxlib")
    version = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    flags = os.environ.get("XLA_FLAGS", "").split()
    for fault in FAULTS:
        if not fault.first <= version <= fault.last or fault.cure in flags:
            continue
        bridge = sys.modules.get("jax._src.xla_bridge")
        if bridge is not None and bridge.backends_are_initialized():
            raise ImportError(
                f"jaxlib {installed} was used before k3jax was imported, without {fault.cure}: {fault.what} (JAX issue "
                f"{fault.issues[0]}); import k3jax before the first use of JAX, or set XLA_FLAGS={fault.cure}"
            )
        flags.append(fault.cure)
        os.environ["XLA_FLAGS"] = " ".join(flags)


def setup(cpu_devices: int = 0, processes: ProcessesConfig = ProcessesConfig()) -> None:
    """Call before the first use of JAX.

    `cpu_devices` > 0 runs on that many simulated CPU devices, an equal share in each of the `processes`; 0 on the
    machine's own. Returns when all processes are there. Compiled programs are kept in `$K3JAX_CACHE`, or
    `~/.cache/k3jax/xla`, apart for every compiler and kind of processor; where that cannot be written, one line says so and
    the run goes on without. What is damaged there is compiled anew.

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


def agree(settings: Mapping[str, object], mistake: Exception | None = None) -> None:
    """Returns when all processes have called it, with the same settings and without a mistake of the user's.

    Raises in every process `ValueError`, one line: the mistake, with the process it was made in, or the first setting that
    differs from process 0's. All make the same calls in the same order. Of one process it raises the mistake.
    """
    from jax._src import distributed  # the store that the processes met over; as reachable before any device is used

    client, mine = distributed.global_state.client, distributed.global_state.process_id
    if client is None:
        if mistake is not None:
            raise mistake
        return
    peers.note("waits", "to compare settings")
    place = f"k3jax/agree/{next(_agreements)}"
    texts = {key: " ".join(str(value).split()) for key, value in settings.items()}
    if mine == 0:
        client.key_value_set(f"{place}/settings", json.dumps(texts))
    first = json.loads(client.blocking_key_value_get(f"{place}/settings", _AGREE_MS))
    differing = [key for key in first | texts if first.get(key) != texts.get(key)]
    verdict = ""
    if mistake is not None:
        verdict = " ".join(str(mistake).split())
    elif differing:
        key, more = differing[0], f" (and {len(differing) - 1} more)" if differing[1:] else ""
        found = f"{first.get(key)} in process 0, {texts.get(key)} in process {mine}"
        verdict = f"{key}: {found}{more}; all processes need the same settings"
    made = "" if mistake is None else "made"
    client.key_value_set(f"{place}/verdict/{mine:06}", json.dumps([made, verdict]))
    client.wait_at_barrier(f"{place}/given", _AGREE_MS)
    verdicts = [json.loads(text) for _, text in sorted(client.key_value_dir_get(f"{place}/verdict"))]
    client.wait_at_barrier(f"{place}/read", _AGREE_MS)
    peers.note("works", "with the others' settings compared")
    if not any(text for _, text in verdicts):
        return
    if mine == 0:
        time.sleep(_HOST_SECONDS)
    if mistake is not None:
        raise mistake
    # A mistake comes first: other settings may be its consequence.
    index = next((i for i, (made, _) in enumerate(verdicts) if made), None)
    if index is not None:
        raise ValueError(f"process {index}: {verdicts[index][1]}")
    raise ValueError(verdict or next(text for _, text in verdicts if text))


def versions() -> dict[str, str]:
    """What besides the settings decides what a process computes, for `agree`."""
    import jax

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_dtypes")
    found = {name: metadata.version(name) for name in packages}
    found["k3jax"] = digest(*sorted(Path(__file__).parent.rglob("*.py")))
    found["Python"] = "{}.{}".format(*sys.version_info)
    found["jax_enable_x64"] = jax.config.jax_enable_x64
    found["jax_default_matmul_precision"] = jax.config.jax_default_matmul_precision
    found["devices"] = f"{jax.local_device_count()} of {jax.local_devices()[0].device_kind}"
    return found


def digest(*files: str | Path) -> str:
    """Tells texts of files apart."""
    found = hashlib.sha256()
    for file in files:
        found.update(Path(file).read_bytes())
    return found.hexdigest()[:12]


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """For what several processes do together, and end together: the message to be read is that of the process that failed.

    Whoever started the processes ends the others when one has ended, which `end` makes it do as soon as it is told.
    """
    import jax

    try:
        yield
    except signals.Stopped:
        peers.close()
        if jax.process_index() == 0 and jax.process_count() > 1:
            time.sleep(_HOST_SECONDS)
        raise
    except jax.errors.JaxRuntimeError:
        if peers.peers is not None:
            peers.peers.note("waits", "has failed")
            time.sleep(_ECHO_SECONDS)  # most often the echo of another process' failure
            peers.peers.await_verdict()
        raise
    peers.close()


def end(code: int) -> NoReturn:
    """Ends this process; after a failure at once, with nothing waited for.

    Python would wait for threads that Orbax has left behind, and JAX for other processes, which may wait for this one.
    """
    with contextlib.suppress(OSError, ValueError):  # a reader that left
        sys.stdout.flush()
        sys.stderr.flush()
    if code:
        os._exit(code)
    sys.exit(0)


def _join(jax, processes: ProcessesConfig) -> None:
    from jax._src import clusters, distributed

    jax.config.update("jax_enable_preemption_service", False)  # takes SIGTERM, which `signals` listens to
    known = processes.coordinator, processes.count, processes.index, None
    try:
        if processes.coordinator == "auto":
            detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
            known = detect(None, None, None, None, None, processes.timeout)
        if known[0] is not None:
            peers.gather(*known[:3], processes.timeout)
        jax.distributed.initialize(*known, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
    except RuntimeError as error:
        raise ValueError(f"processes.coordinator={processes.coordinator}: no meeting of {known[1]} processes ({_line(error)})") from error
    except ValueError as error:
        if known[0] is not None:
            raise
        raise ValueError(f"processes.coordinator={processes.coordinator}: no cluster that JAX knows ({_line(error)})") from error
    peers.begin(distributed.global_state.client, *known[1:3], processes.timeout)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _compiler() -> str:
    """Whose compiled programs run here: versions of JAX and its compilers, and the kind of processor."""
    versions = {}
    for name in ("jax", "jaxlib", "libtpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    known = Path("/proc/cpuinfo")
    lines = known.read_text(errors="replace").splitlines() if known.exists() else [platform.processor()]
    # Of one processor: its name and what it can do, not how fast it runs just now.
    kind = sorted({line for line in lines if re.match(r"vendor_id|model name|flags|Features|CPU part|(?!.*:)", line)})
    processor = hashlib.sha256("\n".join(kind).encode()).hexdigest()[:8]
    return "-".join([*(f"{name}-{version}" for name, version in versions.items()), platform.machine(), processor])


def _keep_programs(jax) -> None:
    folder = Path(os.environ.get("K3JAX_CACHE") or Path.home() / ".cache" / "k3jax" / "xla") / _compiler()
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
    # What another process left half-written, or a full disk, costs a compilation and needs no word.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry", UserWarning)


def show_what_can_be_shown() -> None:
    """What a terminal's encoding cannot show is printed as a question mark, and is no error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what replaces it in tests and notebooks takes any text
            stream.reconfigure(errors="replace")


def shows_colours() -> bool:
    """Whether what is printed may be in colour: in a terminal, unless `NO_COLOR` is set (no-color.org) or it knows none."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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
