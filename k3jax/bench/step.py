"""One device's training and decoding step of a configuration: time beside the matrix products it needs, and what the
mixture over depth adds to plain residuals."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.bench.timing import TIMED, interleaved, machine, progress, table
from k3jax.cache import init_cache
from k3jax.nn.model import K3, init_variables
from k3jax.run_config import MeshConfig, RunConfig
from k3jax.sharding import make_mesh
from k3jax.train import step as training

MIXED, PLAIN = "attention residuals", "plain residuals"
MATMUL = 2048


def run(config: RunConfig, repeats: int, decode_batch: int) -> dict[str, Any]:
    """Times training steps on random tokens and, with `decode_batch` > 0, decoding steps of so many rows; what `text`
    prints, fit for JSON.

    Utilisation is 6 * active parameters * tokens/s over the rate of a float32 product of 2048 x 2048 matrices.

    Example:
        >>> run(load_config("configs/midsize.py"), 3, 0)["training"]["attention residuals"]["utilisation"]
        0.483
    """
    config = dataclasses.replace(config, mesh=MeshConfig())
    models = {MIXED: config.model}
    if config.model.attn_res_block_size:
        models[PLAIN] = dataclasses.replace(config.model, attn_res_block_size=None)
    square = jnp.asarray(np.random.default_rng(0).standard_normal((MATMUL, MATMUL), np.float32))
    matmul = partial(jax.jit(partial(jnp.matmul, precision=lax.Precision.HIGHEST)), square, square)

    rows, calls = {}, {"matmul": matmul}
    for name, model in progress(list(models.items()), "compile"):
        rows[name], calls[name] = _training(dataclasses.replace(config, model=model))
    calls = {name: call for name, call in calls.items() if "wrong" not in rows.get(name, {})}
    times = interleaved(calls, repeats, "training")
    del calls
    rate, tokens = 2 * MATMUL**3 / times.pop("matmul").seconds, config.data.batch_size * config.data.seq_len
    for name, taken in times.items():
        rows[name] |= taken._asdict() | {"tokens_per_second": tokens / taken.seconds}
        rows[name]["utilisation"] = 6 * models[name].num_active_parameters * tokens / taken.seconds / rate
    decoding = None
    if decode_batch:
        steps = {name: _decoding(model, decode_batch, repeats * (TIMED + 1)) for name, model in models.items()}
        decoding = {name: taken._asdict() for name, taken in interleaved(steps, repeats, "decoding").items()}
    model = config.model
    return {
        "settings": {"tokens": tokens, "seq_len": config.data.seq_len, "decode_batch": decode_batch, "repeats": repeats}
        | {"parameters": model.num_parameters, "active_parameters": model.num_active_parameters}
        | {"layers": model.num_hidden_layers, "width": model.hidden_size, "dtype": config.train.dtype},
        "machine": machine(),
        "matmul_flops_per_second": rate,
        "training": rows,
        "decoding": decoding,
        "overhead": {kind: _overhead(found) for kind, found in (("training", rows), ("decoding", decoding))},
    }


def _training(config: RunConfig) -> tuple[dict[str, Any], Callable[[], Any]]:
    """What the compiled step says of itself, and a call that takes the next one."""
    mesh = make_mesh()
    rng = np.random.default_rng(0)
    shape = config.data.batch_size, config.data.seq_len
    tokens, targets = (rng.integers(config.model.vocab_size, size=shape).astype(np.int32) for _ in range(2))
    batch = {"tokens": tokens, "targets": targets, "segment_ids": np.ones(shape, np.int32)}
    with jax.set_mesh(mesh):
        state, shardings = training.init_state(config, mesh)
        batch = training.shard_batch(batch | {"weights": np.ones(shape, np.float32)}, mesh)
        start = time.perf_counter()
        program = training.make_train_step(config, shardings).lower(state, batch).compile()
        seconds = time.perf_counter() - start
    state, metrics = program(state, batch)
    kept, loss = [state], float(metrics["loss"])

    def call():
        state, metrics = program(kept.pop(), batch)
        kept.append(state)
        return state, metrics

    row = {"loss": loss, "compile_seconds": seconds, "temp_bytes": program.memory_analysis().temp_size_in_bytes}
    # Random targets: nothing is learnt yet, so the loss is that of a guess.
    if not abs(loss - math.log(config.model.vocab_size)) < 0.5:  # nor is nan
        row["wrong"] = f"first loss {loss:.3f}, of a guess {math.log(config.model.vocab_size):.3f}"
    return row, call


def _decoding(model, batch: int, steps: int) -> Callable[[], Any]:
    """A call that decodes one more token of every row."""
    k3 = K3(model)
    variables = jax.jit(lambda: nn.unbox(init_variables(k3, jax.random.key(0))))()

    def step(variables, cache, tokens):
        out = k3.apply(variables, tokens, cache=cache)
        return out.cache, jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

    program = jax.jit(step, donate_argnums=1)
    kept = [(init_cache(model, batch, steps + 1), jnp.zeros((batch, 1), jnp.int32))]

    def call():
        cache, tokens = kept.pop()
        kept.append(program(variables, cache, tokens))
        return kept[0]

    return call


def _overhead(rows) -> float | None:
    """Of the mixture over depth, relative to plain residuals."""
    if not rows or any("seconds" not in rows.get(name, {}) for name in (MIXED, PLAIN)):
        return None
    return rows[MIXED]["seconds"] / rows[PLAIN]["seconds"] - 1


def wrong(report) -> list[str]:
    """Whose loss is wrong, and how."""
    return [f"{name}: {row['wrong']}" for name, row in report["training"].items() if "wrong" in row]


def text(report) -> str:
    """The report as tables to read."""
    sizes = "{parameters:,} parameters, {active_parameters:,} active, {layers} layers of width {width}, {dtype}"
    heading = ("training", "ms a step", "spread", "tokens/s", "of matmul rate", "temp MB", "compile s", "first loss")
    rows = []
    for name, row in report["training"].items():
        if "wrong" in row:
            rows.append((name, f"wrong: {row['wrong']}"))
            continue
        times = f"{row['seconds'] * 1e3:.0f}", f"{row['spread_seconds'] * 1e3:.0f}", f"{row['tokens_per_second']:.0f}"
        more = f"{row['temp_bytes'] / 1e6:.0f}", f"{row['compile_seconds']:.0f}", f"{row['loss']:.3f}"
        rows.append((name, *times, f"{100 * row['utilisation']:.1f} %", *more))
    lines = [
        sizes.format(**report["settings"]),
        "{tokens} tokens a step in sequences of {seq_len}, {repeats} rounds".format(**report["settings"]),
        "JAX {jax}, {devices} {backend} ({device}), {cpus} CPUs".format(**report["machine"])
        + f", matmul {report['matmul_flops_per_second'] / 1e9:.3g} GFLOP/s",
        "",
        table([heading, *rows]),
    ]
    if report["decoding"]:
        taken = ((name, f"{row['seconds'] * 1e3:.2f}", f"{row['spread_seconds'] * 1e3:.2f}") for name, row in report["decoding"].items())
        lines += ["", table([(f"decoding, {report['settings']['decode_batch']} rows", "ms a step", "spread"), *taken])]
    for kind, overhead in report["overhead"].items():
        if overhead is not None:
            lines.append(f"{kind}: attention residuals cost {100 * overhead:.1f} %")
    return "\n".join(lines)
