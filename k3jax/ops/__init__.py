"""Pure functions on arrays: no Flax, no mesh, no configuration. Each fast op stands beside its plain reference."""

from k3jax.ops import mx
from k3jax.ops.kda import kda, kda_gate, l2norm

__all__ = ["kda", "kda_gate", "l2norm", "mx"]
