"""Fully sharded data parallelism: weights, gradients and optimizer state in parts, the batch in the same parts.

For models that do not fit a device, where the batch is large enough for all. Communicates: every layer's weights,
gathered where they are used, and the sum of their gradients; it grows with the weights, not with the tokens.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(fsdp=-1)
