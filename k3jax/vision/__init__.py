"""From images to what the model takes: `preprocess` makes patches of an image or clip, `pack` the arrays of a batch."""

__all__ = ["Images", "Patches", "pack", "prepare", "preprocess", "widen"]


def __getattr__(name):
    # Lazily, so that sizes and patches need no JAX.
    if name in ("Patches", "preprocess"):
        from k3jax.vision import image as home
    elif name in __all__:
        from k3jax.vision import batch as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)
