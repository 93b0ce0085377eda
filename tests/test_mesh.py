"""One step on meshes of eight devices equals the step on one: loss, gradients and new state, nothing split wrongly."""

import dataclasses
from functools import cache
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import k3jax
from k3jax.nn import moe
from k3jax.nn.model import init_variables
from k3jax.ops import kda_context
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import step as training

# A KDA layer with a dense and two scanned MLA layers with a MoE part; blocks of 2 over 3 layers, the last partial.
MODEL = k3jax.ModelConfig(
    model_type="kimi_k3",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    q_lora_rank=32,
    mla_use_output_gate=True,
    kda_layers=(1,),
    full_attn_layers=(2, 3),
    kda_head_dim=16,
    kda_num_heads=8,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=64,
    latent_moe_use_norm=True,
    hidden_act="situ",
    attn_res_block_size=2,
)
MESHES = {
    "one": MeshConfig(),
    "fsdp8": MeshConfig(fsdp=8),
    "expert8": MeshConfig(expert=8),
    "tensor8": MeshConfig(tensor=8),
    "fsdp2_expert2_tensor2": MeshConfig(fsdp=2, expert=2, tensor=2),
    "data2_expert4": MeshConfig(data=2, expert=4),
    "context8": MeshConfig(context=8),
    "context4_tensor2": MeshConfig(context=4, tensor=2),
    "fsdp2_expert2_context2": MeshConfig(fsdp=2, expert=2, context=2),
    "data2_context2_tensor2": MeshConfig(data=2, context=2, tensor=2),
    "expert2_context2_tensor2": MeshConfig(expert=2, context=2, tensor=2),
}
B, T = 8, 32
# Three that split over every axis; each of the others compiles for as long and is run with the slow ones.
OFTEN = ("fsdp2_expert2_tensor2", "data2_expert4", "expert2_context2_tensor2")
OTHERS = [name for name in MESHES if name not in ("one", *OFTEN)]
ON_MESHES = [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def batch(vocab=MODEL.vocab_size):
    """Packed documents, one row with padding at its end."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, size=(B, T + 1)).astype(np.int32)
    ids = np.sort(rng.integers(1, 4, size=(B, T + 1)), axis=1).astype(np.int32)
    ids[3, 20:] = 0
    weights = ((ids[:, :-1] == ids[:, 1:]) & (ids[:, 1:] > 0)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids[:, :-1], "weights": weights}


# What is added to the routers' biases: nothing, so much that every token goes to the same four experts (of one device
# where four share them), or so much that the first four, all of one device, get nothing.
ROUTINGS = {
    "as it comes": np.zeros(16),
    "all to four experts": np.linspace(0, 10, 16),
    "an idle device": np.where(np.arange(16) < 4, -10.0, 0.0),
}


@cache
def stepper(mesh_name, dtype):
    """A function of the routing: (loss, state after the step) on a mesh, as numpy, and how the parameters are placed.

    Nothing is clipped, so Adam's first moment is the gradient.
    """
    config = RunConfig(
        model=MODEL,
        data=DataConfig(seq_len=T, batch_size=B),
        # Adam's first step is close to the gradient's sign, which rounding decides where a gradient is nearly zero: a
        # small rate keeps that out of the comparison of parameters (the gradients themselves are compared as moments).
        train=TrainConfig(steps=10, learning_rate=1e-4, warmup_fraction=0.0, clip_norm=1e9, qat=dtype == "float64"),
        mesh=MESHES[mesh_name],
    )
    config.validate()
    mesh = k3jax.make_mesh(**dataclasses.asdict(config.mesh))
    # Rounding to MX is a step: in float32 the order of a sum can put one activation on the other side of it, which is
    # no fault of the mesh. float64 is compared with QAT on, float32 with it off.
    qat = config.train.qat
    experts = "qat" if qat else "dequantized"
    remat = mesh_name in ("fsdp8", "expert2_context2_tensor2")  # what one device keeps, these compute again
    model = k3jax.K3(MODEL, jnp.dtype(dtype), jnp.dtype(dtype), experts=experts, mxfp8_inputs=qat, remat=remat)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make_model", lambda config: model)
        state = initial_state(config, dtype)
        with jax.set_mesh(mesh):
            _, shardings = training.abstract_state(config, mesh)
            placed = jax.device_put(state, shardings)
            part = training.shard_batch(batch(), mesh)
            step = training.make_train_step(config, shardings).lower(placed, part).compile()

    def run(routing):
        tilted = jax.tree.map(lambda x: x + ROUTINGS[routing][None].astype(x.dtype), state.router)
        new, metrics = step(jax.device_put(state.replace(router=tilted), shardings), part)
        return jax.device_get((metrics["loss"], new)), jax.tree.map(lambda x: x.sharding.spec, new.params)

    return run


@cache
def one_step(mesh_name, dtype, routing="as it comes"):
    return stepper(mesh_name, dtype)(routing)


_INITIAL = {}


def initial_state(config, dtype):
    """The same on every mesh (a test of its own), so made once."""
    if dtype not in _INITIAL:
        one = k3jax.make_mesh()
        with jax.set_mesh(one):
            _INITIAL[dtype] = jax.device_get(training.init_state(config, one)[0])
    return _INITIAL[dtype]


def errors(found, expected):
    """Largest difference of every leaf, relative to the leaf's largest value."""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    result = {}
    for (path, b), a in zip(leaves, jax.tree.leaves(found), strict=True):
        scale = np.max(np.abs(b))
        difference = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
        result[jax.tree_util.keystr(path)] = float(difference / scale if scale else difference)
    return result


def worst(mesh, dtype, routing="as it comes"):
    """The leaf of loss and state that differs most from one device's."""
    found = errors(one_step(mesh, dtype, routing)[0], one_step("one", dtype, routing)[0])
    name = max(found, key=found.get)
    return name, found[name]


@pytest.mark.parametrize("mesh", ON_MESHES)
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), pytest.param("float32", 1e-4, marks=pytest.mark.slow)])
def test_mesh_equals_one_device(mesh, dtype, tolerance):
    name, error = worst(mesh, dtype)
    assert error <= tolerance, name


@pytest.mark.parametrize("routing", list(ROUTINGS)[1:])
@pytest.mark.parametrize("mesh", ON_MESHES)
def test_overflowing_and_idle_experts_lose_nothing(mesh, routing):
    name, error = worst(mesh, "float64", routing)
    assert error <= 1e-9, name
    gradient = one_step("one", "float64", routing)[0][1].opt_state[1][0].mu["segment_1"]["layer_0"]
    used = np.any(gradient["block_sparse_moe"]["experts"]["w1"] != 0, axis=(0, 2, 3))
    np.testing.assert_array_equal(used, np.arange(16) >= (12 if routing == "all to four experts" else 4))


@pytest.mark.parametrize("removed, mesh", [("psum", "data2_expert4"), ("all_gather", "context8")])
def test_without_a_collective_it_differs(removed, mesh, monkeypatch):
    """Taken out in turn: the sum of the routers' statistics over devices, and the gathering of KDA's summaries.

    (`all_to_all` and further rounds: tests/ops/test_exchange.py; the convolution's halo: tests/ops/test_kda_context.py.)
    """
    if removed == "psum":
        monkeypatch.setattr(moe.lax, "psum", lambda x, axes: x)
    else:
        apart = lambda x, axis: jax.tree.map(lambda x: jnp.zeros((jax.lax.axis_size(axis), *x.shape), x.dtype), x)  # noqa: E731
        monkeypatch.setattr(kda_context.lax, "all_gather", apart)
    (loss, new), _ = stepper.__wrapped__(mesh, "float32")("as it comes")
    found = errors((loss, new), one_step("one", "float32")[0])
    assert max(found.values()) > 1e-2


@pytest.mark.parametrize("capacity_drop, lost", [(True, 4 * (256 - 88)), (False, 0)])
def test_what_capacity_drops_is_counted(capacity_drop, lost):
    """Each of four devices has 256 pairs for the experts of the first; a round takes 64 and three sigma, 88."""
    model = k3jax.K3(MODEL, capacity_drop=capacity_drop)
    with jax.set_mesh(k3jax.make_mesh(expert=4)):
        variables = nn.unbox(jax.jit(lambda: init_variables(model, jax.random.key(0)))())
        tilt = 10 * (jnp.arange(16) < 4).astype(jnp.float32)
        variables["router"] = jax.tree.map(lambda x: x + tilt[None], variables["router"])
        router = jax.jit(lambda v, x: model.apply(v, x).router)(variables, jnp.asarray(batch()["tokens"]))
    layers = training.router_stats(router)
    assert [x.dropped.tolist() for x in layers] == [[lost, lost]]
    assert [x.load.tolist() for x in layers] == [[[256] * 4 + [0] * 12] * 2]


def test_parameters_lie_where_the_table_says():
    _, placed = one_step("fsdp2_expert2_tensor2", "float64")
    assert placed["segment_0"]["layer_0"]["self_attn"]["q_proj"] == P(None, "tensor", None, "fsdp")
    assert placed["segment_1"]["layer_0"]["block_sparse_moe"]["experts"]["w1"] == P(None, ("expert", "tensor"), "fsdp", None)
    assert placed["lm_head"] == P("tensor", "fsdp")


def test_initial_state_does_not_depend_on_the_mesh():
    mesh = k3jax.make_mesh(fsdp=2, expert=2, tensor=2)
    config = RunConfig(model=MODEL, train=TrainConfig(steps=10), mesh=MESHES["fsdp2_expert2_tensor2"])
    with jax.set_mesh(mesh):
        found, _ = training.init_state(config, mesh)
    one = k3jax.make_mesh()
    with jax.set_mesh(one):
        expected, _ = training.init_state(config, one)
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(expected))


def test_a_checkpoint_loads_straight_onto_a_mesh():  # packed: tests/train/test_convert.py
    folder = Path(__file__).parent / "data" / "k3_tiny"
    golden = np.load(folder / "golden.npz")
    mesh = k3jax.make_mesh(expert=2)
    with jax.set_mesh(mesh):
        variables = k3jax.load_hf(folder, param_dtype=jnp.float64, mesh=mesh)
        model = k3jax.K3(k3jax.ModelConfig.from_hf(folder), jnp.float64, jnp.float64)
        logits = jax.jit(lambda v, x: model.apply(v, x).logits)(variables, jnp.asarray(golden["input_ids"]))
    layer = variables["params"]["segment_3"]["layer_0"]["block_sparse_moe"]["experts"]
    assert {x.sharding.spec for x in jax.tree.leaves(layer)} == {P(None, "expert", None, None)}
    assert errors(logits, golden["logits"])[""] <= 1e-9
