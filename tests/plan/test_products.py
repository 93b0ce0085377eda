"""FLOPs of the analytic model against those of compiled steps."""

import dataclasses
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from k3jax import K3, init_cache, make_mesh
from k3jax.plan import hlo
from k3jax.config import ModelConfig
from k3jax.nn.model import init_variables
from k3jax.plan import products
from k3jax.plan.setting import Serve, Strategy, Train
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import step as training

MODEL = ModelConfig(
    model_type="kimi_k3",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    q_lora_rank=128,
    mla_use_output_gate=True,
    kda_layers=(1,),
    full_attn_layers=(2,),
    kda_head_dim=64,
    kda_num_heads=4,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=256,
    routed_expert_hidden_size=128,
    latent_moe_use_norm=True,
    hidden_act="situ",
    attn_res_block_size=2,
)
ONE = Strategy(MeshConfig(), "fixed")


def dot_flops(text: str, unknown: tuple[float, ...]) -> float:
    """2 m n k of every matrix product, as often as its loops run; `unknown`: how often those run that do not say,
    outermost first. Of a conditional the branch with the fewest: what is computed in any case."""
    computations, entry = hlo.parse(text)

    @cache
    def count(name: str, depth: int) -> float:
        total, shapes = 0.0, {}
        for result, shape, kind, rest in computations[name]:
            sizes = re.search(r"\[([\d,]*)\]", shape)
            shapes[result] = [int(n) for n in sizes[1].split(",") if n] if sizes else []
            if kind == "dot":
                left = shapes[hlo.operands(rest)[0]]
                inner = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)[1]
                total += 2 * math.prod(shapes[result]) * math.prod(left[int(i)] for i in inner.split(",") if i)
            known = hlo._TRIPS.search(rest) if kind == "while" else None
            silent = kind == "while" and not known
            called = [count(inner, depth + silent) for inner in hlo.called(rest)]
            called = [min(called)] if kind == "conditional" else called
            total += sum(called) * (int(known[1]) if known else unknown[depth] if silent else 1)
        return total

    return count(entry, 0)


def loops(workload, model=MODEL) -> tuple[float, ...]:
    """Trips of the two loops over experts and their blocks (a third, over rounds, does not run on one device)."""
    s = products.sizes(model, workload, ONE)
    size = min(max(s.pairs // (4 * s.experts), 64), 192, s.flat)
    size += -size % 8
    return model.num_experts, products.expert_rows(s, "fixed") / model.num_experts / size, 0


def test_the_count_is_that_of_cost_analysis():
    shapes = jax.ShapeDtypeStruct((24, 40), jnp.float32), jax.ShapeDtypeStruct((40, 56), jnp.float32)
    compiled = jax.jit(jnp.matmul).lower(*shapes).compile()
    cost = compiled.cost_analysis()
    assert (
        dot_flops(compiled.as_text(), ()) == (cost[0] if isinstance(cost, list) else cost)["flops"] == 2 * 24 * 40 * 56
    )


def test_flops_of_a_training_step():
    workload = Train(batch=2, sequence=256)
    config = RunConfig(MODEL, DataConfig(seq_len=256, batch_size=2), TrainConfig())
    mesh = make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        state, shardings = training.abstract_state(config, mesh)
        batch = {name: jax.ShapeDtypeStruct((2, 256), jnp.int32) for name in ("tokens", "targets", "segment_ids")}
        batch["weights"] = jax.ShapeDtypeStruct((2, 256), jnp.float32)
        text = training.make_train_step(config, shardings).lower(state, batch).compile().as_text()
    counted = dot_flops(text, loops(workload))
    assert sum(products.flops(MODEL, workload, ONE).values()) == pytest.approx(counted, rel=0.03)


def test_what_is_kept_is_not_computed_again():
    again, kept = (products.flops(MODEL, Train(2, 256, remat=remat), ONE) for remat in (True, False))
    every = products.model(MODEL, Train(2, 256), ONE)
    forward = sum(
        product.flops * layers for product, layers in every if product.again
    )  # all but the head and last mixture
    assert sum(again.values()) - sum(kept.values()) == pytest.approx(forward)


def test_flops_of_a_decoding_step():
    workload = Serve("decode", batch=8, context=1024)
    model = K3(MODEL, kda_impl="auto")
    variables = jax.eval_shape(lambda: init_variables(model, jax.random.key(0)))
    cache_ = jax.eval_shape(lambda: init_cache(MODEL, 8, 1024))
    step = jax.jit(lambda variables, cache, tokens: model.apply(variables, tokens, cache=cache))
    text = step.lower(variables, cache_, jax.ShapeDtypeStruct((8, 1), jnp.int32)).compile().as_text()
    # The blocks of keys of a full cache are all visited: the branch that the counter, of any two, leaves out.
    passed = products.sizes(MODEL, workload, ONE).keys
    attention = [x for x in products.mla(MODEL, products.sizes(MODEL, workload, ONE)) if not x.weight]
    counted = dot_flops(text, loops(workload)) + sum(x.flops for x in attention) * (passed > products.KEY_BLOCK)
    assert sum(products.flops(MODEL, workload, ONE).values()) == pytest.approx(counted, rel=0.03)


def test_parts_that_are_not_there_have_no_products():
    alone, dense = (dataclasses.replace(MODEL, **x) for x in ({"num_shared_experts": 0}, {"first_k_dense_replace": 2}))
    every = products.flops(MODEL, Train(2, 256), ONE)
    assert products.flops(alone, Train(2, 256), ONE) == {kind: n for kind, n in every.items() if kind != "shared"}
    assert not products.flops(dense, Train(2, 256), ONE).keys() & {"shared", "experts", "router", "latents"}


def test_rows_of_the_two_exchanges():
    s = products.sizes(MODEL, Train(batch=8, sequence=256), Strategy(MeshConfig(expert=4)))
    assert s.pairs == 2 * 256 * 2 and s.experts == 1
    assert products.expert_rows(s, "ragged") == s.pairs
    assert s.pairs <= products.expert_rows(s, "fixed") <= 1.2 * s.pairs
    assert products.fixed_window(256) == 304  # 256 + 3 * 16


def test_a_larger_mesh_has_the_same_products_in_all():
    workload = Train(batch=32, sequence=1024)
    whole = products.flops(MODEL, workload, Strategy(MeshConfig()))
    for sizes in ({"fsdp": 4}, {"data": 2, "expert": 4}, {"expert": 2, "fsdp": 2}):
        mesh = MeshConfig(**sizes)
        part = products.flops(MODEL, workload, Strategy(mesh))
        for kind in whole:
            assert part[kind] * mesh.size == pytest.approx(whole[kind], rel=0.01), kind
