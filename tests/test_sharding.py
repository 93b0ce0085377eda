"""The rule table, its refusals, and the mesh. What runs on a mesh is tested in test_mesh.py."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.sharding import MESH_AXES, constrain, current_mesh, make_mesh, spec, tree_shardings, ways


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(fsdp=2, expert=2, tensor=2)


@pytest.mark.parametrize(
    "logical, shape, expected",
    [
        (("vocab", "embed"), (64, 32), P("tensor", "fsdp")),
        (("heads", None, "embed"), (4, 3, 8), P("tensor", None, "fsdp")),
        (("layers", "experts", "expert_out"), (3, 8, 6), P(None, ("expert", "tensor"), "fsdp")),
        (("batch", "seq", None), (8, 6, 5), P(("fsdp", "expert"), "tensor", None)),  # data, context: size 1
        ((), (), P()),
    ],
)
def test_spec(mesh, logical, shape, expected):
    assert spec(logical, shape, mesh) == expected


def test_axes_of_size_one_split_nothing():
    assert spec(("batch", "embed"), (3, 5), make_mesh()) == P(None, None)


@pytest.mark.parametrize(
    "logical, shape, message",
    [
        (("vocab", "head"), (64, 32), "logical axis 'head': unknown, must be one of batch, seq, time, heads"),
        (("batch", "embed"), (8, 8), "mesh axis 'fsdp' would split both 'batch' and 'embed' of one array"),
        (("seq", "mlp"), (8, 8), "mesh axis 'tensor' would split both 'seq' and 'mlp' of one array"),
        (("heads", "vocab"), (8, 8), "mesh axis 'tensor' would split both 'heads' and 'vocab'"),
        (("vocab",), (65,), "vocab: found size 65, must be a multiple of mesh.tensor = 2"),
        (("experts",), (6,), r"experts: found size 6, must be a multiple of mesh.expert \* mesh.tensor = 4"),
    ],
)
def test_spec_refuses(mesh, logical, shape, message):
    with pytest.raises(ValueError, match=message):
        spec(logical, shape, mesh)


def test_a_collision_needs_an_axis_of_more_than_one_device():
    assert spec(("batch", "embed"), (8, 8), make_mesh(expert=2)) == P("expert", None)


def test_ways(mesh):
    assert [ways(name, mesh) for name in ("batch", "seq", "experts", "layers")] == [4, 2, 4, 1]
    assert ways("batch", None) == 1


def test_make_mesh():
    mesh = make_mesh(data=2, tensor=3)
    assert mesh.axis_names == MESH_AXES == ("data", "fsdp", "expert", "context", "tensor")
    assert tuple(mesh.shape.values()) == (2, 1, 1, 1, 3)
    assert mesh.axis_types == (AxisType.Auto,) * 5  # logical constraints need it
    assert list(mesh.devices.flat) == jax.devices()[:6]
    chosen = jax.devices()[6:]
    assert list(make_mesh(expert=2, devices=chosen).devices.flat) == chosen


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"fsdp": 0}, "mesh.fsdp: found 0, must be positive"),
        ({"tensor": -2}, "mesh.tensor: found -2, must be positive"),
        ({"fsdp": 3, "tensor": 3}, "mesh: found .*'fsdp': 3.*, which needs 9 devices; there are 8"),
    ],
)
def test_make_mesh_refuses(sizes, message):
    with pytest.raises(ValueError, match=message) as caught:
        make_mesh(**sizes)
    assert "\n" not in str(caught.value)


def test_constrain_places_on_the_current_mesh(mesh):
    place = lambda x: constrain(x, "batch", None, "heads")  # noqa: E731
    assert current_mesh() is None
    x = jnp.ones((4, 3, 2))
    assert place(x) is x
    with jax.set_mesh(make_mesh()):
        assert current_mesh() is None  # one device: nothing to place
    with jax.set_mesh(mesh):
        assert current_mesh().shape == mesh.shape
        placed = jax.jit(place)(x)
        assert placed.sharding.is_equivalent_to(NamedSharding(mesh, P(("fsdp", "expert"), None, "tensor")), 3)
        with pytest.raises(ValueError, match="heads: found size 3"):
            jax.jit(place)(jnp.ones((4, 3, 3)))


def test_tree_shardings(mesh):
    tree = {
        "w": nn.LogicallyPartitioned(jnp.ones((4, 6)), ("mlp", "embed")),
        "step": jnp.zeros((), jnp.int32),
    }
    found = tree_shardings(jax.eval_shape(lambda: tree), mesh)
    assert found == {"w": NamedSharding(mesh, P("tensor", "fsdp")), "step": NamedSharding(mesh, P())}
