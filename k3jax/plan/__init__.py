"""The sharding-strategy planner: what a strategy needs and takes, from shapes alone. Nothing here imports JAX."""
