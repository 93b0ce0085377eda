"""Gradients of the whole model in every number format, by every form of its parts, at lengths where a choice changes."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.nn.model import init_variables
from k3jax.train import step as training


def batch(T):
    """Two documents in the second row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(256, size=(2, T)).astype(np.int32)
    ids = np.stack([np.ones(T), 1 + (np.arange(T) > T // 2)]).astype(np.int32)
    part = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": ids, "weights": np.ones((2, T), np.float32)}
    return jax.tree.map(jnp.asarray, part)


@cache
def problem(cfg, dtype, **settings):
    """(gradient as a function of variables and a batch, random variables); routing is decided by the biases alone."""
    wide = jnp.float64 if dtype == "float64" else jnp.float32
    model = k3jax.K3(cfg, jnp.dtype(dtype), wide, **settings)
    shapes = jax.eval_shape(lambda: training.nn.unbox(init_variables(model, jax.random.key(0))))
    rng = np.random.default_rng(1)
    variables = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), shapes)
    variables["router"] = jax.tree.map(lambda x: 100 * x, variables["router"])

    def loss(params, router, part):
        return training.batch_loss(model, params, router, part, jnp.float32(2))[0]

    return jax.value_and_grad(loss), variables


FORMS = [
    *({"kda_impl": impl} for impl in ("auto", "scan", "chunked")),
    *({"expert_impl": impl} for impl in ("fixed", "ragged", "plain")),
    {"remat": True},
    {"remat": True, "kda_impl": "scan"},
]
QAT = {"experts": "qat", "mxfp8_inputs": True}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types(tiny, dtype):
    cases = [(T, {}) for T in (1, 7, 31, 32)] + [(8, form) for form in FORMS]
    cases += [(8, QAT), (8, QAT | {"remat": True})] * (dtype != "float16")  # MX is of bfloat16 and wider
    for T, form in cases:
        run, variables = problem(tiny, dtype, **form)
        loss, gradients = jax.eval_shape(run, variables["params"], variables["router"], batch(T))
        assert loss.dtype == jnp.float32, (T, form)
        for x, leaf in zip(jax.tree.leaves(gradients), jax.tree.leaves(variables["params"]), strict=True):
            assert (x.shape, x.dtype) == (leaf.shape, leaf.dtype), (T, form)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), ("float16", 0.01), ("float32", 1e-4)])
def test_values(tiny, dtype, tolerance):
    """Of float64 but for rounding: leaf by leaf, the root of the mean of squares."""
    run, variables = problem(tiny, dtype)
    exactly, _ = problem(tiny, "float64")
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
    found = jax.jit(run)(variables["params"], variables["router"], batch(12))
    exact = reference(exactly)(wide["params"], wide["router"], batch(12))
    norm = lambda x: float(np.linalg.norm(np.asarray(x, np.float64)))  # noqa: E731
    largest = max(map(norm, jax.tree.leaves(exact[1])))
    for path, b in jax.tree_util.tree_leaves_with_path(exact):
        a = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        assert np.all(np.isfinite(np.asarray(a))), path
        error = norm(np.asarray(a, np.float64) - np.asarray(b))
        assert error <= tolerance * max(norm(b), 1e-3 * largest), (jax.tree_util.keystr(path), error, norm(b))


@cache
def reference(run):
    return jax.jit(run)
