"""Heads and widths over pairs of devices, all weights over the rest: half the activations that fsdp holds.

Communicates: as fsdp over the rest (of half the weights), as tp within a pair.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(fsdp=-1, tensor=2)
