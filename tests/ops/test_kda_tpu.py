"""KDA compiled for TPUs by the real compiler, ahead of time and without one: the chunked form and tokamax's kernel."""

import pytest

from k3jax.ops import kda_tokamax

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from k3jax.ops import kda

topology = topologies.get_topology_desc("v6e:2x2", platform="tpu")
mesh = Mesh(np.array(topology.devices), ("tensor",))
jax.default_backend = lambda: "tpu"
impl = sys.argv[1]
if impl == "tokamax":
    from tokamax._src import config
    config.cross_compile(True).__enter__()
tokens, wide = P(None, None, "tensor", None), P(None, None, "tensor")
like = lambda shape, spec, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
shape = (1, 512, 8, 128)
inputs = [like(shape, tokens, jnp.bfloat16) for _ in range(3)]
inputs += [like(shape, tokens, jnp.float32), like(shape[:3], wide, jnp.float32)]
run = jax.shard_map(
    lambda *x: kda(*x, gate_lower_bound=-5.0, impl=impl),
    mesh=mesh, in_specs=(*[tokens] * 4, wide), out_specs=(tokens, P(None, "tensor")), check_vma=False,
)
def loss(x):
    o, state = run(*x)
    return jnp.sum(o.astype(jnp.float32) ** 2) + jnp.sum(state**2)
text = jax.jit(jax.grad(loss)).lower(inputs).compile().as_text()
print("kernels", text.count("tpu_custom_call"), "products", text.count("convolution(") + text.count(" dot("))
"""


@pytest.mark.parametrize("impl", ["chunked", "tokamax"])
def test_compiles_for_tpus(impl, compiled_for_tpus):
    if impl == "tokamax" and not kda_tokamax.installed():
        pytest.skip("the tokamax library is not installed")
    _, kernels, _, products = compiled_for_tpus(PROGRAM, impl)
    assert int(kernels) > 0 if impl == "tokamax" else int(kernels) == 0 and int(products) > 20
