"""A mixture of experts on one device: the routed layer beside every expert on every token, and beside bare products.

Each takes tokens x [n,L], the router's matrix and the experts' three, and gives the sum over tokens and outputs; its
gradients by all five are compared before anything is timed.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.bench.timing import interleaved, machine, progress, table
from k3jax.ops.experts import IMPLS, Activation, Unit, apply_experts, experts_reference
from k3jax.ops.router import route

UNIT = Unit(Activation("situ"))
TOLERANCE = 1e-4
DENSE, BATCHED, PRODUCTS = "dense", "dense, batched", "products alone"
RESULTS = ("loss", *(f"gradient of {x}" for x in ("x", "the router", "w1", "w3", "w2")))


def _layer(impl: str, k: int, weights, x, gate, *experts):
    scores = jax.nn.sigmoid(x @ gate.T)
    routing = route(scores, jnp.zeros(scores.shape[1]), k)
    if impl == DENSE:
        y = experts_reference(x, routing.weights, routing.indices, experts, UNIT)
    elif impl == BATCHED:
        y = _batched(x, routing.weights, routing.indices, *experts)
    else:
        valid = jnp.ones(len(x), bool)
        y, _ = apply_experts(x, routing.weights, routing.indices, valid, experts, UNIT, impl=impl)
    return jnp.sum(y * weights)


def _batched(x, weights, indices, w1, w3, w2):
    """`experts_reference` with a copy of the tokens for every expert, which CPUs multiply in half the time."""
    E = len(w1)
    copies = jnp.broadcast_to(x[None], (E, *x.shape))
    product = partial(jnp.einsum, "eni,eoi->eno")
    every = product(UNIT(product(copies, w1), product(copies, w3)), w2)
    combine = jnp.sum(jax.nn.one_hot(indices, E, dtype=weights.dtype) * weights[:, :, None], axis=1)
    return jnp.einsum("ne,enl->nl", combine, every)


def _products(weights, rows, w1, w3, w2):
    """What the experts multiply at equal loads, and hardly anything else: rows [E,C,L]."""
    hidden = jnp.einsum("ecl,efl->ecf", rows, w1) + jnp.einsum("ecl,efl->ecf", rows, w3)
    return jnp.sum(jnp.einsum("ecf,elf->ecl", hidden, w2) * weights)


def run(options) -> dict[str, Any]:
    """Compares forward + backward as the command's options say; what `text` prints, fit for JSON.

    Example:
        >>> run(BenchMoe())["rows"]["fixed"]["seconds"]
        1.23
    """
    n, k, E, L, F = options.tokens, options.active, options.experts, options.latent, options.width
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)  # noqa: E731
    tokens = draw(n, L), L**0.5 * draw(n, L), draw(E, L), draw(E, F, L), draw(E, F, L), draw(E, L, F)
    rows = jnp.resize(tokens[1], (E, n * k // E, L))
    # On CPUs ragged_dot multiplies every row with every expert.
    impls = [impl for impl in IMPLS[1:] if impl == "fixed" or jax.default_backend() != "cpu"]
    gradients = partial(jax.value_and_grad, argnums=(1, 2, 3, 4, 5))
    programs = {name: jax.jit(gradients(partial(_layer, name, k))) for name in (*impls, BATCHED, DENSE)}
    report = {impl: {} for impl in programs}
    truth = jax.device_get(programs[DENSE](*tokens))
    for impl in progress((*impls, BATCHED), "check"):
        found = jax.device_get(programs[impl](*tokens))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
        errors = [float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs]
        report[impl] = {"errors": dict(zip(RESULTS, errors, strict=True))}
        worst = max(report[impl]["errors"], key=report[impl]["errors"].get)
        if not max(errors) <= TOLERANCE:  # nor is nan
            report[impl] = {"wrong": f"{worst} off by {max(errors):.0e}"}
    calls = {name: partial(program, *tokens) for name, program in programs.items() if "wrong" not in report[name]}
    products = jax.jit(jax.value_and_grad(_products, argnums=(1, 2, 3, 4)))
    calls[PRODUCTS] = partial(products, jnp.resize(tokens[0], rows.shape), rows, *tokens[3:])
    times = interleaved(calls, options.repeats, "rounds")
    for name, taken in times.items():
        row = report.setdefault(name, {})
        row |= taken._asdict() | {"to_products": taken.seconds / times[PRODUCTS].seconds}
        row["dense_to_this"] = times[DENSE].seconds / taken.seconds
    routing = route(jax.nn.sigmoid(tokens[1] @ tokens[2].T), jnp.zeros(E), k)
    load = np.bincount(np.asarray(routing.indices).ravel(), minlength=E)
    return {
        "settings": dataclasses.asdict(options),
        "machine": machine(),
        "load": {"mean": n * k / E, "least": int(load.min()), "most": int(load.max())},
        "rows": report,
    }


def wrong(report) -> list[str]:
    """Whose results are wrong, and how."""
    return [f"{name}: {row['wrong']}" for name, row in report["rows"].items() if "wrong" in row]


def text(report) -> str:
    """The report as a table to read."""
    sizes = "{tokens} tokens, {active} of {experts} experts, L={latent}, F={width}, float32, {repeats} rounds"
    heading = ("forward + backward", "ms", "spread", "/ products", "dense / this", "error")
    rows = []
    for name, row in report["rows"].items():
        if "wrong" in row:
            rows.append((name, f"wrong: {row['wrong']}"))
            continue
        error = f"{max(row['errors'].values()):.0e}" if "errors" in row else "-"
        times = (f"{row[key] * 1e3:.0f}" for key in ("seconds", "spread_seconds"))
        rows.append((name, *times, f"{row['to_products']:.2f}", f"{row['dense_to_this']:.1f}", error))
    return "\n".join(
        [
            sizes.format(**report["settings"]),
            "JAX {jax}, {devices} {backend} ({device}), {cpus} CPUs".format(**report["machine"]),
            "tokens an expert: {mean:g} on average, {least} to {most}".format(**report["load"]),
            "",
            table([heading, *rows]),
        ]
    )
