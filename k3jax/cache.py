"""What decoding remembers: a KDA layer's state and convolution tails, an MLA layer's latents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import Array, lax
from jax.sharding import NamedSharding

from k3jax.config import ModelConfig
from k3jax.ops.kda import accumulator
from k3jax.rules import multiple
from k3jax.sharding import constrain, current_mesh, filled, spec, ways

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
    """State of `batch` sequences that have seen `length` tokens of at most `max_len`. B is `batch`, or with empty rows
    what the mesh splits evenly.

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
    batch: int = flax.struct.field(pytree_node=False)

    @property
    def rows(self) -> int:
        return self.present.shape[0]

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


def with_rows(cache: Cache, rows: int) -> Cache:
    """`cache` with empty rows added at the end, or cut off there."""
    if rows == cache.rows:
        return cache
    resized = lambda x, lead: filled(x, (*lead, rows))[(*map(slice, lead), slice(rows))]  # noqa: E731
    layers = jax.tree.map(lambda x: resized(x, x.shape[:1]), cache.layers)
    return cache.replace(present=resized(cache.present, ()), layers=layers)


def written(cached: Array, new: Array, at: Sequence[Array | int], axis: int) -> Array:
    """`cached` with `new` from `at` on, of which at[axis] is a fill; in place where nothing else reads it.

    What does not fit along `axis` is left out: XLA moves such an update back to where it does, over what is there, so
    that what is there is put back.
    """
    new, T = new.astype(cached.dtype), new.shape[axis]
    first = jnp.minimum(at[axis], cached.shape[axis] - T)
    moved, at = at[axis] - first, (*at[:axis], first, *at[axis + 1 :])
    new = jnp.roll(new, moved, axis) if T > 1 else new
    fits = lax.broadcasted_iota(jnp.int32, new.shape, axis) >= moved
    return lax.dynamic_update_slice(cached, jnp.where(fits, new, lax.dynamic_slice(cached, at, new.shape)), at)


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
    and token. Under `jax.set_mesh` it is made where `cache_shardings` says, with as many rows as the mesh splits.

    Raises:
        ValueError: sizes that are not positive, a dtype of no floating kind, or heads that the mesh does not split.

    Example:
        >>> cache = init_cache(cfg, batch=1, max_len=4096)
        >>> out = model.apply(variables, prompt, cache=cache)      # prefill
        >>> out = model.apply(variables, token, cache=out.cache)   # decode
    """
    if batch < 1 or max_len < 1:
        raise ValueError(f"batch, max_len: found {batch}, {max_len}; both must be positive")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype: found {jnp.dtype(dtype)}, must be a floating one")
    rows = multiple(batch, ways("batch", current_mesh()))
    layers = {
        segment: {
            layer: {name: _zeros(shape, jnp.dtype(dtype), _AXES[name]) for name, (shape, dtype) in arrays.items()}
            for layer, arrays in kinds.items()
        }
        for segment, kinds in _layout(cfg, rows, max_len, dtype).items()
    }
    present = _zeros((rows, max_len), jnp.dtype(jnp.int32), _AXES["present"])
    return Cache(jnp.zeros((), jnp.int32), present, layers, batch)


def _layout(cfg: ModelConfig, rows: int, max_len: int, dtype) -> dict[str, dict[str, dict[str, tuple]]]:
    """(shape, dtype) of every array of `Cache.layers`."""
    H, K = cfg.kda_num_heads, cfg.kda_head_dim

    def arrays(mixer, repeats):
        lead = repeats, rows
        if mixer == "mla":
            sizes = {"latent": cfg.kv_lora_rank, "k_rope": cfg.qk_rope_head_dim}
            return {name: ((*lead, max_len, size), dtype) for name, size in sizes.items()}
        tail = (*lead, cfg.short_conv_kernel_size - 1, H, K), dtype
        return {"state": ((*lead, H, K, K), accumulator(dtype)), "q_conv1d": tail, "k_conv1d": tail, "v_conv1d": tail}

    return {
        f"segment_{s}": {f"layer_{j}": arrays(kind.mixer, repeats) for j, kind in enumerate(unit)}
        for s, (unit, repeats) in enumerate(cfg.segments)
    }


def _zeros(shape: tuple[int, ...], dtype, axes) -> Array:
    return jnp.zeros(shape, dtype) if current_mesh() is None else _placed_zeros(shape, dtype, axes)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _placed_zeros(shape, dtype, axes):
    """Never whole on one device."""
    return constrain(jnp.zeros(shape, dtype), *axes)


def check_cache(cfg: ModelConfig, cache: Cache, batch: int, new: int) -> None:
    """Refuses a cache that is not one of this model, of so many rows, with room for `new` more tokens in each.

    Raises:
        ValueError: one line that says what does not fit. How full it is, a traced program does not know.
    """
    if cache.batch != batch:
        raise ValueError(f"cache: found batch {cache.batch}, must be {batch} like tokens")
    if new > cache.max_len:
        raise ValueError(f"cache: found max_len {cache.max_len}, must hold at least the {new} new tokens")
    if not isinstance(cache.length, jax.core.Tracer) and int(cache.length) + new > cache.max_len:
        room = f"length {cache.length} of max_len {cache.max_len}"
        raise ValueError(f"cache: found {room}, must leave room for the {new} new tokens")
    found = flatten_dict(cache.layers, sep="/")
    for name, (shape, _) in flatten_dict(_layout(cfg, cache.rows, cache.max_len, jnp.float32), sep="/").items():
        x = found.pop(name, None)
        if x is None or x.shape != shape:
            what = "nothing" if x is None else f"shape {x.shape}"
            raise ValueError(f"cache: found {what} for {name}, must be {shape} as `init_cache` makes it for this model")
        wide = name.endswith("/state")
        if not jnp.issubdtype(x.dtype, jnp.floating) or (wide and x.dtype != accumulator(x.dtype)):
            right = "float32 or wider" if wide else "a floating one"
            raise ValueError(f"cache: found dtype {x.dtype} for {name}, must be {right}")
    if found:
        raise ValueError(f"cache: found {next(iter(found))}, which this model does not have")
