"""What decoding remembers: a KDA layer's state and convolution tails, an MLA layer's latents."""

from __future__ import annotations

from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from k3jax.config import ModelConfig
from k3jax.ops.kda import accumulator
from k3jax.sharding import spec

# Logical axes of a cache's arrays; every array of `layers` has the segment's repeats in front.
_AXES = {
    "length": (),
    "present": ("batch", None),
    "state": (None, "batch", "heads", None, None),
    "q_conv1d": (None, "batch", None, "heads", None),
    "k_conv1d": (None, "batch", None, "heads", None),
    "v_conv1d": (None, "batch", None, "heads", None),
    "latent": (None, "batch", None, None),
    "k_rope": (None, "batch", None, None),
}


@flax.struct.dataclass
class Cache:
    """State of `batch` sequences that have seen `length` tokens of at most `max_len`.

    Attributes:
        length: int32 scalar, the same for all rows: padding takes a place too.
        present: [B,S] int32, 1 where the cached token is real.
        layers: {"segment_s": {"layer_j": arrays}}, stacked over the segment's repeats r:
            KDA: state [r,B,H,K,V] float32, q_conv1d, k_conv1d, v_conv1d [r,B,3,H,K] (last inputs of the convolutions);
            MLA: latent [r,B,S,L] and k_rope [r,B,S,R].
    """

    length: Array
    present: Array
    layers: dict[str, Any]

    @property
    def max_len(self) -> int:
        return self.present.shape[1]


def cache_shardings(cache: Cache, mesh) -> Cache:
    """Where a cache (or its shapes) lies on a mesh: rows over the batch axes, KDA heads over the tensor axis. A row's latents,
    which all heads read, are whole on every device of the tensor axis.

    Example:
        >>> cache = jax.device_put(init_cache(cfg, 8, 4096), cache_shardings(shapes, mesh))
    """

    def one(path, x):
        name = path[-1].name if hasattr(path[-1], "name") else path[-1].key
        return NamedSharding(mesh, spec(_AXES[name], x.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, cache)


def layer_cache(stacks: dict[str, Array], repeat: Array) -> dict[str, Array]:
    """One layer's arrays out of those of all the repeats of its segment."""
    return {name: lax.dynamic_index_in_dim(stack, repeat, 0, keepdims=False) for name, stack in stacks.items()}


def with_layer_cache(stacks: dict[str, Array], repeat: Array, layer: dict[str, Array]) -> dict[str, Array]:
    """`stacks` with one layer's arrays replaced, in their own dtypes; in place where nothing else reads them."""
    put = lambda stack, x: lax.dynamic_update_index_in_dim(stack, x.astype(stack.dtype), repeat, 0)  # noqa: E731
    return {name: put(stack, layer[name]) for name, stack in stacks.items()}


def init_cache(cfg: ModelConfig, batch: int, max_len: int, dtype=jnp.float32) -> Cache:
    """An empty cache for up to `max_len` tokens a row; latents and tails in `dtype`, KDA states float32 or wider.

    Bytes: the facts' 4 H K V a KDA layer and row whatever the length, and (L + R) elements of `dtype` an MLA layer, row
    and token.

    Example:
        >>> cache = init_cache(cfg, batch=1, max_len=4096)
        >>> out = model.apply(variables, prompt, cache=cache)      # prefill
        >>> out = model.apply(variables, token, cache=out.cache)   # decode
    """
    if batch < 1 or max_len < 1:
        raise ValueError(f"batch, max_len: found {batch}, {max_len}; both must be positive")
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    tail = (batch, cfg.short_conv_kernel_size - 1, H, K)

    def layer(kind, repeats):
        if kind.mixer == "mla":
            return {
                "latent": jnp.zeros((repeats, batch, max_len, cfg.kv_lora_rank), dtype),
                "k_rope": jnp.zeros((repeats, batch, max_len, cfg.qk_rope_head_dim), dtype),
            }
        tails = {name: jnp.zeros((repeats, *tail), dtype) for name in ("q_conv1d", "k_conv1d", "v_conv1d")}
        return {"state": jnp.zeros((repeats, batch, H, K, K), accumulator(dtype)), **tails}

    layers = {
        f"segment_{s}": {f"layer_{j}": layer(kind, repeats) for j, kind in enumerate(unit)}
        for s, (unit, repeats) in enumerate(cfg.segments)
    }
    return Cache(jnp.zeros((), jnp.int32), jnp.zeros((batch, max_len), jnp.int32), layers)
