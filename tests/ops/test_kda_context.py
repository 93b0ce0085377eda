"""KDA and its convolution split over a mesh axis: the whole sequence's values and gradients, and what crosses."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops import kda, kda_context, l2norm
from k3jax.ops.conv import short_conv

B, H, K, V, TAPS = 2, 2, 4, 3, 4
OPTIONS = {"gate_lower_bound": -5.0, "impl": "scan"}
# Documents that end on a device's edge, inside it and many devices on; padding inside, at the end, and a row of it.
IDS = np.array([[1] * 8 + [2] * 3 + [3] * 41 + [0] * 6 + [4] * 6, [1] * 20 + [0] * 12 + [2] * 20 + [0] * 12])


def inputs(T=64):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(B, T, H, size))) for size in (K, K, V))
    g = -jnp.asarray(rng.uniform(size=(B, T, H, K)) ** 2)  # slow: states reach many devices on
    taps = jnp.asarray(rng.normal(size=(2, H, K, TAPS)))
    return q, k, v, g, jnp.asarray(rng.uniform(size=(B, T, H))), taps


def layer(conv, run, ids, q, k, v, g, beta, taps):
    q, k = conv(q, taps[0], ids), conv(k, taps[1], ids)
    return run(l2norm(q), l2norm(k), v, g, beta, ids)


def whole(x, ids):
    conv = lambda x, taps, ids: short_conv(x, taps, segment_ids=ids)[0]  # noqa: E731
    return layer(conv, lambda *x: kda(*x[:5], None, x[5], **OPTIONS)[0], ids, *x)


def split(ranks):
    mesh = jax.make_mesh((ranks,), ("context",), (AxisType.Auto,), devices=jax.devices()[:ranks])
    conv, run = partial(kda_context.short_conv_over, "context"), partial(kda_context.kda_over, "context", **OPTIONS)
    tokens = P(None, "context")

    def run_split(x, ids):
        body = partial(layer, conv, run)
        specs = (tokens, *[tokens] * 5, P())
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)(ids, *x)

    return run_split


def both(f, weights):
    """Outputs and all gradients, jitted."""

    @jax.jit
    def run(x, ids):
        o, pull = jax.vjp(lambda x: f(x, ids), x)
        return o, pull(weights)[0]

    return run


def compare(f, ids, weights):
    x = inputs()
    return both(f, weights)(x, ids), both(whole, weights)(x, ids)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ranks", [2, 8])
def test_split_is_whole(ranks, packed):
    ids = jnp.asarray(IDS) if packed else None
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, 64, H, V)))
    found, expected = compare(split(ranks), ids, weights)
    chex.assert_trees_all_close(found, expected, rtol=1e-10, atol=1e-11)
    # The gradients on the last device are as exact as those on the first.
    for a, b in zip(found[1][:5], expected[1][:5], strict=True):
        for at in (slice(0, 64 // ranks), slice(-64 // ranks, None)):
            if not packed:
                assert float(jnp.max(jnp.abs(a - b)[:, at])) <= 1e-12 * float(jnp.max(jnp.abs(b)))


@pytest.mark.parametrize("removed", ["halo", "states"])
def test_without_its_collective_it_differs(removed, monkeypatch):
    """With the convolution's permute, or the all-gather of summaries, taken out, the comparison above fails."""
    if removed == "halo":
        monkeypatch.setattr(kda_context, "_from_previous", lambda axis, x: jnp.zeros_like(x))
    else:
        gather = lambda x, axis: jax.tree.map(lambda x: jnp.zeros((jax.lax.axis_size(axis), *x.shape), x.dtype), x)  # noqa: E731
        monkeypatch.setattr(kda_context.lax, "all_gather", gather)
    weights = jnp.ones((B, 64, H, V))
    found, expected = compare(split(8), jnp.asarray(IDS), weights)
    worst = [float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)]
    assert worst[0] > 1e-2 and max(worst[1:]) > 1e-2


def test_what_crosses():
    """One halo of three tokens a convolution, and one summary a device, however long the stretch."""

    def collectives(T):
        x = inputs(T)
        text = jax.jit(split(8)).lower(x, None).compile().as_text()
        found = re.findall(r"= \(?(\w+\[[\d,]*\]).*? (all-gather|collective-permute|all-reduce|all-to-all)\(", text)
        return sorted((kind, int(np.prod([int(n) for n in re.findall(r"\d+", shape.split("[")[1])]))) for shape, kind in found)

    short, long = collectives(64), collectives(256)
    assert short == long
    halos = [size for kind, size in short if kind == "collective-permute"]
    assert halos == [B * (TAPS - 1) * H * K] * 2
    gathered = sum(size for kind, size in short if kind == "all-gather")
    assert 0 < gathered <= 8 * B * (H * K * (K + V) + 2)
    assert {kind for kind, _ in short} == {"collective-permute", "all-gather"}


def test_a_stretch_shorter_than_the_convolution():
    with pytest.raises(ValueError, match="mesh.context: leaves 2 tokens a device, must leave 3 for the convolution"):
        jax.eval_shape(split(8), inputs(16), None)
