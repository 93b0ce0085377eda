"""Experts over all devices, heads and widths over pairs: for many experts and a batch too small for ep alone.

Communicates: the all-to-all of ep among all devices, each token from one of a pair; the gathers of tp within a pair.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(expert=-1, tensor=2)
