"""Pure functions on arrays: no Flax, no mesh, no configuration. Each fast op stands beside its plain reference."""

from k3jax.ops import mx
from k3jax.ops.kda import compose, kda, kda_gate, l2norm, segment_summary

__all__ = ["compose", "kda", "kda_gate", "l2norm", "mx", "segment_summary"]
