"""Token ids: one meaning for those outside the vocabulary, on any number of devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from k3jax.tokens import check_tokens


def refuse_unknown(ids, size: int, where=None, name: str = "token") -> None:
    """`check_tokens` of ids that are known; a traced program cannot refuse them, nor a process what others hold."""
    arrays = [x for x in (ids, where) if x is not None]
    if all(not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True) for x in arrays):
        check_tokens(ids, size, None if where is None else np.asarray(where) > 0, name)


def in_range(ids: Array, size: int) -> Array:
    """ids as int32, those that are not in 0..size-1 as `size`: neither counted from the end, nor wrapped around.

    Example:
        >>> in_range(jnp.array([-1, 3, 9]), 4).tolist()
        [4, 3, 4]
    """
    ids = jnp.asarray(ids)
    wide = ids if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)
    return jnp.where((wide >= 0) & (wide < size), wide, size).astype(jnp.int32)
