"""Tensor parallelism: heads, feed-forward widths, vocabulary, experts, and between sublayers each sequence, in parts.

For small batches on devices with fast links, at most as many as there are heads. Communicates: the activations of
every sublayer, gathered before it and summed in parts after it.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(tensor=-1)
