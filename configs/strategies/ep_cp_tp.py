"""Experts, stretches of the sequence, and heads and widths, over pairs of the latter two: everything but fsdp.

Communicates: the all-to-all of ep, the summaries, halos and latents of cp, the gathers of tp.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(expert=-1, context=2, tensor=2)
