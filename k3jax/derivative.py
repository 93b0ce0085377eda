"""Derivatives that are written by hand for reverse mode: forward mode through them is refused in words that help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def by_hand(function: Callable, nondiff_argnums: Sequence[int] = ()) -> Callable:
    """`jax.custom_vjp(function, nondiff_argnums)`, which refuses forward mode as `reverse_only` does.

    `plain` of the result is `function` itself, which JAX differentiates as it is written.
    """
    inner = jax.custom_vjp(function, nondiff_argnums)

    @wraps(function)
    def call(*args):
        return inner(*(arg if i in nondiff_argnums else reverse_only(arg) for i, arg in enumerate(args)))

    call.defvjp, call.plain = inner.defvjp, function
    return call


def reverse_only(tree):
    """`tree`, for a derivative of which only reverse mode is known. It costs nothing.

    Raises:
        TypeError: `jax.jvp`, `jax.linearize` or `jax.jacfwd` through it, when the tangents are computed.
    """
    floating = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: _marked.bind(x) if floating(x) else x, tree)


def _refuse(*_, **__):
    raise TypeError(
        'forward mode (jax.jvp, jax.linearize, jax.jacfwd): needs impl="scan" of kda, or kda_impl="scan" of K3 on one '
        "device; other forms have derivatives for reverse mode alone"
    )


# Two identities: on values, and on tangents, which reverse mode transposes and never computes.
_marked, _tangent = Primitive("reverse_only"), Primitive("reverse_only_tangent")
for _primitive in (_marked, _tangent):
    _primitive.def_abstract_eval(lambda x: x)
_marked.def_impl(lambda x: x)
mlir.register_lowering(_marked, lambda _, x: [x])
batching.defvectorized(_marked)
ad.primitive_jvps[_marked] = lambda values, tangents: (*values, _computed(*tangents))
_tangent.def_impl(_refuse)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])


def _computed(tangent):
    return tangent if type(tangent) is ad.Zero else _tangent.bind(tangent)
