"""What decoding remembers: a KDA layer's state and convolution tails, an MLA layer's latents."""

from __future__ import annotations

from typing import Any

import flax
import jax.numpy as jnp
from jax import Array

from k3jax.config import ModelConfig
from k3jax.ops.kda import accumulator


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
