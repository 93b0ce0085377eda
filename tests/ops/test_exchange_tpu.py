"""Experts compiled for TPUs by the real compiler, ahead of time and without one: both exchanges, with gradients."""

import pytest

PROGRAM = """
import sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from k3jax.ops.experts import Activation, Unit, apply_experts

topology = topologies.get_topology_desc("v6e:2x2", platform="tpu")
mesh = Mesh(np.array(topology.devices), ("expert",))
split = NamedSharding(mesh, P("expert"))
n, k, E, L, F = 4 * 512, 4, 16, 256, 512
like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=split)
experts = tuple(like(jnp.bfloat16, E, *shape) for shape in ((F, L), (F, L), (L, F)))
inputs = like(jnp.bfloat16, n, L), like(jnp.float32, n, k), experts
fixed = like(jnp.int32, n, k), like(bool, n)

def loss(inputs, indices, valid):
    def body(x, weights, experts, indices, valid):
        unit = Unit(Activation("situ"))
        return apply_experts(x, weights, indices, valid, experts, unit, ("expert",), ("expert",), sys.argv[1])[0]
    run = jax.shard_map(body, mesh=mesh, in_specs=(P("expert"),) * 5, out_specs=P("expert"), check_vma=False)
    return jnp.sum(run(*inputs, indices, valid).astype(jnp.float32) ** 2)

program = jax.jit(jax.grad(loss)).lower(inputs, *fixed).compile()
text = program.as_text()
sent = [line for line in text.split("\\n") if "all-to-all" in line and "bf16" in line.split(" = ")[1].split("all-to-all")[0]]
ragged = sum("ragged-all-to-all(" in line or "ragged-all-to-all-start(" in line for line in sent)
regular = sum(" all-to-all(" in line or " all-to-all-start(" in line for line in sent)
print(ragged, regular, program.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.parametrize("impl", ["fixed", "ragged"])
def test_compiles_for_tpus(impl, compiled_for_tpus):
    ragged, regular, temporary = map(int, compiled_for_tpus(PROGRAM, impl))
    assert (ragged >= 4 and regular == 0) if impl == "ragged" else (regular >= 4 and ragged == 0)
    assert temporary < 64 * 2**20  # 2048 rows of 256 bfloat16 are 1 MiB
