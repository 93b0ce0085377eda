"""KDA over 65,536 tokens: the chunked form against the recurrence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import kda, l2norm

T, K, V = 65536, 8, 8


@pytest.mark.parametrize("bound", [-5.0, None])
def test_chunked_is_the_scan(bound):
    """Outputs, final state and all gradients, with channels that forget at once and channels that never do."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))  # noqa: E731
    q, k = (l2norm(draw(1, T, 1, K)) for _ in range(2))
    g = -jnp.asarray(rng.uniform(size=(1, T, 1, K)) * np.geomspace(1 / T, -bound if bound else 40.0, K))
    # The first half overwrites what it remembers all the time, the second hardly adds to it.
    beta = jnp.asarray(rng.uniform(size=(1, T, 1)) * np.where(np.arange(T) < T // 2, 1, 10 / T)[:, None])
    inputs = (q * K**-0.5, k, draw(1, T, 1, V), g, beta, draw(1, 1, K, V))
    cotangents = draw(1, T, 1, V), draw(1, 1, K, V)

    @partial(jax.jit, static_argnums=0)
    def run(impl, inputs, cotangents):
        results, vjp = jax.vjp(partial(kda, gate_lower_bound=bound, impl=impl), *inputs)
        return *results, *vjp(cotangents)

    names = "o", "final_state", "q", "k", "v", "g", "beta", "initial_state"
    found, expected = (run(impl, inputs, cotangents) for impl in ("chunked", "scan"))
    for name, x, y in zip(names, found, expected, strict=True):
        error = float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))
        assert error <= 1e-9, (name, error)
