"""`python -m k3jax <command>`."""

from k3jax.cli import command

command()
