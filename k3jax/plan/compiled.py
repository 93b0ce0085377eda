"""What the TPU compiler says of a few programs, for the planner to be compared with.

Command: python -m k3jax.plan.compiled out.json [name ...]; about three minutes a program on 2 CPU cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from k3jax.plan.aot import Program, check
from k3jax.run_config import MeshConfig
from k3jax.settings import CONFIGS, load_model

# Name: configuration, mesh, topology, and what else a `Program` is told.
PROGRAMS = {
    "k3 decode expert=16 tensor=4": (
        "kimi_k3", {"expert": 16, "tensor": 4}, "tpu7x:4x4x2", {"phase": "decode", "batch": 64, "length": 131072},
    ),
    "k3 decode expert=8 tensor=8": (
        "kimi_k3", {"expert": 8, "tensor": 8}, "tpu7x:4x4x2", {"phase": "decode", "batch": 64, "length": 131072},
    ),
    "kimi-linear decode expert=4 tensor=4": (
        "kimi_linear_48b", {"expert": 4, "tensor": 4}, "v6e:4x4",
        {"phase": "decode", "batch": 16, "length": 65536, "experts": "dequantized"},
    ),
    "k3 train fsdp=16 expert=16 tensor=4": (
        "kimi_k3", {"fsdp": 16, "expert": 16, "tensor": 4}, "v5p:8x8x16", {"batch": 1024, "length": 4096, "quick": True},
    ),
    "k3 train fsdp=16 expert=8 tensor=8": (
        "kimi_k3", {"fsdp": 16, "expert": 8, "tensor": 8}, "v5p:8x8x16", {"batch": 1024, "length": 4096, "quick": True},
    ),
    "kimi-linear train fsdp=4 expert=16": (
        "kimi_linear_48b", {"fsdp": 4, "expert": 16}, "v5p:4x4x4",
        {"batch": 64, "length": 4096, "qat": False, "quick": True},
    ),
    "midsize train fsdp=2 expert=4": (
        "midsize", {"fsdp": 2, "expert": 4}, "v5e:2x4", {"batch": 16, "length": 512, "quick": True},
    ),
    "midsize train expert=2 tensor=4": (
        "midsize", {"expert": 2, "tensor": 4}, "v5e:2x4", {"batch": 16, "length": 512, "quick": True},
    ),
}  # fmt: skip


def program(name: str) -> Program:
    """One of `PROGRAMS`."""
    config, mesh, topology, options = PROGRAMS[name]
    model = load_model(CONFIGS / f"{config}.py")
    return Program(model, MeshConfig(**mesh), topology, **options)


def main(out: str, names: list[str]) -> None:
    path = Path(out)
    found = json.loads(path.read_text()) if path.is_file() else {}
    for name in names or PROGRAMS:
        found[name] = check(program(name), timeout=1800)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found[name].get("memory") or found[name]["message"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
