"""Sets JAX up for a command: its devices and the cache of compiled programs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def setup(cpu_devices: int = 0) -> None:
    """Call before the first use of JAX.

    `cpu_devices` > 0 runs on that many simulated CPU devices; 0 on the machine's own. Compiled programs are
    kept in `$K3JAX_CACHE`, or `~/.cache/k3jax/xla`; where that cannot be written, one line says so and the
    run goes on without.

    Raises `ValueError` if JAX already started with another number of devices.
    """
    import jax

    if cpu_devices and jax.config.jax_num_cpu_devices != cpu_devices:
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:
            raise ValueError(
                f"cpu_devices={cpu_devices}: JAX already runs on {jax.device_count()} devices in this process"
            ) from None
    if cpu_devices:
        jax.config.update("jax_platforms", "cpu")

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
