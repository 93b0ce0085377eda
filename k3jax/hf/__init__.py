"""Checkpoints of the released layout: import, export, inspection."""

__all__ = ["CheckpointError", "load_hf", "report", "save_hf"]


def __getattr__(name):
    # Lazily, so that inspecting a checkpoint or asking for help imports no JAX.
    if name == "CheckpointError":
        from k3jax.hf.files import CheckpointError as found
    elif name == "load_hf":
        from k3jax.hf.load import load_hf as found
    elif name == "report":
        from k3jax.hf.inspect import report as found
    elif name == "save_hf":
        from k3jax.hf.save import save_hf as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
