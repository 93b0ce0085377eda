"""The comparison of KDA implementations: what is checked and measured, and that nothing wrong gets a time."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.bench import kda as bench
from k3jax.bench.timing import write_json
from k3jax.cli.bench import BenchKda
from k3jax.ops import kda, kda_tokamax

OPTIONS = BenchKda(tokens=32, heads=2, key_dim=8, value_dim=4, repeats=2, long_tokens=64, decode_batch=1)
QUICK = dataclasses.replace(OPTIONS, repeats=1, long_tokens=0, decode_batch=0)
SCAN = partial(bench._k3jax, "scan")


@pytest.fixture(autouse=True, scope="module")
def small_matmul():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "MATMUL", 256)
        yield


@pytest.fixture(scope="module")
def report():
    with pytest.MonkeyPatch.context() as patch:
        found = bench.implementations()
        patch.setattr(bench, "implementations", lambda: {name: found[name] for name in ("scan", "chunked")})
        patch.setattr(bench, "DECODE", (2, 8, 8))
        return bench.run(OPTIONS)


@pytest.fixture
def compare(monkeypatch):
    """Runs the benchmark on the implementations given."""

    def run(options=QUICK, **implementations):
        monkeypatch.setattr(bench, "implementations", lambda: implementations)
        return bench.run(options)

    return run


def test_report(report, tmp_path):
    write_json(tmp_path / "kda.json", report)
    assert json.loads((tmp_path / "kda.json").read_text()) == report
    assert report["settings"] == dataclasses.asdict(OPTIONS)
    assert report["machine"]["jax"] == jax.__version__ and report["machine"]["backend"] == "cpu"
    assert list(report["implementations"]) == ["scan", "chunked"]
    rate, flops = report["matmul_flops_per_second"], bench.chunked_flops(1, 32, 2, 8, 4)
    assert rate > 1e8 and report["chunked_forward_flops"] == flops
    assert bench.wrong(report) == []
    for row in report["implementations"].values():
        assert list(row["errors"]) == list(bench.RESULTS) and 0 < max(row["errors"].values()) < 2e-5
        for kind, passes in (("forward", 1), ("forward + backward", 3)):
            x, ours = row[kind], report["implementations"]["chunked"][kind]
            assert min(x["seconds"], x["compile_seconds"], x["temp_bytes"]) > 0 and x["spread_seconds"] >= 0
            assert x["to_chunked"] == x["seconds"] / ours["seconds"]
            assert math.isclose(x["to_floor"], x["seconds"] / (passes * flops / rate))
            assert x["temp_to_q"] == x["temp_bytes"] / (32 * 2 * 8 * 4)
    growth, short = report["growth"], report["implementations"]["chunked"]["forward + backward"]
    assert math.isclose(growth["time_a_token"], growth["seconds"] / short["seconds"] / 2)
    assert math.isclose(growth["memory_a_token"], growth["temp_bytes"] / short["temp_bytes"] / 2)
    decode = report["decode"]
    assert decode["state_bytes"] == 2 * 8 * 8 * 4 and max(decode["errors"].values()) < 2e-5
    assert decode["to_copy"] == decode["seconds"] / decode["copy_seconds"]
    assert decode["to_in_place"] == decode["seconds"] / decode["in_place_seconds"]


def test_text(report):
    lines = bench.text(report).split("\n")
    assert lines[0] == "B=1 T=32 H=2 K=8 V=4 float32, 2 rounds"
    assert lines[1].startswith(f"JAX {jax.__version__}, 8 cpu (cpu), ")
    for start, kind in ((4, "forward"), (8, "forward + backward")):
        heading, *rows = lines[start : start + 3]
        assert heading.startswith(f"{kind}  ") and {len(line) for line in rows} == {len(heading)}
        for row, (name, found) in zip(rows, report["implementations"].items(), strict=True):
            cells = row.split()
            assert len(cells) == 9 and cells[0] == name and cells[1] == f"{found[kind]['seconds'] * 1e3:.2f}"
    assert lines[-2].startswith("chunked forward + backward, 64 tokens against 32, a token: time ")
    assert lines[-1].startswith("decode step, B=1 H=") and lines[-1].endswith(" of a pass in place")


def test_a_wrong_implementation_gets_no_time(compare):
    def louder(*tokens):
        o, state = SCAN(*tokens)
        return o * 1.01, state

    def broken(*tokens):
        o, state = SCAN(*tokens)
        return o, state * jnp.nan

    def no_gradient(q, k, v, z, beta):
        return SCAN(q, k, v, jax.lax.stop_gradient(z), beta)

    options = dataclasses.replace(QUICK, long_tokens=64)
    report = compare(options, chunked=louder, broken=broken, numb=no_gradient, right=SCAN)
    said = {
        "chunked": "o off by 1e-02",
        "broken": "final state off by nan",
        "numb": "gradient of z off by 1e+00",
    }
    assert bench.wrong(report) == [f"{name}: {what}" for name, what in said.items()]
    lines = bench.text(report).split("\n")
    for name, what in said.items():
        assert report["implementations"][name] == {"wrong": what}
        assert [line.split(None, 1) for line in lines].count([name, f"wrong: {what}"]) == 2
    right = report["implementations"]["right"]["forward"]
    assert right["seconds"] > 0 and right["to_chunked"] is None and report["growth"] is None
    json.dumps(report, allow_nan=False)


def test_a_wrong_decode_step_gets_no_time(monkeypatch):
    k3jax = bench._k3jax

    def wrong(impl, *tokens):
        o, state = k3jax(impl, *tokens)
        return o, state * (1.001 if impl == "auto" else 1)

    monkeypatch.setattr(bench, "_k3jax", wrong)
    monkeypatch.setattr(bench, "DECODE", (1, 4, 4))
    monkeypatch.setattr(bench, "implementations", dict)
    report = bench.run(dataclasses.replace(QUICK, decode_batch=1))
    assert set(report["decode"]) == {"wrong"}
    assert bench.wrong(report) == ["decode: final state off by 1e-03"]
    assert bench.text(report).endswith("\ndecode step, B=1 H=1 K=4 V=4: wrong: final state off by 1e-03")


def test_the_state_is_donated_and_handed_on():
    call = bench._handing_on(lambda state, x: (x, state + x), jnp.zeros(3), jnp.ones(3))
    (_, first), (_, second) = call(), call()
    assert first.is_deleted() and second.tolist() == [2, 2, 2]


def test_out_of_memory_is_said_and_others_go_on(compare, monkeypatch):
    def at_most(tokens, *inputs):
        if inputs[0].shape[1] > tokens:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
        return SCAN(*inputs)

    monkeypatch.setattr(bench, "CHECKED", 32)
    options = dataclasses.replace(QUICK, tokens=64, long_tokens=96)
    report = compare(options, greedy=partial(at_most, 32), chunked=partial(at_most, 64))
    assert report["implementations"]["greedy"]["forward"] == {"failed": "out of memory"}
    assert report["implementations"]["chunked"]["forward"]["seconds"] > 0 and bench.wrong(report) == []
    assert report["growth"] == {"failed": "out of memory"}
    assert bench.text(report).count("out of memory") == 3
    assert bench.text(report).endswith("96 tokens against 64, a token: out of memory")


def test_another_failure_is_not_hidden():
    def failing(x):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        bench._compile(failing, (1.0,))


def test_bfloat16_has_its_own_tolerance(compare):
    def off(by):
        def run(*tokens):
            o, state = SCAN(*tokens)
            return o * (1 + by), state

        return run

    report = compare(dataclasses.replace(QUICK, dtype="bfloat16"), near=off(0.005), far=off(0.05))
    near, far = report["implementations"].values()
    assert "wrong" not in near and far["wrong"] == "o off by 5e-02"
    assert near["forward"]["temp_to_q"] == near["forward"]["temp_bytes"] / (32 * 2 * 8 * 2)


def test_inputs():
    (o, state), q, k, v, z, beta = bench._draw("bfloat16", 2, 64, 3, 8, 4)
    assert o.shape == v.shape == (2, 64, 3, 4) and q.shape == k.shape == z.shape == (2, 64, 3, 8)
    assert state.shape == (2, 3, 8, 4) and beta.shape == (2, 64, 3)
    assert q.dtype == k.dtype == v.dtype == jnp.bfloat16
    assert z.dtype == beta.dtype == o.dtype == state.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(np.float64(k), axis=-1), 1, rtol=1e-2)
    np.testing.assert_allclose(np.linalg.norm(np.float64(q), axis=-1), 8**-0.5, rtol=1e-2)
    assert 0 < beta.min() < beta.max() < 1 and abs(float(z.mean())) < 0.2


@pytest.mark.parametrize("installed", [False, True])
def test_implementations(monkeypatch, installed):
    monkeypatch.setattr(kda_tokamax, "installed", lambda: installed)
    peers = ["tokamax xla_chunked"] if installed else []
    assert list(bench.implementations()) == ["scan", "chunked", "auto", *peers]


@pytest.mark.skipif(not kda_tokamax.installed(), reason="needs tokamax")
def test_tokamax_is_right(caplog):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # It mixes dtypes, which tests refuse elsewhere.
        rows = bench._check({"tokamax": bench._tokamax}, bench._draw("float32", 1, 128, 2, 8, 8), 2e-5)
    assert "wrong" not in rows["tokamax"] and not caplog.records


# ---- floating point operations -----------------------------------------------------------------------------


def test_flops_by_hand(monkeypatch):
    monkeypatch.setattr(bench, "TILE", 4)
    monkeypatch.setattr(bench, "CHUNK", 8)
    K, V = 3, 5
    state = 2 * 16 * 3 * 5 + 2 * 8 * 3 * 5  # 8 keys and 8 queries read, 8 updates write
    updates = 2 * 8 * 8 * 5 + 2 * 8 * 8 * 5  # N by 8 values, P by 8 updates
    pairs = 2 * (2 * 8 * 4 * 3) + 2 * 8 * 4 * 3  # two tiles: 8 rows by 4 columns of 3; as much between them
    inverse = 2 * (2 * 2 * 4**3) + 2 * 2 * 4**3  # two tiles: a level of two products; the block below them
    assert bench.chunked_flops(1, 8, 1, K, V) == state + updates + pairs + inverse
    assert bench.chunked_flops(2, 24, 7, K, V) == 2 * 3 * 7 * (state + updates + pairs + inverse)
    assert bench.chunked_flops(1, 9, 1, K, V) == 2 * bench.chunked_flops(1, 8, 1, K, V)


def test_flops_are_those_of_the_traced_products():
    B, T, H, K, V = 2, 4 * bench.CHUNK, 3, 24, 40
    _, *tokens = bench._draw("float32", B, T, H, K, V)
    forward = partial(kda, gate_lower_bound=bench.BOUND, impl="chunked")
    running_sums = B * T * H * 2 * bench.TILE * K
    traced = _products(jax.make_jaxpr(forward)(*tokens).jaxpr)
    assert traced == bench.chunked_flops(B, T, H, K, V) + running_sums


def _products(jaxpr):
    """2 m n p of every product, loops counted through."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        inner = (getattr(value, "jaxpr", value) for value in eqn.params.values())
        total += eqn.params.get("length", 1) * sum(_products(x) for x in inner if hasattr(x, "eqns"))
    return total
