"""What the commands share in refusing an option."""

from __future__ import annotations


def check(*options: tuple[str, object, bool, str]) -> None:
    """(name, value, whether it fits, what fits) of each option."""
    for name, value, fits, right in options:
        if not fits:
            raise ValueError(f"--{name} {value}: must be {right}")
