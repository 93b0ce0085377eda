"""Kimi Delta Attention: every implementation at hand on the same inputs, checked first and then timed.

All take q, k, v, the logits z of the decays g = -5 sigmoid(z), and beta (shapes as for `k3jax.ops.kda`), and
give o and the final state. So the way from logits to decays costs each of them the same.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.bench.timing import interleaved, machine, progress, table
from k3jax.ops import kda, kda_gate, kda_tokamax
from k3jax.ops.kda_tiles import CHUNK, TILE

BOUND = -5.0
FORWARD, BOTH = "forward", "forward + backward"
KINDS = {FORWARD: 1, BOTH: 3}  # and their least FLOPs, in those of a forward pass
RESULTS = ("o", "final state", *(f"gradient of {x}" for x in ("q", "k", "v", "z", "beta")))
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
CHECKED = 512  # tokens: a differentiated scan keeps several states a token, here in float64
MATMUL = 2048
DECODE = (96, 128, 128)  # H, K, V of the released model


def implementations() -> dict[str, Callable]:
    """What there is to compare, by name."""
    found = {impl: partial(_k3jax, impl) for impl in ("scan", "chunked", "auto")}
    return found | ({"tokamax xla_chunked": _tokamax} if kda_tokamax.installed() else {})


def _k3jax(impl: str, q, k, v, z, beta, state=None):
    H, K = z.shape[2:]
    g = kda_gate(z, jnp.zeros(H), jnp.zeros((H, K)), BOUND)
    return kda(q, k, v, g, beta, state, gate_lower_bound=BOUND, impl=impl)


def _tokamax(q, k, v, z, beta):
    from tokamax._src.ops.kda import api

    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every shape that it was not tuned for
    o, state = api.kimi_delta_attention(
        *(jnp.moveaxis(x, 2, 0) for x in (q, k, v, z, beta)),
        a_log=jnp.zeros(z.shape[2]),
        scale=1.0,
        output_final_state=True,
        use_gate_in_kernel=True,
        lower_bound=BOUND,
        implementation="xla_chunked",
    )
    return jnp.moveaxis(o, 0, 2), state[:, 0]


def chunked_flops(B: int, T: int, H: int, K: int, V: int) -> int:
    """FLOPs of the matrix products that the chunked form's forward pass needs where decays are bounded.

    [m,n] x [n,p] counts 2 m n p. The running sums of the decays are products there too, but need not be, so
    they are left out.

    Example:
        >>> chunked_flops(1, 2048, 4, 128, 128) / 1e9
        1.069547520
    """
    tiles = CHUNK // TILE
    flops = 2 * (2 * CHUNK) * K * V  # what keys and queries read of the state
    flops += 2 * CHUNK * K * V  # what the updates leave in it
    flops += 2 * CHUNK * CHUNK * V  # the updates u: N (v - what the keys read)
    flops += 2 * CHUNK * CHUNK * V  # what the queries read of them: P u
    flops += tiles * 2 * (2 * TILE) * TILE * K  # A and P inside a tile: keys and queries against keys
    flops += tiles * (TILE.bit_length() - 2) * 2 * 2 * TILE**3  # a tile's inverse: 2 a level, from 2 x 2 on
    size = TILE
    while size < CHUNK:  # neighbours merge
        merges = CHUNK // (2 * size)
        flops += merges * 2 * (2 * size) * size * K  # A and P from one to the other
        flops += merges * 2 * 2 * size**3  # the inverse's lower block
        size *= 2
    return B * H * -(-T // CHUNK) * flops


def run(options) -> dict[str, Any]:
    """Compares the implementations as the command's options say; what `text` prints, fit for JSON.

    Example:
        >>> run(BenchKda())["implementations"]["chunked"]["forward + backward"]["seconds"]
        0.055
    """

    def sizes(T):
        return options.batch, T, options.heads, options.key_dim, options.value_dim

    def draw(T):
        return _draw(options.dtype, *sizes(T))

    runs = implementations()
    rows = _check(runs, draw(min(options.tokens, CHECKED)), TOLERANCE[options.dtype])
    right = {name: run for name, run in runs.items() if "wrong" not in rows[name]}

    inputs = draw(options.tokens)
    square = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL), jnp.float32)
    calls = {"matmul": partial(jax.jit(partial(jnp.matmul, precision=lax.Precision.HIGHEST)), square, square)}
    for name, kind in progress(list(product(right, KINDS)), "compile"):
        rows[name][kind], calls[name, kind] = _compile(_timed(right[name])[kind], inputs)
    growth = None
    if options.long_tokens and "chunked" in right:
        growth, calls["long"] = _compile(_timed(right["chunked"])[BOTH], draw(options.long_tokens))
    # The greediest last: what follows it waits for the system to hand its memory out again.
    memory = {(name, kind): rows[name][kind].get("temp_bytes", 0) for name, kind in product(right, KINDS)}
    memory["long"] = (growth or {}).get("temp_bytes", 0)
    order = sorted((name for name, call in calls.items() if call), key=lambda name: memory.get(name, 0))
    times = interleaved({name: calls[name] for name in order}, options.repeats, "rounds")

    rate = 2 * MATMUL**3 / times.pop("matmul").seconds
    if "long" in times:
        growth |= times.pop("long")._asdict()
        fewer, less = options.tokens / options.long_tokens, rows["chunked"][BOTH]["temp_bytes"]
        growth["time_a_token"] = fewer * growth["seconds"] / times["chunked", BOTH].seconds
        growth["memory_a_token"] = fewer * growth["temp_bytes"] / less
    flops = chunked_flops(*sizes(options.tokens))
    for (name, kind), taken in times.items():
        row, ours = rows[name][kind], times.get(("chunked", kind))
        row |= taken._asdict() | {
            "to_chunked": taken.seconds / ours.seconds if ours else None,
            "to_floor": taken.seconds * rate / (KINDS[kind] * flops),
            "temp_to_q": row["temp_bytes"] / inputs[1].nbytes,
        }
    return {
        "settings": dataclasses.asdict(options),
        "machine": machine(),
        "matmul_flops_per_second": rate,
        "chunked_forward_flops": flops,
        "implementations": rows,
        "growth": growth,
        "decode": _decode(options) if options.decode_batch else None,
    }


def _draw(dtype, B, T, H, K, V):
    """The weights of o and of the final state in the loss, then q, k, v, z, beta."""
    rng = np.random.default_rng(0)
    q, k, z, v, o = (rng.standard_normal((B, T, H, size), np.float32) for size in (K, K, K, V, V))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    state, beta = rng.standard_normal((B, H, K, V), np.float32), rng.standard_normal((B, T, H), np.float32)
    tokens = (*(jnp.asarray(x, dtype) for x in (q * np.float32(K**-0.5), k, v)), z, 1 / (1 + np.exp(-beta)))
    return jax.tree.map(jnp.asarray, ((o, state), *tokens))


def _timed(run: Callable) -> dict[str, Callable]:
    """By kind, a function of the weights and the five inputs."""

    def loss(weights, *tokens):
        return sum(jnp.sum(x.astype(w.dtype) * w) for x, w in zip(run(*tokens), weights, strict=True))

    gradients = jax.value_and_grad(loss, argnums=(1, 2, 3, 4, 5))
    return {FORWARD: lambda weights, *tokens: run(*tokens), BOTH: gradients}


# ---- correctness -------------------------------------------------------------------------------------------


def _check(runs: Mapping[str, Callable], inputs, tolerance: float) -> dict[str, dict[str, Any]]:
    with jax.enable_x64(True):
        truth = _results(partial(_k3jax, "scan"), _double(inputs))
    runs = progress(runs.items(), "check")
    return {name: _compare(_results(run, inputs), truth, tolerance) for name, run in runs}


def _results(run: Callable, inputs) -> tuple:
    forward, (_, gradients) = (jax.jit(function)(*inputs) for function in _timed(run).values())
    return *forward, *gradients


def _double(x):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), x)


def _compare(got, truth, tolerance: float) -> dict[str, Any]:
    """Each result's error, max |got - truth| / max |truth|; or, in words, the first that is too large."""
    double = partial(np.asarray, dtype=np.float64)
    pairs = zip(RESULTS, map(double, got), map(double, truth), strict=False)
    errors = {name: float(np.max(np.abs(x - y)) / np.max(np.abs(y))) for name, x, y in pairs}
    for name, error in errors.items():
        if not error <= tolerance:  # nor is nan
            return {"wrong": f"{name} off by {error:.0e}"}
    return {"errors": errors}


# ---- measurement -------------------------------------------------------------------------------------------


def _compile(function: Callable, inputs) -> tuple[dict[str, Any], Callable | None]:
    start = time.perf_counter()
    try:
        program = jax.jit(function).lower(*inputs).compile()
        seconds = time.perf_counter() - start
        jax.block_until_ready(program(*inputs))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"failed": "out of memory"}, None
    row = {"compile_seconds": seconds, "temp_bytes": program.memory_analysis().temp_size_in_bytes}
    return row, partial(program, *inputs)


def _decode(options) -> dict[str, Any]:
    """A step of one token on a donated state, beside two ways to move such a state."""
    (_, state), *tokens = _draw(options.dtype, options.decode_batch, 1, *DECODE)

    def step(state, *tokens, impl="auto"):
        return _k3jax(impl, *tokens, state)

    with jax.enable_x64(True):
        truth = jax.jit(partial(step, impl="scan"))(*_double((state, *tokens)))
    row = _compare(jax.jit(step)(state, *tokens), truth, TOLERANCE[options.dtype])
    if "wrong" in row:
        return row
    calls = {
        "step": _handing_on(step, state, *tokens),
        "copy": partial(jax.jit(jnp.copy), state),
        "in_place": _handing_on(lambda x: x * 1.000001, state),
    }
    times = interleaved(calls, options.repeats, "decode")
    step = times.pop("step")
    for name, other in times.items():
        row |= {f"{name}_seconds": other.seconds, f"to_{name}": step.seconds / other.seconds}
    return row | step._asdict() | {"state_bytes": state.nbytes}


def _handing_on(function: Callable, state, *rest) -> Callable:
    """A call that gives `function` the state in its place and keeps the new one, the last of the results."""
    program = jax.jit(function, donate_argnums=0)
    kept = [jnp.array(state)]

    def call():
        results = program(kept.pop(), *rest)
        kept.append(jax.tree.leaves(results)[-1])
        return results

    return call


# ---- report ------------------------------------------------------------------------------------------------


def wrong(report: Mapping[str, Any]) -> list[str]:
    """Whose results are wrong, and how."""
    rows = report["implementations"] | {"decode": report["decode"] or {}}
    return [f"{name}: {row['wrong']}" for name, row in rows.items() if "wrong" in row]


def text(report: Mapping[str, Any]) -> str:
    """The report as tables to read."""
    settings, growth, decode = report["settings"], report["growth"], report["decode"]
    sizes = "B={batch} T={tokens} H={heads} K={key_dim} V={value_dim} {dtype}, {repeats} rounds"
    lines = [
        sizes.format(**settings),
        "JAX {jax}, {devices} {backend} ({device}), {cpus} CPUs".format(**report["machine"]),
        f"forward {report['chunked_forward_flops'] / 1e9:.3g} GFLOP in the chunked form, "
        f"matmul {report['matmul_flops_per_second'] / 1e9:.3g} GFLOP/s",
    ]
    for kind in KINDS:
        heading = (kind, "ms", "spread", "/ chunked", "/ floor", "compile s", "temp MB", "/ q", "error")
        rows = [(name, *_columns(row, kind)) for name, row in report["implementations"].items()]
        lines += ["", table([heading, *rows])]
    lines.append("")
    if growth:
        said = "time {time_a_token:.2f}, temporary memory {memory_a_token:.2f}"
        said = _said(growth) or said.format(**growth)
        what = "{long_tokens} tokens against {tokens}, a token".format(**settings)
        lines.append(f"chunked {BOTH}, {what}: {said}")
    if decode:
        said = "{seconds:.3g} s, {to_copy:.2f} of a copy of the state, {to_in_place:.2f} of a pass in place"
        said = _said(decode) or said.format(**decode)
        lines.append("decode step, B={} H={} K={} V={}: {}".format(settings["decode_batch"], *DECODE, said))
    return "\n".join(lines).rstrip()


def _said(row: Mapping[str, Any]) -> str | None:
    """What stands in place of a time."""
    return f"wrong: {row['wrong']}" if "wrong" in row else row.get("failed")


def _columns(row: Mapping[str, Any], kind: str) -> list[str]:
    if said := _said(row) or _said(row[kind]):
        return [said]
    x = row[kind]
    ratio = "-" if x["to_chunked"] is None else f"{x['to_chunked']:.2f}"
    times = f"{x['seconds'] * 1e3:.2f}", f"{x['spread_seconds'] * 1e3:.2f}", ratio, f"{x['to_floor']:.2f}"
    memory = f"{x['temp_bytes'] / 1e6:.1f}", f"{x['temp_to_q']:.1f}"
    return [*times, f"{x['compile_seconds']:.2f}", *memory, f"{max(row['errors'].values()):.0e}"]
