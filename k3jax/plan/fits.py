"""Whether a training run fits the devices it is about to start on, before its compiler starts."""

from __future__ import annotations

from k3jax.plan.analytic import arguments
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.memory import temporaries
from k3jax.plan.setting import Strategy, Train
from k3jax.run_config import RunConfig

_SURE = 0.75  # of the temporaries, which are estimated to a quarter; arguments are exact


def expected(config: RunConfig) -> tuple[float, float]:
    """(bytes a device that the planner expects a training step to hold, the least of them that is sure), on a mesh without -1.

    Example:
        >>> expected(load_config("configs/quickstart.py"))[0] / 2**20 < 100
        True
    """
    options = {name: getattr(config.train, name) for name in ("qat", "remat", "grad_accum")}
    workload, strategy = Train(batch=config.data.batch_size, sequence=config.data.seq_len, **options), Strategy(config.mesh)
    given = sum(arguments(config.model, workload, strategy).values())
    hardware = next(iter(HARDWARE.values()))  # a training step holds the same on all
    held = sum(temporaries(config.model, workload, strategy, hardware).values())
    return given + held, given + _SURE * held


def fits(config: RunConfig, there: int) -> str:
    """What is expected of a device with so many bytes, in one line.

    Raises:
        ValueError: one line, where they are too few for certain.
    """
    needed, least = expected(config)
    line = f"a device holds {needed / 1e9:.3g} GB by the planner's estimate, and has {there / 1e9:.3g} GB"
    if least > there:
        mesh = " ".join(f"mesh.{axis}={size}" for axis, size in vars(config.mesh).items() if size > 1) or "mesh of one device"
        raise ValueError(f"{mesh}: {line}; `python -m k3jax plan --search` finds a mesh that fits, with train.remat or a smaller batch")
    return line + ", which may be too little" * (needed > there)
