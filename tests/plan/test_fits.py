"""What a run is expected to hold is said before it is compiled, and refused where the device has less."""

import re

import jax
import pytest

from k3jax import cli
from k3jax.plan import analytic
from k3jax.plan.fits import expected, fits
from k3jax.plan.hardware import HARDWARE
from k3jax.plan.setting import Strategy, Train
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.train import loop


@pytest.fixture
def config(tiny, tmp_path):
    return RunConfig(
        model=tiny,
        data=DataConfig(seq_len=64, batch_size=8),
        train=TrainConfig(remat=False, grad_accum=2),
        mesh=MeshConfig(fsdp=2),
        out=str(tmp_path / "run"),
    )


def test_it_is_the_planners_memory(config):
    workload = Train(batch=8, sequence=64, qat=True, remat=False, grad_accum=2)
    for hardware in HARDWARE.values():
        found = analytic.predict(config.model, workload, Strategy(config.mesh), hardware)
        least = sum(found.arguments.values()) + 0.75 * sum(found.temporaries.values())
        assert expected(config) == pytest.approx((found.memory, least), rel=1e-12)


def test_it_is_said_or_refused(config):
    needed, least = expected(config)
    line = r"a device holds \S+ GB by the planner's estimate, and has \S+ GB"
    assert re.fullmatch(line, fits(config, int(needed) + 1))
    assert re.fullmatch(f"{line}, which may be too little", fits(config, int(needed) - 1))
    with pytest.raises(ValueError, match=r"^mesh.fsdp=2: a device holds \S+ GB by the planner's estimate, and has \S+ GB; .*plan --search"):
        fits(config, int(least) - 1)


@pytest.mark.parametrize("share, code", [(2.0, 0), (0.5, 2), (None, 0)])
def test_train_asks_the_device(config, tmp_path, monkeypatch, capsys, share, code):
    """Devices that do not tell their memory, as CPUs, are not asked again."""
    (tmp_path / "config.py").write_text(f"from k3jax.config import *\nfrom k3jax.run_config import *\nconfig = {config!r}\n")
    stats = None if share is None else {"bytes_limit": int(share * expected(config)[0])}
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), {"memory_stats": lambda self: stats, "device_kind": "?"})()])
    trained = []
    monkeypatch.setattr(loop, "train", trained.append)
    kept = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    monkeypatch.setenv("K3JAX_CACHE", str(tmp_path / "cache"))
    assert cli.main(["train", "--config", str(tmp_path / "config.py")]) == code
    jax.config.update("jax_compilation_cache_dir", kept[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", kept[1])
    said = capsys.readouterr().err
    assert len(trained) == (code == 0) and said.count("\n") == (share is not None)
    assert ("by the planner's estimate" in said) == (share is not None)
