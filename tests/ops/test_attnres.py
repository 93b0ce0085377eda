"""The mixture over depth: values by hand, absent sources, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import k3jax
from k3jax.plan import hlo
from k3jax.ops.attnres import attnres_mix, keep_depth, read_depth

EPS = 1e-5


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def plain(sources, query, norm):
    """Eq. 8-10 with every source present."""
    rms = jnp.sqrt(jnp.mean(sources**2, axis=-1, keepdims=True) + EPS)
    scores = jnp.exp((sources / rms * norm[None, None, None]) @ query)[..., None]
    return jnp.sum(scores * sources, axis=0) / jnp.sum(scores, axis=0)


def test_a_zero_query_gives_the_plain_average():
    sources = draw(0, 5, 2, 3, 8)
    for count in range(5):
        mixed = attnres_mix(sources, jnp.asarray(count, jnp.int32), jnp.zeros(8), draw(1, 8), EPS)
        np.testing.assert_allclose(mixed, np.mean(sources[: count + 1], axis=0), rtol=1e-14, atol=1e-15)


def test_two_sources_by_hand():
    # rms([3, 4]) = sqrt(12.5), rms([0, 2]) = sqrt(2); query * norm = [2, 1].
    sources = jnp.asarray([[3.0, 4.0], [0.0, 2.0]])[:, None, None]
    mixed = attnres_mix(sources, 1, jnp.asarray([4.0, 0.5]), jnp.asarray([0.5, 2.0]), 0.0)
    a, b = np.exp(10 / np.sqrt(12.5)), np.exp(2 / np.sqrt(2))
    np.testing.assert_allclose(mixed[0, 0], [3 * a / (a + b), (4 * a + 2 * b) / (a + b)], rtol=1e-14)


def test_one_source_is_itself():
    sources = draw(2, 3, 1, 4, 8)
    np.testing.assert_array_equal(attnres_mix(sources, 0, 9 * draw(3, 8), draw(4, 8), EPS), sources[0])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_later_slots_are_ignored_exactly(count):
    sources, query, norm = draw(5, 4, 2, 3, 8), draw(6, 8), draw(7, 8)
    mixed = attnres_mix(sources, count, query, norm, EPS)
    np.testing.assert_allclose(mixed, plain(sources[: count + 1], query, norm), rtol=1e-13, atol=1e-14)
    garbage = sources.at[count + 1 :].set(1e100)  # finite, which is all that is asked of them
    np.testing.assert_array_equal(attnres_mix(garbage, count, query, norm, EPS), mixed)


def test_gradients():
    sources, query, norm, cotangent = draw(8, 4, 1, 2, 6), draw(9, 6), draw(10, 6), draw(11, 1, 2, 6)
    sources = sources.at[3].set(0)  # a slot not yet filled, as the model has them

    def loss(sources, query, norm):
        return jnp.sum(cotangent * attnres_mix(sources, 2, query, norm, EPS))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(sources, query, norm)
    assert np.all(gradients[0][3] == 0) and np.all(gradients[0][:3] != 0)
    of_plain = jax.jit(jax.grad(lambda *a: jnp.sum(cotangent * plain(*a)), argnums=(0, 1, 2)))
    expected = of_plain(sources[:3], query, norm)
    for gradient, right in zip((gradients[0][:3], *gradients[1:]), expected, strict=True):
        np.testing.assert_allclose(gradient, right, rtol=1e-12, atol=1e-13)


def test_softmax_is_in_float32():
    sources, query, norm = draw(12, 3, 2, 4, 64), draw(13, 64), draw(14, 64)
    narrow = [x.astype(jnp.bfloat16) for x in (sources, query, norm)]
    mixed = attnres_mix(narrow[0], 2, *narrow[1:], EPS)
    assert mixed.dtype == jnp.bfloat16
    exact = plain(*(x.astype(jnp.float64) for x in narrow))
    # One rounding to bfloat16 at the end; scores of bfloat16 products would be off by far more.
    np.testing.assert_allclose(np.asarray(mixed, np.float64), exact, rtol=2**-8, atol=1e-6)


# ---- a stack of reads that keeps only running sums -----------------------------------------------------------


def stack(read, end, x, queries, norms):
    """Six sublayers in blocks of two over three blocks, each adding a function of what it reads."""
    sources = jnp.zeros((4, *x.shape)).at[0].set(x)
    tape, count = jnp.zeros_like(sources), jnp.zeros((), jnp.int32)
    for i in range(6):
        h, sources, tape = read(sources, tape, count, queries[i], norms[i], EPS)
        count = count + int(i % 2 == 0)
        sources = sources.at[count].add(jnp.sin(h) * (i + 1))
    return attnres_mix(end(sources, tape), count, queries[6], norms[6], EPS)


def plainly(*arguments):
    read = lambda sources, tape, *rest: (attnres_mix(sources, *rest), sources, tape)  # noqa: E731
    return stack(read, lambda sources, tape: sources, *arguments)


def kept(*arguments):
    return stack(read_depth, keep_depth, *arguments)


ARGUMENTS = draw(15, 2, 3, 8), draw(16, 7, 8), draw(17, 7, 8)


def test_a_stack_that_keeps_running_sums():
    cotangent = draw(18, 2, 3, 8)

    def both(form):
        y, pull = jax.vjp(form, *ARGUMENTS)
        return y, *pull(cotangent)

    for found, expected in zip(jax.jit(both, static_argnums=0)(kept), jax.jit(both, static_argnums=0)(plainly), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_what_a_stack_keeps():
    def saved(form):
        leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(form, *a)[1], *ARGUMENTS))
        return sum(leaf.shape == (4, 2, 3, 8) for leaf in leaves), sum(leaf.shape == (2, 3, 8) for leaf in leaves)

    assert saved(plainly)[0] >= 7  # of four slots each: one at least for every read
    whole, slots = saved(kept)
    assert whole <= 3 and slots <= 12  # all slots once, at the end, with what the last mixture keeps


def test_devices_sum_the_gradient_of_a_read_once():
    """With the sum over tokens in the loop over slots, the compiled loop has an all-reduce and this raises."""
    mesh = k3jax.make_mesh(data=4, tensor=2)
    sources = draw(19, 4, 4, 2, 8)

    def gradients(sources, count, query, norm):
        def read(*arguments):
            h, sources, tape = read_depth(arguments[0], jnp.zeros_like(arguments[0]), count, *arguments[1:], EPS)
            return h, keep_depth(sources, tape)

        (h, kept), pull = jax.vjp(read, sources, query, norm)
        return pull((h, jnp.zeros_like(kept)))

    arguments = sources, jnp.asarray(2, jnp.int32), draw(20, 8), draw(21, 8)
    expected = jax.jit(gradients)(*arguments)
    with jax.set_mesh(mesh):
        split = jax.device_put(sources, jax.NamedSharding(mesh, P(None, "data", "tensor")))
        program = jax.jit(gradients).lower(split, *arguments[1:]).compile()
        found = program(split, *arguments[1:])
    sums = hlo.collectives(program.as_text())  # raises for a loop that communicates
    assert all(times == 1 and one.kind == "all-reduce" for one, times in sums.items())
    assert hlo.sent_bytes(sums) <= 160  # the direction's gradient, [D] in float64: over tensor's two, then data's four
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=1e-12, atol=1e-12)
