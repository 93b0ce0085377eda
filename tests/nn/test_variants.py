"""Models of the family beside the released ones: tied embeddings, other routers, no shared experts."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3, make_mesh
from k3jax.nn.layers import Policy
from k3jax.nn.model import init_variables, model_shardings
from k3jax.nn.moe import LatentMoE
from k3jax.ops.loss import cross_entropy

MESH = {"fsdp": 2, "expert": 2, "tensor": 2}
B, T = 4, 8


def variables_of(cfg, seed=0):
    """Every leaf random, in float64."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: nn.unbox(init_variables(model(cfg), jax.random.key(0))))

    def draw(path, leaf):
        return jnp.asarray(("norm" in path[-1].key) + 0.2 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def model(cfg, **settings):
    return K3(cfg, jnp.float64, jnp.float64, **settings)


def tokens_of(vocab):
    rng = np.random.default_rng(1)
    return tuple(jnp.asarray(rng.integers(vocab, size=(B, T)), jnp.int32) for _ in range(2))


def loss_and_logits(cfg, experts):
    """A jitted function of variables: (logits, loss as training has it, its gradients)."""
    tokens, targets = tokens_of(cfg.vocab_size)
    net = model(cfg, experts=experts)

    def loss(params, variables):
        variables = {**variables, "params": params}
        out = net.apply(variables, tokens)
        head = net.apply(variables, out.hidden, method="head_inputs")
        return cross_entropy(*head, targets, jnp.ones((B, T)), chunk=4) / (B * T), out.logits

    @jax.jit
    def run(variables):
        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"], variables)
        return logits, value, gradients

    return run


def on_mesh(cfg, run, variables):
    mesh = make_mesh(**MESH)
    with jax.set_mesh(mesh):
        return run(jax.device_put(variables, model_shardings(cfg, mesh)))


def close(found, expected):
    found, expected = jax.device_get((found, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(np.abs(b).max(), 1e-3)), found, expected)


# ---- tied embeddings ---------------------------------------------------------------------------------------


def test_a_tied_model_is_an_untied_one_whose_head_is_the_embedding(tiny):
    """Logits and loss, and of the shared matrix the gradients of both uses; on one device and on eight, as trained."""
    untied = dataclasses.replace(tiny, num_hidden_layers=1, kda_layers=(), full_attn_layers=(1,))
    tied = dataclasses.replace(untied, tie_word_embeddings=True)
    variables = variables_of(tied)
    assert "lm_head" not in variables["params"]
    assert sum(x.size for x in jax.tree.leaves(variables)) == tied.num_parameters
    twice = {**variables, "params": {**variables["params"], "lm_head": variables["params"]["embed_tokens"]}}
    logits, loss, gradients = loss_and_logits(untied, "qat")(twice)
    gradients["embed_tokens"] += gradients.pop("lm_head")
    run = loss_and_logits(tied, "qat")
    close(run(variables), (logits, loss, gradients))
    close(on_mesh(tied, run, variables), (logits, loss, gradients))


# ---- experts -----------------------------------------------------------------------------------------------


def silu(x):
    return x / (1 + np.exp(-x))


def mixture(cfg, params, bias, x):
    """The layer's equations, token by token and expert by expert; x [n,D]."""
    out = np.zeros_like(x)
    for row, token in enumerate(x):
        logits = params["gate"] @ token
        scores = 1 / (1 + np.exp(-logits)) if cfg.moe_router_activation_func == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        biased = (scores + bias).reshape(cfg.num_expert_group, -1)
        if cfg.topk_group < cfg.num_expert_group:
            merit = np.sort(biased, axis=1)[:, -2:].sum(axis=1)
            biased[np.argsort(-merit)[cfg.topk_group :]] = -np.inf
        chosen = np.argsort(-biased.reshape(-1))[: cfg.num_experts_per_token]
        for e in chosen:
            w1, w2, w3 = (params["experts"][name][e] for name in ("w1", "w2", "w3"))
            out[row] += scores[e] / scores[chosen].sum() * (w2 @ (silu(w1 @ token) * (w3 @ token)))
        if cfg.num_shared_experts:
            gate, up, down = (params["shared_experts"][f"{name}_proj"] for name in ("gate", "up", "down"))
            out[row] += down @ (silu(gate @ token) * (up @ token))
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_router_activation_func": "softmax", "num_shared_experts": 0},
        {"moe_router_activation_func": "softmax", "num_expert_group": 4, "topk_group": 1},  # two of a group of two
        {"num_experts_per_token": 8, "num_expert_group": 8, "topk_group": 8, "num_shared_experts": 0},  # all there are
    ],
    ids=["softmax, none shared", "softmax, a group of k", "all experts"],
)
def test_a_mixture_of_experts_is_its_equations(tiny, changes):
    cfg = dataclasses.replace(tiny, hidden_act="silu", **changes)
    layer = LatentMoE(cfg, Policy(jnp.float64, jnp.float64))
    rng = np.random.default_rng(0)
    x, valid, repeat = jnp.asarray(rng.normal(size=(B, T, cfg.hidden_size))), jnp.ones((B, T), bool), jnp.zeros((), jnp.int32)
    shapes = jax.eval_shape(lambda: nn.unbox(layer.init(jax.random.key(0), x, valid, None, repeat)))
    variables = jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), leaf.dtype), shapes)
    assert ("shared_experts" in variables["params"]) == (cfg.num_shared_experts > 0)

    run = jax.jit(lambda variables, x: layer.apply(variables, x, valid, None, repeat))
    params, bias = jax.device_get((variables["params"], variables["router"]["e_score_correction_bias"]))
    expected = mixture(cfg, params, bias, np.asarray(x).reshape(B * T, -1)).reshape(x.shape)
    with jax.set_mesh(make_mesh(**MESH)):
        split, _ = run(variables, x)
    y, stats = run(variables, x)
    for found in (y, split):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert int(stats.load.sum()) == B * T * cfg.num_experts_per_token
    assert np.all(np.sum(stats.histogram, axis=1) == B * T)
