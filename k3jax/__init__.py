"""k3jax: Kimi K3 and Kimi-Linear in JAX.

Axis letters, in names, docstrings and einsums everywhere: B batch, T query tokens, S key tokens, D width, H heads, K key
size, V value size, L latent, F expert width, E experts, k active experts, N blocks or segments, C chunk.
"""

from importlib import import_module

from k3jax import runtime
from k3jax.config import ModelConfig, VisionConfig

runtime.cure()  # whatever is imported of it, before any of it uses JAX

_HOMES = {
    "K3": "k3jax.nn.model",
    "init_cache": "k3jax.cache",
    "load_hf": "k3jax.hf.load",
    "make_mesh": "k3jax.sharding",
    "save_hf": "k3jax.hf.save",
}

__all__ = ["ModelConfig", "VisionConfig", "chat", "ops", "text", "vision", *_HOMES]


def __getattr__(name: str):
    # Loaded when first used, so that the command line can answer --help without JAX.
    if name in ("chat", "ops", "text", "vision"):
        return import_module(f"k3jax.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'k3jax' has no attribute {name!r}")
