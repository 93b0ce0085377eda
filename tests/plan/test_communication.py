"""What a step sends: worked out by hand, and against a compiled step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from k3jax import make_mesh
from k3jax.plan import hlo
from k3jax.plan import communication
from k3jax.plan.communication import Transfer, seconds
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.setting import Serve, Strategy, Train
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.settings import STRATEGIES, load_model
from k3jax.train import step as training

KIMI_K3 = load_model(STRATEGIES.parent / "kimi_k3.py")


def sent(config, workload, mesh, exchange="ragged"):
    return communication.by_axes(communication.transfers(config, workload, Strategy(mesh, exchange)))


def test_nothing_is_sent_by_one_device():
    assert sent(KIMI_K3, Train(batch=1), MeshConfig()) == sent(KIMI_K3, Serve(), MeshConfig()) == {}


def test_experts_exchange_by_hand():
    # 4096 tokens of a device, 16 experts each, latents of 3584 in bfloat16, 92 layers: forward, again, and back, both
    # ways.
    rows = 4096 * 16
    found = sent(KIMI_K3, Train(batch=128, sequence=4096), MeshConfig(expert=128))
    assert found["ragged-all-to-all"]["expert"] == 92 * 3 * 2 * rows * 3584 * 2 * 127 / 128
    window = 512 + 3 * 512**0.5  # to each of 128 devices, in multiples of 8
    fixed = sent(KIMI_K3, Train(batch=128, sequence=4096), MeshConfig(expert=128), "fixed")["all-to-all"]["expert"]
    per_layer = 128 * 8 * -(-window // 8) * (3 * 2 * 3584 * 2 + 2 * 4) * 127 / 128
    assert fixed == 92 * per_layer


def test_fully_sharded_weights_by_hand():
    found = sent(KIMI_K3, Train(batch=8, sequence=4096), MeshConfig(fsdp=8))
    groups = [g for g in communication.variables(KIMI_K3, Train()) if "embed" in g.axes or g.routed]
    layers = sum(group.on({**vars(MeshConfig()), "fsdp": 8}) for group in groups if "vocab" not in group.axes)
    head = 163840 * 7168 / 8  # gathered once; the embedding is not
    assert found["all-gather"]["fsdp"] == 7 * 2 * (2 * layers + head) + 4096 * 4 * 7
    assert found["all-to-all"]["fsdp"] == 2 * 4096 * 7168 * 2 * 7 / 8
    assert found["reduce-scatter"]["fsdp"] == 7 * 2 * (layers + head)


def test_a_shared_matrix_sends_what_two_do():
    """As compiled steps do: the head is gathered, the embedding not, and the gradients of both uses are summed."""
    tied, mesh = dataclasses.replace(KIMI_K3, tie_word_embeddings=True), MeshConfig(data=2, fsdp=4, tensor=2)
    assert sent(tied, Train(batch=8), mesh) == sent(KIMI_K3, Train(batch=8), mesh)


@pytest.mark.parametrize("workload, moved", [(Train(batch=8, sequence=4096), 3 * 4096), (Serve(batch=8), 0)])
def test_without_shared_experts_a_mixture_s_input_stays_where_it_is(workload, moved):
    """Of 92 layers, over two devices of the tensor axis: of its tokens each sends the other half of a gathered input."""
    alone = dataclasses.replace(KIMI_K3, num_shared_experts=0)
    found, less = (sent(config, workload, MeshConfig(tensor=2, data=8)) for config in (KIMI_K3, alone))
    gathers = [x.get("all-gather", {}).get("tensor", 0) for x in (found, less)]
    assert gathers[0] - gathers[1] == 92 * moved * 7168 * 2 / 2
    assert found["all-reduce"]["tensor" if not moved else "data"] > less["all-reduce"]["tensor" if not moved else "data"]


def test_experts_gathered_packed_are_gathered_as_values():
    mesh = MeshConfig(fsdp=8, expert=8)
    packed, wide = (sent(KIMI_K3, Serve(batch=64, experts=experts), mesh) for experts in ("packed", "dequantized"))
    assert packed == wide


def test_a_compiled_step_sends_what_was_predicted(tiny):
    sizes = {"fsdp": 2, "expert": 2}
    mesh, workload = make_mesh(**sizes), Train(8, 128, qat=False, remat=False)
    train = TrainConfig(dtype="float32", qat=False, remat=False)
    config = RunConfig(tiny, DataConfig(seq_len=128, batch_size=8), train, MeshConfig(**sizes))
    with jax.set_mesh(mesh):
        state, shardings = training.abstract_state(config, mesh)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("fsdp", "expert")))
        shapes = {name: jax.ShapeDtypeStruct((8, 128), jnp.int32, sharding=place) for name in ("tokens", "targets")}
        shapes |= {"segment_ids": shapes["tokens"], "weights": shapes["tokens"].update(dtype=jnp.float32)}
        text = training.make_train_step(config, shardings).lower(state, shapes).compile().as_text()
    # On CPUs the exchange is the fixed one, of float32 where the model says bfloat16, and rows' numbers as they are.
    predicted, counted = sent(tiny, workload, config.mesh, "fixed"), hlo.sent_by_kind(text)
    numbers = 2 * communication.fixed_window(8 * 128 / 4 * 2 / 2) * 4 / 2
    assert counted["all-to-all"] == 2 * sum(predicted["all-to-all"].values()) - numbers
    assert counted["all-gather"] == pytest.approx(2 * predicted["all-gather"]["fsdp"], rel=0.1)


def test_seconds_on_a_torus():
    v5p, mesh = HARDWARE["v5p"], vars(MeshConfig(fsdp=8, expert=128))
    # Eight of 1,024 devices lie along one dimension: two of six links of 100 GB/s.
    assert seconds(Transfer("", "all-gather", ("fsdp",), 200e9), mesh, v5p) == pytest.approx(1.0)
    # 128 lie along two, of 11.3 each: an average hop of 2.8 on the longest ring.
    exchange = seconds(Transfer("", "ragged-all-to-all", ("expert",), 200e9), mesh, v5p)
    assert exchange == pytest.approx(128**0.5 / 4)
    assert seconds(Transfer("", "all-gather", ("fsdp", "expert"), 600e9), mesh, v5p) == pytest.approx(1.0)


def test_seconds_behind_switches():
    h200 = HARDWARE["h200"]
    inside = vars(MeshConfig(expert=8))
    assert seconds(Transfer("", "all-gather", ("expert",), 450e9), inside, h200) == pytest.approx(1.0)
    # Sixteen devices in two domains: 8 of 15 parts leave, each device by its own adapter of 50 GB/s.
    outside = vars(MeshConfig(expert=16))
    assert seconds(Transfer("", "all-to-all", ("expert",), 15e9), outside, h200) == pytest.approx(8 / 50)
    # A ring through both domains leaves one once for all eight.
    assert seconds(Transfer("", "all-gather", ("expert",), 15e9), outside, h200) == pytest.approx(8 / 400)
    # An axis whose members lie in different domains has the network alone.
    apart = vars(MeshConfig(data=2, expert=8))
    assert seconds(Transfer("", "all-reduce", ("data",), 50e9), apart, h200) == pytest.approx(1.0)
