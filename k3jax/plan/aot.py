"""The ahead-of-time check: the product's own step, compiled by the real TPU compiler for a topology that nobody has to own.

`check` compiles in a process of its own (extra `tpu`: `jax[tpu]`), with a time limit and a line of progress, and says what
the compiler says: memory, collectives, bytes accessed, or by how much the program does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from k3jax.config import ModelConfig
from k3jax.rules import pieces
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig

# The compiler asks the machine about its TPUs unless it is told; the topology decides what it compiles for.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "MALLOC_ARENA_MAX": "2",  # of glibc: else the compiler's threads keep a third more memory
}
_TOO_LARGE = re.compile(r"CompileTimeHbmOom.*?\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", re.DOTALL)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
TOPOLOGIES = {
    "v5e": "v5e:16x16",
    "v5p": "v5p:8x8x16",
    "v6e": "v6e:16x16",
    "tpu7x": "tpu7x:4x4x2",
}  # families, with an example of each


@dataclass(frozen=True)
class Program:
    """One step of a model on a mesh of a topology.

    Devices are counted as JAX does, two a chip on TPU 7x: `tpu7x:4x4x2` has 64. A mesh may leave some of them alone.
    """

    model: ModelConfig
    mesh: MeshConfig
    topology: str
    """Family and chips along each axis, such as v5p:8x8x16."""
    phase: Literal["train", "decode", "prefill"] = "train"
    """What the step does."""
    batch: int = 1024
    """Sequences, over all devices; in serving, any number."""
    length: int = 4096
    """Tokens of a sequence in training, of a row's cache in serving."""
    piece: int = 8192
    """Tokens of every row that one prefill step takes."""
    qat: bool = True
    """Training: MXFP4 expert weights and MXFP8 expert inputs."""
    remat: bool = True
    """Training: recompute activations."""
    grad_accum: int = 1
    """Training: parts the batch is computed in."""
    experts: Literal["packed", "dequantized"] = "packed"
    """Serving: routed experts in MXFP4, or in bfloat16."""
    quick: bool = False
    """Compile at the level O0, in about a third of the time: memory is the same within a tenth, collectives may differ."""

    def run_config(self) -> RunConfig:
        """The training run whose step this is: parameters and AdamW's moments float32, products bfloat16."""
        return RunConfig(
            model=self.model,
            data=DataConfig(seq_len=self.length, batch_size=self.batch),
            train=TrainConfig(dtype="bfloat16", qat=self.qat, remat=self.remat, grad_accum=self.grad_accum),
            mesh=self.mesh,
        )

    def validate(self) -> None:
        """Raises `ValueError`, one line, for a topology of no known family and sizes that do not fit together."""
        family, _, shape = self.topology.partition(":")
        if family not in TOPOLOGIES or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
            known = ", ".join(TOPOLOGIES.values())
            raise ValueError(f"topology={self.topology}: must be a family with chips along each axis, such as {known}")
        if self.phase == "train":
            self.run_config().validate()

    def smaller(self) -> list[tuple[str, Program]]:
        """What could be changed to need less memory, one thing at a time, the smallest change first."""
        parts = pieces("batch", vars(self.mesh))
        rows = -(-self.batch // parts)
        halves = [2**i for i in range(1, rows.bit_length()) if rows % 2**i == 0]
        if self.phase == "train":
            more = [self.grad_accum * n for n in halves if rows % (self.grad_accum * n) == 0]
            found = [] if self.remat else [("remat", True)]
            found += [("grad_accum", n) for n in more]
        else:
            found = [("experts", "packed")] if self.experts != "packed" and self.model.quantized_experts else []
            found += [("piece", self.piece // n) for n in (2, 4, 8)] if self.phase == "prefill" else []
            found += [("batch", rows // n * parts) for n in halves]
            found += [("length", self.length // n) for n in (2, 4, 8)]
        return [(f"{name}={value}", dataclasses.replace(self, **{name: value})) for name, value in found]


def check(program: Program, timeout: float = 600, shrink: bool = False, say=None) -> dict[str, Any]:
    """What the TPU compiler says of a program; fit for JSON.

    Args:
        timeout: seconds, after which the compiler is stopped and the result says so.
        shrink: where the program does not fit, also compile smaller ones, until one does: `fits_with` names the change.
        say: is told, about once a second, a line of progress.

    Returns:
        `fits` (None: stopped), `seconds` of each stage, `peak_rss_bytes` of the process, `versions`, and
        where it fits: `memory` (bytes a device: arguments, outputs, aliased, temporaries, total, code), `collectives` (kind,
        axes, times and sent_bytes a device), `accessed_bytes` (`hbm` of them in main memory; None where a loop does not say
        how often it runs, as in training with AttnRes), `once` (bytes and flops with loops counted once), `program_bytes`;
        where it does not: `needed_bytes`, `available_bytes` and `message`.

    Raises:
        ValueError: sizes that do not fit together, an unknown topology, or no TPU compiler.
        ChildProcessError: the compiler failed for another reason.

    Example:
        >>> check(Program(model, MeshConfig(fsdp=2, expert=4), "v6e:2x4", batch=16, length=512))["fits"]
        True
    """
    program.validate()
    found = _in_process(program, timeout, say)
    if shrink and found["fits"] is False:
        for change, smaller in program.smaller():
            tried = _in_process(smaller, timeout, say)
            if tried["fits"]:
                return found | {"fits_with": change, "smaller": tried}
    return found


def _in_process(program: Program, timeout: float, say) -> dict[str, Any]:
    folders = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "k3jax.plan.aot"],
        env=os.environ | _ENVIRONMENT | {"PYTHONPATH": folders},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    lines: list[dict] = []
    errors: list[bytes] = []
    readers = [
        threading.Thread(target=lambda: lines.extend(map(json.loads, process.stdout)), daemon=True),
        threading.Thread(target=lambda: errors.append(process.stderr.read()[-4000:]), daemon=True),
    ]
    process.stdin.write(pickle.dumps(program))
    process.stdin.close()
    start = time.monotonic()
    for reader in readers:
        reader.start()
    while process.poll() is None:
        seconds = time.monotonic() - start
        if say:
            stage = lines[-1]["stage"] if lines else "starting"
            say(f"{program.topology} {program.phase}: {stage}, {seconds:.0f} s of at most {timeout:.0f}")
        if seconds > timeout:
            process.kill()
            process.wait()
            for reader, pipe in zip(readers, (process.stdout, process.stderr), strict=True):
                reader.join()
                pipe.close()
            return {"fits": None, "message": f"stopped after {timeout:.0f} s, {lines[-1]['stage'] if lines else 'starting'}"}
        time.sleep(0.05 if seconds < 1 else 1)
    for reader in readers:
        reader.join()
    process.stdout.close()
    process.stderr.close()
    result = lines[-1] if lines else {}
    if "refused" in result:
        raise ValueError(result["refused"])
    if process.returncode or "fits" not in result:
        last = b"".join(errors).decode(errors="replace").strip().splitlines()[-1:]
        raise ChildProcessError(f"{program.topology}: the compiler's process ended with {process.returncode}: {''.join(last)}")
    return result


# ---- inside the process --------------------------------------------------------------------------------------------


def _main() -> None:
    def tell(**line):
        print(json.dumps(line), flush=True)

    try:
        result = _compiled(pickle.load(sys.stdin.buffer), lambda stage: tell(stage=stage))
    except ValueError as error:
        tell(refused=" ".join(str(error).split()))
    else:
        tell(stage="done", **result)


def _compiled(program: Program, stage) -> dict[str, Any]:
    import importlib.metadata
    import importlib.util

    import jax

    from k3jax.runtime import peak_memory

    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("topology: the TPU compiler is not installed; pip install 'k3jax[tpu]'")
    # What the product chooses by platform, it is to choose as on a TPU.
    jax.default_backend = lambda: "tpu"
    mesh = _mesh(program)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    result: dict[str, Any] = {"versions": versions, "device": mesh.devices.flat[0].device_kind, "devices": mesh.size}
    seconds, step = {}, None
    with jax.set_mesh(mesh):
        for name, do in (("lowering", lambda _: _lowered(program, mesh)), ("compiling", lambda low: _compile(low, program.quick))):
            stage(name)
            start = time.perf_counter()
            step = do(step)
            seconds[name] = time.perf_counter() - start
    stage("reading")
    result |= _does_not_fit(step) if isinstance(step, str) else _read(step, mesh)
    return result | {"seconds": seconds, "peak_rss_bytes": peak_memory()}


def _mesh(program: Program):
    from jax.experimental import topologies

    from k3jax.sharding import make_mesh

    try:
        devices = topologies.get_topology_desc(program.topology, platform="tpu").devices
    except Exception as error:
        raise ValueError(f"topology={program.topology}: {' '.join(str(error).split())[:200]}") from None
    if program.mesh.size > len(devices):
        raise ValueError(f"mesh={program.mesh}: needs {program.mesh.size} devices, {program.topology} has {len(devices)}")
    return make_mesh(**vars(program.mesh), devices=devices)


def _lowered(program: Program, mesh):
    """The product's own step, traced on shapes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from k3jax.sharding import spec

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(axes, shape, mesh)))

    if program.phase == "train":
        from k3jax.train.step import abstract_state, make_train_step

        config = program.run_config()
        state, shardings = abstract_state(config, mesh)
        batch = {name: array((program.batch, program.length), jnp.int32, "batch", None) for name in _TOKENS}
        batch["weights"] = array((program.batch, program.length), jnp.float32, "batch", None)
        return make_train_step(config, shardings).lower(state, batch)

    import flax.linen as nn

    from k3jax.cache import cache_shardings, init_cache
    from k3jax.nn.model import K3, init_variables
    from k3jax.serve.generate import make_advance
    from k3jax.sharding import tree_shardings

    packed = program.experts == "packed"
    model = K3(program.model, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, experts=program.experts, mxfp8_inputs=packed)
    boxed = jax.eval_shape(lambda: init_variables(model, jax.random.key(0)))
    cache = jax.eval_shape(lambda: init_cache(program.model, program.batch, program.length, jnp.bfloat16))
    shardings = cache_shardings(cache, mesh)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    variables = jax.tree.map(place, nn.unbox(boxed), tree_shardings(boxed, mesh))
    shape = program.batch, 1 if program.phase == "decode" else program.piece
    rows = "batch" if program.batch == cache.rows else None  # else every device has all, and the model shares them out
    tokens, mask = (array(shape, jnp.int32, rows, None) for _ in range(2))
    key = jax.eval_shape(lambda: jax.random.key(0))
    advance = make_advance(model, 0.0, cache_shardings=shardings)
    return advance.lower(variables, tokens, mask, jax.tree.map(place, cache, shardings), key)


_TOKENS = ("tokens", "targets", "segment_ids")


def _compile(lowered, quick: bool):
    """The program, or what the compiler says where there is not enough memory for it."""
    from k3jax.runtime import compiler_options

    try:
        return lowered.compile((compiler_options() or {}) | {"optimization_level": "O0"} if quick else None)
    except Exception as error:
        if _TOO_LARGE.search(str(error)):
            return str(error)
        raise


def _does_not_fit(message: str) -> dict[str, Any]:
    needed, unit, available, other = _TOO_LARGE.search(message).groups()
    needed, available = float(needed) * _UNITS[unit], float(available) * _UNITS[other]
    return {
        "fits": False,
        "needed_bytes": round(needed),
        "available_bytes": round(available),
        "message": f"does not fit: needed {needed / 1e9:.1f} of {available / 1e9:.1f} GB a device",
    }


def _read(compiled, mesh) -> dict[str, Any]:
    from k3jax.plan import hlo, hlo_bytes

    memory, text = compiled.memory_analysis(), compiled.as_text()
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    aliased, total = memory.alias_size_in_bytes, memory.peak_memory_in_bytes  # `temp_size_in_bytes` counts shared bytes twice
    moved: dict[tuple, list[int]] = {}
    for collective, times in hlo.collectives(text).items():
        row = moved.setdefault((collective.kind, "*".join(collective.axes(mesh.shape))), [0, 0])
        row[0] += times
        row[1] += times * collective.sent
    once = hlo_bytes.accessed(text, once=True)
    try:
        accessed = hlo_bytes.accessed(text)._asdict()
    except ValueError:  # the mixture over depth loops over the slots in use
        accessed = None
    said = compiled.cost_analysis()
    return {
        "fits": True,
        "memory": {
            "arguments": arguments,
            "outputs": outputs,
            "aliased": aliased,
            "temporaries": total - arguments - outputs + aliased,
            "code": memory.generated_code_size_in_bytes,
            "total": total,
        },
        "collectives": [
            {"kind": kind, "axes": axes, "times": times, "sent_bytes": sent}
            for (kind, axes), (times, sent) in sorted(moved.items(), key=lambda item: -item[1][1])
        ],
        "accessed_bytes": accessed,
        # The compiler's own count takes loops once; by the rules of `accessed` that is `ours`.
        "once": {"compiler": int(said["bytes accessed"]), "ours": once.bytes, "flops": int(said["flops"])},
        "program_bytes": len(text),
    }


if __name__ == "__main__":
    _main()
