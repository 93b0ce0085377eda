"""Context parallelism: each device holds a stretch of every sequence, and the whole model.

For sequences that do not fit a device. Communicates: per KDA layer one summary of a stretch and three tokens of the
convolutions' inputs, per MLA layer the gathered latents, and the sum of all gradients.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(context=-1)
