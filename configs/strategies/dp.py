"""Data parallelism: every device holds the whole model and takes its part of the batch. For models that fit a device.

Communicates: one all-reduce of all gradients a step.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(data=-1)
