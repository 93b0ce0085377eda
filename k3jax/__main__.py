"""`python -m k3jax <command>`, and the command `k3jax`."""

from __future__ import annotations

from typing import NoReturn

from k3jax import signals


def command() -> NoReturn:
    """Listens to signals before all that takes long, then runs what the command line says."""
    signals.listen()
    from k3jax import cli

    cli.command()


if __name__ == "__main__":
    command()
