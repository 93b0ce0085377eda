"""KDA by the tokamax library: its Pallas kernel on TPUs, its plain XLA form elsewhere, which is a peer to check against.

The library is no dependency: `pip install "tokamax>=0.0.17"`, Python 3.12.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
from jax import Array

CHUNK = 64  # the kernel's; without segments it takes whole chunks only


def installed() -> bool:
    """Whether the library is there and has the op."""
    try:
        return importlib.util.find_spec("tokamax._src.ops.kda.api") is not None
    except ModuleNotFoundError:
        return False


def takes(q: Array, v: Array, state: Array | None, segment_ids: Array | None) -> bool:
    """Whether the kernel can run such a call on this machine's TPUs."""
    if jax.default_backend() != "tpu" or not installed():
        return False
    from tokamax._src.ops.kda import api

    kernel = api.IMPLEMENTATIONS.get("mosaic_tpu")
    segments = segment_ids is None or (state is not None and state.ndim == 5)
    shapes = q.shape[-1] == v.shape[-1] == 128 and q.dtype != jnp.float64
    return segments and shapes and kernel is not None and kernel.supported_on(jax.local_devices()[0])


def kda(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array | None, segment_ids: Array | None):
    """The arguments and results of `k3jax.ops.kda`, padding tokens already without decay and update."""
    if not installed():
        raise ValueError("impl: found 'tokamax', which is not installed; pip install 'tokamax>=0.0.17' (Python 3.12)")
    if segment_ids is not None and (state is None or state.ndim != 5):
        raise ValueError("impl: found 'tokamax', which with segment_ids needs an initial_state [B,N,H,K,V]")
    from tokamax._src.ops.kda import api

    T = q.shape[1]
    tpu = jax.default_backend() == "tpu"
    if segment_ids is None:
        pad = -T % CHUNK
        q, k, v, g, beta = (jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, g, beta))
        state = None if state is None else state[:, None]
    heads_first = (jnp.moveaxis(x, 2, 0) for x in (q, k, v, g, beta))
    o, final = api.kimi_delta_attention(
        *heads_first,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        segment_ids=segment_ids,
        implementation="mosaic" if tpu else "xla",
    )
    return jnp.moveaxis(o, 0, 2)[:, :T], final[:, 0] if segment_ids is None else final
