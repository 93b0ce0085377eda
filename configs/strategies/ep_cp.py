"""Experts over half of the devices, each sequence over pairs: long sequences through many experts.

Communicates: the all-to-all of ep, and within a pair the summaries, halos and latents of cp.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(expert=-1, context=2)
