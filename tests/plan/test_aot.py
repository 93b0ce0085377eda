"""The product's steps compiled for TPUs that are not there, and what is said of them."""

import dataclasses
import importlib.util

import pytest

from k3jax.plan import aot
from k3jax.plan.aot import Program, check
from k3jax.run_config import MeshConfig

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
MESH = MeshConfig(fsdp=2, expert=2)


@pytest.fixture
def program(tiny):
    return Program(tiny, MESH, "v5e:2x2", batch=8, length=128)


@needs_compiler
def test_a_training_step(program):
    lines = []
    found = check(program, say=lines.append)
    memory, cfg = found["memory"], program.model
    assert found["fits"] and found["devices"] == 4 and "v5" in found["device"]
    # Parameters and two moments in float32, at least the quarter of them that is split over all four devices.
    assert memory["arguments"] > 12 * cfg.num_parameters / 4
    assert memory["outputs"] - memory["aliased"] < 2**16  # the state is updated in place
    assert memory["total"] == memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
    kinds = {row["kind"] for row in found["collectives"]}
    assert kinds >= {"ragged-all-to-all", "all-gather"} and all(row["sent_bytes"] > 0 for row in found["collectives"])
    # The compiler also counts rounds that only an unbalanced load needs, and a scatter as whole arrays for every element.
    assert 0 < found["once"]["ours"] < 1.05 * found["once"]["compiler"]
    # At least the state is read and written; of branches for an unbalanced load nothing is counted there.
    assert found["accessed_bytes"]["bytes"] >= memory["arguments"] + memory["outputs"]
    assert found["seconds"]["compiling"] > 0 and found["peak_rss_bytes"] > 2**27
    assert any("v5e:2x2 train: compiling" in line for line in lines)


@needs_compiler
def test_a_decoding_step_that_does_not_fit_and_the_change_that_makes_it(program):
    # Caches of 2^27 tokens: of every row 6 GiB, of the 16 that a device has.
    large = dataclasses.replace(program, phase="decode", mesh=MeshConfig(expert=4), batch=16, length=2**27, quick=True)
    found = check(large, shrink=True)
    assert found["fits"] is False and found["needed_bytes"] > found["available_bytes"] > 2**33
    assert found["message"].startswith("does not fit: needed ")
    assert found["fits_with"].partition("=")[0] in ("batch", "length")
    assert found["smaller"]["fits"] and found["smaller"]["memory"]["total"] < found["available_bytes"]


@needs_compiler
def test_a_compiler_out_of_time_is_stopped(program):
    found = check(program, timeout=0.5)
    assert found["fits"] is None and found["message"].startswith("stopped after 0 s")


@needs_compiler
def test_a_mesh_larger_than_the_topology(program):
    with pytest.raises(ValueError, match="needs 8 devices, v5e:2x2 has 4"):
        check(dataclasses.replace(program, mesh=MeshConfig(fsdp=4, expert=2)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topology": "v9:2x2"}, "topology=v9:2x2: must be a family .* such as v5e:16x16, v5p:8x8x16"),
        ({"topology": "v5p"}, "topology=v5p: must be"),
        ({"batch": 6}, "data.batch_size=6: must be a multiple of mesh.data.*=4"),
        ({"mesh": MeshConfig(tensor=16)}, "must be a multiple of mesh.tensor=16"),
    ],
)
def test_refusals(program, change, message):
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(program, **change))


def test_smaller_programs(program):
    assert [change for change, _ in program.smaller()] == ["grad_accum=2"]
    assert [c for c, _ in dataclasses.replace(program, remat=False).smaller()] == ["remat=True", "grad_accum=2"]
    decode = dataclasses.replace(program, phase="decode", batch=16, experts="dequantized")
    assert [c for c, _ in decode.smaller()] == [
        "experts=packed", "batch=8", "batch=4", "length=64", "length=32", "length=16",
    ]  # fmt: skip
    for _, smaller in decode.smaller():
        smaller.validate()
    few = dataclasses.replace(decode, batch=7)  # two rows a device, one of them empty
    assert [c for c, _ in few.smaller() if c.startswith("batch")] == ["batch=4"]


def test_what_does_not_fit_says_how_much_it_needs():
    message = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (220.00G) exceeds available HBM (94.50G). HLO module: jit_step."
    )
    found = aot._does_not_fit(message)
    assert found["needed_bytes"] == 220 * 2**30 and found["available_bytes"] == round(94.5 * 2**30)
    assert found["message"] == "does not fit: needed 236.2 of 101.5 GB a device"
