"""Experts split over devices: the values and gradients of one device, whatever the routing, and what crosses."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.plan.hlo import sent_by_kind
from k3jax.ops import exchange
from k3jax.ops.experts import Activation, Unit, apply_experts, experts_reference

RANKS, n, k, E, L, F = 8, 40, 3, 16, 32, 32  # n tokens a device; two experts on each
FORMS = ("fixed", "ragged")
UNIT = Unit(Activation("situ"))
RNG = np.random.default_rng(0)
W = tuple(jnp.asarray(RNG.normal(size=shape)) for shape in ((E, F, L), (E, F, L), (E, L, F)))


def choices(experts):
    return np.stack([RNG.permutation(experts)[:k] for _ in range(RANKS * n)])


ROUTINGS = {
    "random": choices(E),
    "all to the same": np.broadcast_to([5, 4, 15], (RANKS * n, k)),  # two of them on one device
    "one for all": np.concatenate([np.full((RANKS * n, 1), 7), choices(7)[:, : k - 1]], axis=1),
    "one idle device": choices(np.setdiff1d(np.arange(E), [2, 3])),
    "each device its own": np.concatenate([np.full((n, k), 2 * (r // 2)) + [0, 1, 2] for r in range(RANKS)]) % E,
}
VALID = np.ones(RANKS * n, bool)
VALID[3 * n : 4 * n] = False  # a device without tokens
VALID[::7] = False


def mesh():
    return jax.make_mesh((2, RANKS // 2), ("expert", "tensor"), (AxisType.Auto,) * 2)


def split(impl, drop=False, unit=UNIT):
    axes = ("expert", "tensor")
    tokens = P(axes)

    def body(x, weights, experts, indices, valid):
        y, dropped = apply_experts(x, weights, indices, valid, experts, unit, axes, axes, impl, drop)
        return y, jax.lax.psum(dropped, axes)

    return jax.shard_map(body, mesh=mesh(), in_specs=(tokens,) * 5, out_specs=(tokens, P()), check_vma=False)


def whole(x, weights, experts, indices, valid):
    return jnp.where(valid[:, None], experts_reference(x, weights, indices, experts, UNIT), 0)


@cache
def with_gradients(impl):
    form = whole if impl == "reference" else lambda *a: split(impl)(*a)[0]

    def run(cotangent, x, weights, experts, indices, valid):
        y, pull = jax.vjp(lambda *a: form(*a, indices, valid), x, weights, experts)
        return y, pull(cotangent)

    return jax.jit(run)


def inputs(routing):
    rng = np.random.default_rng(1)
    x, cotangent = (jnp.asarray(rng.normal(size=(RANKS * n, L))) for _ in range(2))
    weights = jnp.asarray(rng.uniform(size=(RANKS * n, k)))
    return cotangent, x, weights, W, jnp.asarray(ROUTINGS[routing], jnp.int32), jnp.asarray(VALID)


def difference(impl, routing):
    found, expected = (with_gradients(form)(*inputs(routing)) for form in (impl, "reference"))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_split_is_whole(routing, impl):
    assert difference(impl, routing) <= 1e-12


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("removed", ["all_to_all", "further rounds", "sum over rounds"])
def test_without_it_the_comparison_fails(removed, impl, monkeypatch):
    """Taken out in turn: what brings rows to other devices, the rounds after the first, and that all rounds count."""
    if removed == "all_to_all":
        monkeypatch.setattr(exchange.lax, "all_to_all", lambda x, *a, **k: x)
        monkeypatch.setattr(exchange, "_send", lambda rows, room, *a: jnp.resize(rows, room.shape))
    else:
        sizes = exchange._sizes
        monkeypatch.setattr(exchange, "_sizes", lambda balanced, most: (sizes(balanced, most)[0], 0 * most + 10**6))
        if removed == "further rounds":
            real = {name: getattr(exchange, name) for name in FORMS}
            for name in FORMS:
                monkeypatch.setattr(exchange, name, lambda *a, f=real[name]: f(*a)._replace(most=0))
        else:
            for name in FORMS:
                whole_round = getattr(exchange, f"_{name}_round")
                once = lambda *a, f=whole_round: f(*a[:-2], 0, a[-1]) if not isinstance(a[-2], int) else f(*a)  # noqa: E731
                monkeypatch.setattr(exchange, f"_{name}_round", once)
            monkeypatch.setattr(exchange, "_sizes", sizes)
    with_gradients.cache_clear()
    assert difference(impl, "all to the same") > 1e-3
    with_gradients.cache_clear()


@pytest.mark.parametrize("impl", FORMS)
def test_what_is_dropped_is_counted(impl):
    eye = jnp.broadcast_to(jnp.eye(L)[None], (E, L, L))
    x, weights, valid = jnp.ones((RANKS * n, L)), jnp.ones((RANKS * n, k)), jnp.ones(RANKS * n, bool)
    run = jax.jit(split(impl, drop=True, unit=lambda gate, up: gate))

    def taken(routing):
        y, dropped = run(x, weights, (eye,) * 3, jnp.asarray(routing, jnp.int32), valid)
        # y's rows count the experts that took the token: the unit gives its gate, the matrices are the identity.
        return int(jnp.sum(y[:, 0])), int(dropped)

    even = (np.arange(RANKS * n)[:, None] + 5 * np.arange(k)) % E
    assert taken(even) == (RANKS * n * k, 0)
    total, dropped = taken(ROUTINGS["all to the same"])
    # Device 2 gets 2 of every 3 rows, device 7 the third; a first round takes 32 from each device, or 160 from all.
    lost = {"fixed": RANKS * (2 * n - 32 + n - 32), "ragged": RANKS * 2 * n - 160 + RANKS * n - 160}[impl]
    assert (total, dropped) == (RANKS * n * k - lost, lost)


def test_bytes_that_cross():
    """Latents to the experts and back, within 15 % of what a balanced load needs, and the same again for gradients."""
    tokens, experts, chosen = 4096, 64, 8  # a device's tokens; compiled, not run
    x = jax.ShapeDtypeStruct((RANKS * tokens, L), jnp.float32)
    weights = jax.ShapeDtypeStruct((RANKS * tokens, chosen), jnp.float32)
    matrices = (jax.ShapeDtypeStruct((experts, L, L), jnp.float32),) * 3
    indices = jax.ShapeDtypeStruct((RANKS * tokens, chosen), jnp.int32)
    valid = jax.ShapeDtypeStruct((RANKS * tokens,), bool)
    forward = lambda *a: split("fixed")(*a)[0]  # noqa: E731
    least = tokens * chosen * L * 4 * 2 * (RANKS - 1) / RANKS

    def sent(function):
        return sent_by_kind(jax.jit(function).lower(x, weights, matrices, indices, valid).compile().as_text())

    moved = sent(forward)
    assert least <= moved["all-to-all"] <= 1.15 * least
    assert sum(moved.values()) - moved["all-to-all"] <= 1e-3 * least  # counts and the number of rounds
    moved = sent(jax.grad(lambda *a: jnp.sum(forward(*a)), argnums=(0, 1, 2)))
    assert 2 * least <= moved["all-to-all"] <= 1.15 * 2 * least


def test_what_a_ragged_exchange_means():
    """By the documented example: two devices, each sending different numbers of rows to each."""
    ranks = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    operand = jnp.asarray([[1, 2, 2, 0], [3, 4, 0, 0]], jnp.float32).reshape(8, 1)
    table = jnp.asarray([[[0, 1], [1, 2], [0, 0], [1, 1]], [[0, 1], [1, 1], [1, 2], [2, 1]]], jnp.int32)

    def body(operand, table):
        return exchange._send(operand, jnp.zeros((4, 1), jnp.float32), *table[0], "x")

    out = jax.shard_map(body, mesh=ranks, in_specs=P("x"), out_specs=P("x"), check_vma=False)(operand, table)
    np.testing.assert_array_equal(out[:, 0], [1, 3, 0, 0, 2, 2, 4, 0])
