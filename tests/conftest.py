"""Eight simulated devices, float64 available, and strict promotion for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is compilation, and nothing here is timed.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
