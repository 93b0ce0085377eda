"""The mesh, and what the table of `k3jax/rules.py` says of arrays on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.derivative import by_hand
from k3jax.rules import MESH_AXES, RULES, pieces

Logical = Sequence[str | None]  # names of an array's leading axes


def make_mesh(
    data: int = 1, fsdp: int = 1, expert: int = 1, context: int = 1, tensor: int = 1, devices: Sequence | None = None
) -> Mesh:
    """A mesh of data * fsdp * expert * context * tensor devices, the first of all by default.

    Raises:
        ValueError: sizes that are not positive or need more devices than there are.

    Example:
        >>> with jax.set_mesh(make_mesh(fsdp=2, expert=2, tensor=2)):
        ...     out = model.apply(variables, tokens)
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, expert, context, tensor)))
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh.{axis}: found {size}, must be positive")
    devices = list(jax.devices() if devices is None else devices)
    total = math.prod(sizes.values())
    if total > len(devices):
        raise ValueError(f"mesh: found {sizes}, which needs {total} devices; there are {len(devices)}")
    # Axes of a TPU's network may be split between axes of the mesh: most meshes could not be laid out otherwise.
    places = mesh_utils.create_device_mesh(tuple(sizes.values()), devices[:total], allow_split_physical_axes=True)
    return Mesh(places, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(logical: Logical, shape: Sequence[int], mesh) -> P:
    """PartitionSpec of an array whose axes are named `logical` (None: not split).

    Raises:
        ValueError: an unknown name, one mesh axis used by two of the array's axes, or a size that does not divide.
    """
    used: dict[str, str] = {}
    parts = []
    for name, size in zip(logical, shape, strict=True):
        if name is not None and name not in RULES:
            raise ValueError(f"logical axis {name!r}: unknown, must be one of {', '.join(RULES)}")
        axes = tuple(axis for axis in RULES.get(name, ()) if mesh.shape[axis] > 1)
        for axis in axes:
            if axis in used:
                raise ValueError(f"mesh axis {axis!r} would split both {used[axis]!r} and {name!r} of one array")
            used[axis] = name
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            split = " * ".join(f"mesh.{axis}" for axis in axes)
            raise ValueError(f"{name}: found size {size}, must be a multiple of {split} = {ways}")
        parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return P(*parts)


def ways(name: str, mesh) -> int:
    """Parts a logical axis is split into; 1 without a mesh."""
    return 1 if mesh is None else pieces(name, mesh.shape)


def filled(x: Array, sizes: Sequence[int], value=0) -> Array:
    """x with `value` behind what is there, so that its leading axes have at least `sizes`."""
    more = [max(size - found, 0) for size, found in zip(sizes, x.shape)]
    if not any(more):
        return x
    return jnp.pad(x, [(0, n) for n in more] + [(0, 0)] * (x.ndim - len(more)), constant_values=value)


def along(name: str, T: int) -> str | None:
    """`name` for an axis of T tokens; None for a single one, which all devices that hold its row decode."""
    return name if T > 1 else None


def current_mesh():
    """The mesh of the surrounding `jax.set_mesh`, or None: on one device nothing is split."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def constrain(x: Array, *logical: str | None) -> Array:
    """Places an activation by its logical axes on the current mesh."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(logical, x.shape, mesh))


def mesh_axes(name: str | None) -> tuple[str, ...]:
    """Axes of the current mesh, of more than one device, that a logical axis is split over."""
    mesh = current_mesh()
    return () if mesh is None else tuple(axis for axis in RULES.get(name, ()) if mesh.shape[axis] > 1)


def on_shards(fn: Callable, in_axes: Sequence[Logical], out_axes: Sequence[Logical]) -> Callable:
    """`fn` run by every device on its own block of each argument, whose leading axes are named; `fn` itself on one device.

    The result raises ValueError, as `spec` does, for an argument whose sizes do not divide.

    Example:
        >>> on_shards(kda, [("batch", None, "heads")] * 5, [("batch", None, "heads"), ("batch", "heads")])
    """
    mesh = current_mesh()
    if mesh is None:
        return fn
    to_specs = lambda axes: tuple(P(*(mesh_axes(name) or None for name in logical)) for logical in axes)  # noqa: E731
    # Results that are equal on several devices are so by construction; the check would not see it through collectives.
    run = jax.shard_map(fn, mesh=mesh, in_specs=to_specs(in_axes), out_specs=to_specs(out_axes), check_vma=False)

    def checked(*args):
        for logical, x in zip(in_axes, args, strict=True):
            if x is not None:
                spec((*logical, *[None] * (x.ndim - len(logical))), x.shape, mesh)
        return run(*args)

    return checked


@partial(by_hand, nondiff_argnums=(1, 2))
def gathered(x: Array, axes: tuple[str, ...], axis: int) -> Array:
    """Inside `shard_map`, x whole along `axis`, which mesh `axes` split in R: [..,n,..] -> [..,R n,..], in x's dtype.

    The derivative is summed over those devices, in its own dtype, and each is left its n.

    Example:
        >>> w = gathered(w, mesh_axes("embed"), 1)
    """
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True)


def _gathered_backward(axes, axis, _, d):
    # As rows of which each device gets a stretch: else TPUs may sum everything everywhere, and then take their part.
    d = d.reshape(*d.shape[:axis], jax.lax.axis_size(axes), -1, *d.shape[axis + 1 :])
    parts = jnp.moveaxis(d, axis, 0)
    rows = jax.lax.psum_scatter(parts.reshape(-1, parts.shape[-1]), axes, scatter_dimension=0, tiled=True)
    return (rows.reshape(parts.shape[1:]),)


gathered.defvjp(lambda x, axes, axis: (gathered(x, axes, axis), None), _gathered_backward)


def tree_shardings(boxed, mesh: Mesh):
    """NamedShardings of an abstract variable tree whose leaves carry their logical axes (replicated without)."""

    def one(leaf):
        if isinstance(leaf, nn.LogicallyPartitioned):
            return NamedSharding(mesh, spec(leaf.names, leaf.value.shape, mesh))
        return NamedSharding(mesh, P())

    return jax.tree.map(one, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
