"""Forward mode: the whole model with kda_impl="scan" on one device, and what is said of everything else."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.config import VisionConfig
from k3jax.derivative import by_hand, reverse_only
from k3jax.nn.model import init_variables
from k3jax.ops import kda
from k3jax.ops.experts import Activation, Unit, apply_experts
from k3jax.train import step as training
from k3jax.vision import Patches, pack

MESSAGE = 'needs impl="scan" of kda, or kda_impl="scan" of K3 on one device'
VISION = VisionConfig(4, 6, 5, 4, 3, 1, 32, 64, 48, 32, 32, media_placeholder_token_id=255)


def draw(seed, tree):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def transposed(f, x, seed=0):
    """<u, J v> and <J^T u, v> for random u and v."""
    v = draw(seed, x)
    y, y_dot = jax.jvp(f, (x,), (v,))
    u = draw(seed + 1, y)
    (back,) = jax.vjp(f, x)[1](u)
    return tuple(
        float(sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(q), strict=True)))
        for p, q in ((u, y_dot), (back, v))
    )


# ---- what is refused -------------------------------------------------------------------------------


@by_hand
def twice_the_slope(x):
    return jnp.sin(x)


twice_the_slope.defvjp(lambda x: (twice_the_slope(x), x), lambda x, d: (2 * jnp.cos(x) * d,))


def repeated(x):
    return jax.lax.scan(lambda c, _: (twice_the_slope(c), None), x, None, length=2)[0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.vmap(f)(x[None])[0]])
@pytest.mark.parametrize("f", [twice_the_slope, repeated])
def test_reverse_mode_alone(f, wrap):
    x = jnp.asarray(0.5)
    slope = jax.grad(wrap(f))(x)
    expected = 2 * np.cos(0.5) * (1 if f is twice_the_slope else 2 * np.cos(np.sin(0.5)))
    assert float(slope) == pytest.approx(expected, rel=1e-12)
    assert float(jax.vmap(jax.grad(f))(x[None])[0]) == float(slope)
    for forward in (
        lambda: jax.jvp(wrap(f), (x,), (x,)),
        lambda: jax.jit(lambda x: jax.jvp(wrap(f), (x,), (x,)))(x),
        lambda: jax.linearize(wrap(f), x)[1](x),
        lambda: jax.jacfwd(wrap(f))(x),
    ):
        with pytest.raises(TypeError) as error:
            forward()
        assert MESSAGE in str(error.value) and "\n" not in str(error.value)


def test_the_mark_costs_nothing():
    count = lambda f: jax.jit(jax.grad(f)).lower(jnp.ones(())).compile().as_text().count(" = ")  # noqa: E731
    assert count(lambda x: jnp.sin(reverse_only(x))) == count(jnp.sin)
    assert reverse_only((None, 1, "a")) == (None, 1, "a")


def kda_inputs(T=9):
    q, k, v = (0.3 * draw(i, jnp.zeros((1, T, 2, 4))) for i in range(3))
    return q, k, v, -jnp.exp(draw(3, q)), jax.nn.sigmoid(draw(4, q[..., 0])), draw(5, jnp.zeros((1, 2, 4, 4)))


@pytest.mark.parametrize("T", [1, 9])
def test_kda(T):
    inputs = kda_inputs(T)
    ids = jnp.ones((1, T), jnp.int32)
    a, b = transposed(lambda x: kda(*x, ids, impl="scan"), inputs)
    assert a == pytest.approx(b, rel=1e-12)
    for impl in ("auto", "chunked"):
        with pytest.raises(TypeError, match=MESSAGE):
            jax.jvp(lambda x: kda(*x, ids, impl=impl), (inputs,), (inputs,))  # noqa: B023


# ---- the model -------------------------------------------------------------------------------------


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(250, size=(2, 12)).astype(np.int32)
    tokens[0, 2:6] = VISION.media_placeholder_token_id
    ids = np.repeat([[1, 2]], 6, axis=1).repeat(2, axis=0).astype(np.int32)
    images = pack(VISION, [[Patches(rng.normal(size=(16, 3, 4, 4)), (1, 4, 4))], []], room=64)
    part = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "segment_ids": ids, "images": images}
    return jax.tree.map(jnp.asarray, part | {"weights": np.ones((2, 12))})


def loss_of(tiny, **settings):
    """The loss of a batch of text and an image as a function of the parameters, and random ones."""
    cfg = dataclasses.replace(tiny, vision=VISION)
    model = k3jax.K3(cfg, jnp.float64, jnp.float64, **settings)
    shapes = jax.eval_shape(lambda: init_variables(model, jax.random.key(0)))
    variables = jax.tree.map(lambda x: 0.2 * x, draw(6, training.nn.unbox(shapes)))
    part = batch()
    return lambda params: training.batch_loss(model, params, variables["router"], part, jnp.ones(()))[0], variables["params"]


@pytest.mark.parametrize("remat", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_forward_mode_of_the_model(tiny, remat):
    """Both mixers, AttnRes, experts, the vision tower and the loss, with what a step differentiates through."""
    loss, params = loss_of(tiny, kda_impl="scan", remat=remat)
    v = draw(7, params)

    @jax.jit
    def both(params, v):
        value, slope = jax.jvp(loss, (params,), (v,))
        gradient = jax.grad(loss)(params)
        return value, slope, sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(v), strict=True))

    value, slope, by_reverse = both(params, v)
    assert float(slope) == pytest.approx(float(by_reverse), rel=1e-11) and abs(float(slope)) > 0.1
    other, _ = loss_of(tiny)
    assert float(jax.jit(other)(params)) == pytest.approx(float(value), rel=1e-12)


def test_the_other_forms_say_what_to_take(tiny):
    for settings in ({}, {"remat": True}, {"kda_impl": "chunked"}):
        loss, params = loss_of(tiny, **settings)
        with pytest.raises(TypeError, match=MESSAGE):
            jax.jit(lambda x: jax.jvp(loss, (x,), (x,))).lower(params)  # noqa: B023


def test_curvature_of_experts():
    """Of both forms with derivatives by hand, against the one without."""
    x, weights = draw(9, jnp.zeros((6, 32))), jax.nn.sigmoid(draw(10, jnp.zeros((6, 2))))
    experts = tuple(draw(11 + i, jnp.zeros((4, *shape))) / 4 for i, shape in enumerate([(8, 32), (8, 32), (32, 8)]))
    indices = jnp.asarray([[0, 1], [1, 2], [2, 3], [0, 3], [1, 3], [0, 2]], jnp.int32)

    def loss(impl, arguments):
        x, weights, experts = arguments
        y, _ = apply_experts(x, weights, indices, jnp.ones(6, bool), experts, Unit(Activation("situ")), impl=impl)
        return jnp.sum(y**2)

    arguments = x, weights, experts
    fixed, ragged, plain = (
        jax.jit(lambda a, v, impl=impl: jax.jvp(jax.grad(partial(loss, impl)), (a,), (v,))[1])(arguments, draw(14, arguments))
        for impl in ("fixed", "ragged", "plain")
    )
    chex.assert_trees_all_close(fixed, plain, rtol=1e-10, atol=1e-10)
    chex.assert_trees_all_close(ragged, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_curvature(tiny):
    """Forward over reverse, a Hessian's product with a vector, is no forward mode to a derivative by hand."""
    products = []
    for settings in ({"kda_impl": "scan"}, {}):
        loss, params = loss_of(tiny, **settings)
        v = draw(8, params)
        products.append(jax.jit(lambda x, v: jax.jvp(jax.grad(loss), (x,), (v,))[1])(params, v))  # noqa: B023
    scale = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(products[0]))
    chex.assert_trees_all_close(*products, rtol=0, atol=1e-11 * scale)
