"""Expert parallelism: each device holds its part of the routed experts, and all of the dense weights.

For models whose weights are mostly experts. Communicates: the latents of every token to its experts and back
(all-to-all; it grows with the tokens), and the sum of the dense weights' gradients.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(expert=-1)
