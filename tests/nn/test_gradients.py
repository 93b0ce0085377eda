"""Gradients of the whole model in every number format, by every form of its parts, at lengths where a choice changes."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.nn.model import init_variables
from k3jax.train.step import batch_loss


def batch(T):
    """Two documents in the second row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(256, size=(2, T)).astype(np.int32)
    ids = np.stack([np.ones(T), 1 + (np.arange(T) > T // 2)]).astype(np.int32)
    part = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": ids, "weights": np.ones((2, T), np.float32)}
    return jax.tree.map(jnp.asarray, part)


@cache
def random_variables(cfg):
    """Routing is decided by the biases alone."""
    shapes = jax.eval_shape(lambda: nn.unbox(init_variables(k3jax.K3(cfg), jax.random.key(0))))
    rng = np.random.default_rng(1)
    variables = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), shapes)
    return variables | {"router": jax.tree.map(lambda x: 100 * x, variables["router"])}


@cache
def gradient(cfg, dtype, **settings):
    """(loss, gradients) as a function of parameters, router and a batch."""
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    model = k3jax.K3(cfg, jnp.dtype(dtype), wide, **settings)

    def loss(params, router, part):
        return batch_loss(model, params, router, part, jnp.float32(2))[0]

    return jax.jit(jax.value_and_grad(loss))


FORMS = [
    *({"kda_impl": impl} for impl in ("auto", "scan", "chunked")),
    *({"expert_impl": impl} for impl in ("fixed", "ragged", "plain")),
    {"remat": True},
    {"remat": True, "kda_impl": "scan"},
]
QAT = {"experts": "qat", "mxfp8_inputs": True}


@pytest.mark.parametrize(
    "dtype, forms", [("bfloat16", [*FORMS, QAT, QAT | {"remat": True}]), ("float16", [{}])]  # MX knows no float16
)
def test_types(tiny, dtype, forms):
    variables = random_variables(tiny)
    for T, form in [(1, {}), (7, {})] + [(8, form) for form in forms]:
        run = gradient(tiny, dtype, **form)
        loss, gradients = jax.eval_shape(run, variables["params"], variables["router"], batch(T))
        assert loss.dtype == jnp.float32, (T, form)
        for x, leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves(variables["params"]), strict=True):
            assert (x.shape, x.dtype) == (leaf.shape, leaf.dtype), (T, form)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), pytest.param("float16", 0.01, marks=pytest.mark.slow), ("float32", 1e-4)])
def test_values(tiny, dtype, tolerance):
    """Of float64 but for rounding: leaf by leaf, the root of the mean of squares."""
    variables = random_variables(tiny)
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
    found = gradient(tiny, dtype)(variables["params"], variables["router"], batch(12))
    exact = gradient(tiny, "float64")(wide["params"], wide["router"], batch(12))
    norm = lambda x: float(np.linalg.norm(np.asarray(x, np.float64)))  # noqa: E731
    largest = max(map(norm, jax.tree.leaves(exact[1])))
    leaves = jax.tree_util.tree_leaves_with_path(exact)
    for (path, b), a in zip(leaves, jax.tree.leaves(found), strict=True):
        assert np.all(np.isfinite(np.asarray(a))), path
        error = norm(np.asarray(a, np.float64) - np.asarray(b))
        assert error <= tolerance * max(norm(b), 1e-3 * largest), (jax.tree_util.keystr(path), error, norm(b))
