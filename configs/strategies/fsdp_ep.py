"""Experts over pairs of devices, all weights over the rest: the plain choice for a large mixture of experts.

Communicates: as fsdp over the rest, as ep within a pair. `mesh.expert=8` makes the groups larger.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(fsdp=-1, expert=2)
