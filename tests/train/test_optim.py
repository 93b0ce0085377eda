"""The schedule and AdamW, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3jax.run_config import TrainConfig
from k3jax.train.optim import decayed, make_optimizer, schedule


@pytest.mark.parametrize(
    "step, rate",
    [
        (0, 0.2),  # a tenth of the peak
        (5, 1.1),  # half way from there
        (10, 2.0),
        (55, 1.2),  # half way down the cosine
        (40, 1.6),  # a third of the way: (1 + cos 60 degrees) / 2 = 3/4 of what lies above the end
        (100, 0.4),
        (150, 0.4),
    ],
)
def test_schedule(step, rate):
    train = TrainConfig(steps=101, learning_rate=2.0, final_learning_rate=0.2, warmup_fraction=0.1)
    assert float(schedule(train)(step)) == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("steps, warmup", [(1, 0.0), (1, 1.0), (7, 1.0), (2, 0.01)])
def test_short_runs_begin_at_once(steps, warmup):
    rate = schedule(TrainConfig(steps=steps, learning_rate=2.0, warmup_fraction=warmup))
    assert float(rate(0)) == pytest.approx(2.0 / max(1, round(steps * warmup)))
    assert 0 < float(rate(steps - 1)) <= 2.0


def run(train, params, gradients):
    """Parameters and state after each gradient in turn."""
    optimizer, history = make_optimizer(train), []
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            history.append((params, state))
    return history


def test_two_steps_by_hand():
    constant = {"learning_rate": 0.01, "warmup_fraction": 0.0, "final_learning_rate": 1.0}
    train = TrainConfig(steps=2, clip_norm=1.0, weight_decay=0.1, **constant)
    params = {"q_proj": jnp.asarray([1.0, -2.0]), "norm": jnp.asarray([3.0])}
    gradients = [
        {"q_proj": jnp.asarray([3.0, 0.0]), "norm": jnp.asarray([-4.0])},  # norm 5: a fifth of it is taken
        {"q_proj": jnp.asarray([0.1, 0.2]), "norm": jnp.asarray([0.3])},  # norm below 1: as it is
    ]
    first, second = (found for found, _ in run(train, params, gradients))
    p, m, v = np.asarray([1.0, -2, 3]), np.zeros(3), np.zeros(3)
    decay = np.asarray([0.1, 0.1, 0])
    for t, (g, found) in enumerate([([0.6, 0, -0.8], first), ([0.1, 0.2, 0.3], second)], start=1):
        m, v = 0.9 * m + 0.1 * np.asarray(g), 0.95 * v + 0.05 * np.asarray(g) ** 2
        p = p - 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay * p)
        np.testing.assert_allclose([*found["q_proj"], *found["norm"]], p, rtol=1e-6)
    assert first["norm"][0] == pytest.approx(3 + 0.01, rel=1e-6)  # Adam's first step has the size of the rate


def test_clipping_keeps_the_direction():
    train = TrainConfig(steps=2, clip_norm=0.5)
    gradient = {"a": jnp.asarray([30.0, 0.0]), "b": jnp.asarray([[40.0]])}
    ((_, state),) = run(train, jax.tree.map(jnp.zeros_like, gradient), [gradient])
    mu = optax.tree.get(state, "mu")
    np.testing.assert_allclose(mu["a"], [0.1 * 0.3, 0], rtol=1e-6)
    np.testing.assert_allclose(mu["b"], [[0.1 * 0.4]], rtol=1e-6)


def test_what_is_decayed():
    names = {
        "embed_tokens": True,
        "lm_head": True,
        "norm": False,
        "output_attn_res_proj": False,
        "output_attn_res_norm": False,
        "input_layernorm": False,
        "q_proj": True,
        "q_conv1d": False,
        "A_log": False,
        "dt_bias": False,
        "o_norm": False,
        "o_proj": True,
        "q_a_layernorm": False,
        "kv_a_proj_with_mqa": True,
        "gate": True,
        "routed_expert_norm": False,
        "routed_expert_down_proj": True,
        "mlp_res_proj": False,
        "w1": True,
    }
    tree = {"segment_0": {"layer_0": dict.fromkeys(names, 0.0)}}
    assert decayed(tree) == {"segment_0": {"layer_0": names}}
