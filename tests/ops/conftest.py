"""Programs for the real TPU compiler, which needs no TPU."""

import importlib.util
import os
import subprocess
import sys

import pytest

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@pytest.fixture
def compiled_for_tpus():
    """What a program, given as text with its arguments, prints; it runs in a process of its own."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed")

    def run(program, *arguments):
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", program, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run
