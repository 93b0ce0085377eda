"""What may be asked of the sampler. Nothing here imports JAX."""

from __future__ import annotations

import math
from numbers import Integral, Real


def ranges(temperature: float, top_k: int, top_p: float) -> tuple[tuple[str, object, bool, str], ...]:
    """(name, value, whether it fits, what fits) of each of `sample`'s settings."""
    real = lambda x: isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)  # noqa: E731
    whole = isinstance(top_k, Integral) and not isinstance(top_k, bool)
    return (
        ("temperature", temperature, real(temperature) and temperature >= 0, "0 or more, and finite"),
        ("top_k", top_k, whole and top_k >= 0, "0 or more, and whole"),
        ("top_p", top_p, real(top_p) and 0 < top_p <= 1, "above 0 and at most 1"),
    )


def check(temperature: float, top_k: int, top_p: float) -> None:
    """Raises ValueError naming the first that does not fit.

    >>> check(0.8, 0, 1.5)
    Traceback (most recent call last):
    ValueError: top_p: found 1.5, must be above 0 and at most 1
    """
    for name, value, fits, right in ranges(temperature, top_k, top_p):
        if not fits:
            raise ValueError(f"{name}: found {value!r}, must be {right}")
