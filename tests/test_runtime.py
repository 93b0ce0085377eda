"""Around compilers that are known to be wrong; programs that are kept."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from k3jax import runtime

ROOT = Path(__file__).parents[1]
(YNN,) = runtime.FAULTS
HAS_IT = YNN.first <= tuple(map(int, metadata.version("jaxlib").split(".")[:3])) <= YNN.last

# What jaxlib 0.10.2 gets wrong (JAX issue 39103): eagerly and jitted, the last of 32,769 rows of a product that is summed.
PROGRAM = """
import json
import jax.numpy as jnp
def last(f):
    i = jnp.arange(32_769, dtype=jnp.float32)
    x = jnp.stack((i, jnp.zeros_like(i), jnp.zeros_like(i)), axis=1)
    return float(f(x)[-1])
f = jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))
print(json.dumps([last(f), last(jax.jit(f))]))
"""


def run(code, **env):
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("start", ["import k3jax, jax", "import jax, k3jax.ops"])
def test_the_known_wrong_program_is_right(start):
    done = run(f"{start}{PROGRAM}")
    eager, jitted = json.loads(done.stdout)
    assert eager == jitted == 32_768.0**2 and not done.stderr


@pytest.mark.skipif(not HAS_IT, reason="needs a jaxlib that is wrong, such as 0.10.2")
def test_too_late_is_refused():
    used = "import jax\njax.devices()\n"
    line = run(f"{used}import k3jax").stderr.splitlines()[-1]
    assert line.startswith("ImportError: jaxlib 0.1") and "import k3jax before the first use of JAX" in line
    assert run(f"{used}import k3jax", XLA_FLAGS=YNN.cure).returncode == 0


def test_what_is_known_is_wrong(tmp_path):
    """Of the versions that have the fault: without its cure."""
    eager, jitted = json.loads(run(f"import jax{PROGRAM}").stdout)
    assert eager == 32_768.0**2 and (jitted == eager) != HAS_IT


@pytest.mark.parametrize(
    "version, before, after",
    [
        ("0.10.1", "", ""),
        ("0.10.2", "", YNN.cure),
        ("0.10.2", "--a=1", f"--a=1 {YNN.cure}"),
        ("0.10.2", f"{YNN.cure} --a=1", f"{YNN.cure} --a=1"),
        ("0.10.2", f"{YNN.cure}-reduce", f"{YNN.cure}-reduce {YNN.cure}"),
        ("0.11.0", "", YNN.cure),
        ("0.11.1", "", ""),
        ("0.12.0.1", "", ""),
    ],
)
def test_only_the_versions_that_need_it_are_cured(monkeypatch, version, before, after):
    monkeypatch.setattr(runtime.metadata, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", None)
    monkeypatch.setenv("XLA_FLAGS", before)
    runtime.cure()
    assert os.environ["XLA_FLAGS"] == after


KEPT = """
from k3jax import runtime
runtime.setup()
import jax
print(*(jax.jit(lambda x: x * 3 + n)(13) for n in range(4)))
"""


def test_a_damaged_program_is_compiled_anew(tmp_path):
    """Cut short, empty, or another's: as what another process was killed over."""
    assert run(KEPT, K3JAX_CACHE=str(tmp_path)).stdout == "39 40 41 42\n"
    (folder,) = tmp_path.iterdir()
    programs = [path for path in folder.iterdir() if path.name.endswith("-cache")]
    assert len(programs) == 4
    for number, path in enumerate(programs):
        whole = path.read_bytes()
        path.write_bytes([b"", whole[: len(whole) // 2], b"no program", whole[:-1]][number])
    done = run(KEPT, K3JAX_CACHE=str(tmp_path))
    assert (done.stdout, done.stderr) == ("39 40 41 42\n", "")


def test_programs_are_apart_for_every_compiler_and_processor(monkeypatch):
    mine = runtime._compiler()
    assert f"jaxlib-{metadata.version('jaxlib')}" in mine and mine == runtime._compiler()
    version = metadata.version
    for name in ("jax", "jaxlib", "libtpu"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime.metadata, "version", lambda asked: "9.9" if asked == name else version(asked))
            assert runtime._compiler() != mine
    read = Path.read_text
    for old, new, same in (("sse2", "sse9", False), ("cpu MHz", "cpu_MHz", True)):
        if old not in Path("/proc/cpuinfo").read_text():
            continue
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_text", lambda self, **kinds: read(self, **kinds).replace(old, new))
            assert (runtime._compiler() == mine) == same
