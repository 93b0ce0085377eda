"""NaN and infinity in stored values, looked for at the speed of memory: in what is imported and in what is exported."""

from __future__ import annotations

import numpy as np

from k3jax.hf.names import NAN_SCALE, Leaf

_TOGETHER = 2**18  # bytes that stay in a core's cache between two looks at them


def not_finite(leaf: Leaf, values: np.ndarray) -> np.ndarray | None:
    """Which of a leaf's values, before or after they are in its stored type, are no numbers; None where all are.

    Of packed experts the scales alone can be none.
    """
    if leaf.is_scale:
        return values == NAN_SCALE if values.max(initial=0) == NAN_SCALE else None
    if leaf.is_packed and values.dtype == np.uint8:
        return None
    return None if all_finite(values) else ~np.isfinite(values)


def all_finite(values: np.ndarray) -> bool:
    """Whether no float of any width is NaN or infinite.

    As bits, with and without a sign, what is finite lies below infinity and below minus infinity: no value is computed and
    none is written.

    Example:
        >>> all_finite(np.array([1.0, np.inf], np.float32))
        False
    """
    size, values = values.itemsize, values.reshape(-1)
    infinities = np.array([np.inf, -np.inf], values.dtype)
    above, below = infinities.view(f"i{size}")[0], infinities.view(f"u{size}")[1]
    signed, unsigned = values.view(f"i{size}"), values.view(f"u{size}")
    step = _TOGETHER // size
    return all(
        signed[i : i + step].max() < above and unsigned[i : i + step].max() < below
        for i in range(0, values.size, step)
    )
