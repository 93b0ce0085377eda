"""Experts, heads and widths over fours of devices, all weights over the rest: what the quickstart runs.

Communicates: as fsdp over the rest, the all-to-all of ep within a four, the gathers of tp within a pair.
"""

from k3jax.run_config import MeshConfig

mesh = MeshConfig(fsdp=-1, expert=2, tensor=2)
