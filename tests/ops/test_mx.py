"""Microscaling against ml_dtypes, a table of every element value, and values worked out by hand."""

import doctest
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from k3jax.ops import mx

ELEMENTS = {"mxfp4": ml_dtypes.float4_e2m1fn, "mxfp8": ml_dtypes.float8_e4m3fn}
EMAX = {"mxfp4": 2, "mxfp8": 8}
# Every magnitude a format has, in the order of its codes.
GRID = {
    "mxfp4": np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64),
    "mxfp8": np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64),
}
both_formats = pytest.mark.parametrize("fmt", list(ELEMENTS))
both_rules = pytest.mark.parametrize("rule", ["even", "floor"])
every_float = pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
prop = settings(max_examples=40, deadline=None, derandomize=True)


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def normal(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)))


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(bits(a), bits(b))


@st.composite
def blocks(draw, dtype, low=-160, high=128):
    """[2, 96] with magnitudes up to 2^high; few significant bits make ties common."""
    top = draw(st.integers(low, high))
    spread = draw(st.integers(0, 40))
    digits = draw(st.integers(1, 60))
    zeros = draw(st.sampled_from([0.0, 0.1, 0.97]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mantissa = np.ceil(rng.random((2, 96)) * 2.0**digits) / 2.0**digits
    x = np.ldexp(mantissa, top - rng.integers(0, spread + 1, (2, 96)))
    x[rng.random(x.shape) < zeros] = 0.0
    x = np.where(rng.random(x.shape) < 0.5, -x, x)
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -limit, limit).astype(jnp.dtype(dtype))


def reference_scale(x, fmt, rule):
    amax = np.abs(x.astype(np.float64)).reshape(2, 3, 32).max(-1)
    fraction, exponent = np.frexp(amax)  # fraction in [0.5, 1)
    exponent = exponent - 1 + ((fraction >= 0.875) & (rule == "even"))
    return np.where(fraction == 0, 0, np.clip(exponent - EMAX[fmt] + 127, 0, 254)).astype(np.uint8)


def scaled(x, scale):
    return np.ldexp(x.astype(np.float64), 127 - np.repeat(scale, 32, axis=-1).astype(int))


def nearest_code(y, fmt):
    """Round to nearest even by comparing with exact midpoints."""
    middle = (GRID[fmt][1:] + GRID[fmt][:-1]) / 2
    code = np.searchsorted(middle, np.abs(y), side="left")
    tied = np.isin(np.abs(y), middle)
    return (code + (tied & (code % 2 == 1)) + np.signbit(y) * (8 if fmt == "mxfp4" else 128)).astype(np.uint8)


def code_bits(codes):
    return np.asarray(codes).view(np.uint8) & (0x0F if codes.dtype == jnp.float4_e2m1fn else 0xFF)


@both_formats
@both_rules
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantize_equals_scaling_and_casting_with_ml_dtypes(fmt, rule, dtype):
    @prop
    @given(blocks(dtype))
    def check(x):
        codes, scale = mx.quantize(jnp.asarray(x), fmt, rule)
        assert codes.dtype == ELEMENTS[fmt] and scale.dtype == jnp.uint8
        np.testing.assert_array_equal(scale, reference_scale(x, fmt, rule))
        y = np.clip(scaled(x, np.asarray(scale)), -GRID[fmt][-1], GRID[fmt][-1]).astype(np.float32)
        np.testing.assert_array_equal(code_bits(codes), code_bits(y.astype(ELEMENTS[fmt])))

    check()


@both_formats
@both_rules
def test_quantize_rounds_float64_once(fmt, rule):
    # ml_dtypes casts a float64 through float32, so the truth is the table here.
    @prop
    @given(blocks(np.float64, low=-1080, high=200))
    def check(x):
        codes, scale = mx.quantize(jnp.asarray(x), fmt, rule)
        np.testing.assert_array_equal(scale, reference_scale(x, fmt, rule))
        np.testing.assert_array_equal(code_bits(codes), nearest_code(scaled(x, np.asarray(scale)), fmt))

    check()


def test_float64_just_above_a_tie_rounds_up():
    x = np.full(32, 4.0)
    x[:3] = 1.25 - 2.0**-40, 1.25, 1.25 + 2.0**-40  # all the tie 1.25 in float32
    assert_same_bits(mx.fake_quant(jnp.asarray(x))[:3], np.array([1.0, 1.0, 1.5]))
    x[:2], x[2] = 1.0625 + 2.0**-40, 448.0
    assert_same_bits(mx.fake_quant(jnp.asarray(x), "mxfp8", "floor")[:2], np.array([1.125, 1.125]))


def test_block_worked_out_by_hand():
    x = np.zeros((1, 64), np.float32)
    # floor(log2 12) = 3 and 12 < 1.75 * 8, so both rules scale by 2^(3-2) = 2 (code 128).
    x[0, :10] = 12, -10, 7, 5, 3, 1.5, 0.75, 0.5, -0.5, -0.0
    #    / 2      6  -5 3.5 2.5 1.5 .75  .375 .25 -.25    ties 5 -> 4, 3.5 -> 4, 2.5 -> 2, .75 -> 1, .25 -> 0
    # floor(log2 1.9) = 0: "floor" scales by 2^-2 (125) and saturates 7.6, "even" by 2^-1 (126).
    x[0, 32:35] = 1.9, 1.0, -0.3
    for rule, scale, second in (("floor", [128, 125], [6, 4, -1]), ("even", [128, 126], [4, 2, -0.5])):
        codes, found = mx.quantize(jnp.asarray(x), scale_rule=rule)
        np.testing.assert_array_equal(found, [scale])
        expected = np.zeros((1, 64), np.float32)
        expected[0, :10] = 6, -4, 4, 2, 1.5, 1, 0.5, 0, -0.0, -0.0
        expected[0, 32:35] = second
        assert_same_bits(codes.astype(jnp.float32), expected)
        values = mx.dequantize(codes, found)
        assert_same_bits(values[0, :4], np.array([12, -8, 8, 4], np.float32))


@both_formats
def test_scale_steps_exactly_at_the_thresholds(fmt):
    def scale(amax, rule):
        return int(mx.quantize(jnp.full(32, amax, jnp.float32), fmt, rule)[1][0]) + EMAX[fmt] - 127

    for e in (-100, -3, 0, 5, 127):
        two = np.float32(2.0**e)
        below = np.nextafter(np.float32(1.75) * two, np.float32(0))
        assert scale(two, "floor") == scale(two, "even") == e
        assert scale(np.nextafter(two, np.float32(0)), "floor") == e - 1
        assert scale(np.nextafter(two, np.float32(0)), "even") == e
        assert scale(below, "even") == e and scale(np.float32(1.75) * two, "even") == e + 1
        assert scale(np.float32(1.75) * two, "floor") == e


@both_formats
def test_elements_round_to_even_and_saturate(fmt):
    grid = GRID[fmt].astype(np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    block = np.zeros((len(middle), 32), np.float32)
    block[:, 0] = 2.0 ** EMAX[fmt]  # scale 1
    for side, expected in (
        (np.nextafter(middle, np.float32(0)), grid[:-1]),
        (middle, np.where(np.arange(len(middle)) % 2, grid[1:], grid[:-1])),
        (np.nextafter(middle, np.float32(1e9)), grid[1:]),
    ):
        block[:, 1], block[:, 2] = side, -side
        values = mx.fake_quant(jnp.asarray(block), fmt, "floor")
        assert_same_bits(values[:, 1:3], np.stack([expected, -expected], axis=1))
    top = 2.0 * 2.0 ** EMAX[fmt] * (1 - 2.0**-24)
    values = mx.fake_quant(jnp.full(32, -top, jnp.float32), fmt, "floor")
    np.testing.assert_array_equal(values, np.full(32, -grid[-1]))


@both_formats
@both_rules
def test_zero_and_subnormal_blocks(fmt, rule):
    zeros = jnp.asarray(np.tile(np.array([-0.0, 0.0], np.float32), 32))
    codes, scale = mx.quantize(zeros, fmt, rule)
    np.testing.assert_array_equal(scale, [0, 0])
    assert_same_bits(mx.dequantize(codes, scale), zeros)

    half = GRID[fmt][1] * 2.0**-127  # the smallest value a block can hold
    x = np.array([half, -half, half / 2, 1.5 * half, 2.0**-149] + [0] * 27, np.float32)
    codes, scale = mx.quantize(jnp.asarray(x), fmt, rule)
    np.testing.assert_array_equal(scale, [0])
    expected = np.array([half, -half, 0, 2 * half] + [0] * 28, np.float32)
    assert_same_bits(mx.dequantize(codes, scale), expected)


@both_formats
@both_rules
def test_scales_are_clamped_to_their_range(fmt, rule):
    x = jnp.array([[1e200], [-1e-200]]) * jnp.ones((1, 32))
    _, scale = mx.quantize(x, fmt, rule)
    np.testing.assert_array_equal(scale, [[254], [0]])
    expected = np.array([[GRID[fmt][-1] * 2.0**127], [-0.0]]) * np.ones((1, 32))
    assert_same_bits(mx.fake_quant(x, fmt, rule), expected)


@both_formats
@both_rules
@every_float
def test_a_non_finite_value_makes_its_block_nan(fmt, rule, dtype):
    x = np.ones((4, 64), jnp.dtype(dtype))
    x[:, 3] = np.nan, -np.nan, np.inf, -np.inf
    x = jnp.asarray(x)
    _, scale = mx.quantize(x, fmt, rule)
    np.testing.assert_array_equal(np.asarray(scale) == 0xFF, [[True, False]] * 4)
    expected = np.ones((4, 64))
    expected[:, :32] = np.nan
    np.testing.assert_array_equal(np.asarray(mx.fake_quant(x, fmt, rule), np.float64), expected)


@both_formats
@every_float
def test_dequantize_every_code_at_every_scale(fmt, dtype):
    elements = np.arange(16 if fmt == "mxfp4" else 256, dtype=np.uint8).view(ELEMENTS[fmt])
    elements = np.tile(elements, 32 // min(32, len(elements)))
    scale = np.arange(256, dtype=np.uint8)
    codes = np.broadcast_to(elements, (256, len(elements)))
    scales = np.tile(scale[:, None], (1, len(elements) // 32))
    found = mx.dequantize(jnp.asarray(codes), jnp.asarray(scales), dtype)
    with np.errstate(over="ignore"):
        expected = np.ldexp(codes.astype(np.float64), scale[:, None].astype(int) - 127)
        expected = expected.astype(jnp.dtype(dtype))
    expected[255] = np.nan
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(bits(found)[~nan], bits(expected)[~nan])


def test_pack_puts_the_even_column_in_the_low_nibble():
    #                          0x2  0xF  0x9   0x7  0x8   0x1
    codes = jnp.array([[1.0, -6.0, -0.5, 6.0, -0.0, 0.5]], jnp.float4_e2m1fn)
    packed = mx.pack(codes)
    np.testing.assert_array_equal(packed, np.array([[0xF2, 0x79, 0x18]], np.uint8))
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(code_bits(mx.unpack(packed)), [[0x2, 0xF, 0x9, 0x7, 0x8, 0x1]])
    every = jnp.arange(256, dtype=jnp.uint8).reshape(4, 64)
    np.testing.assert_array_equal(mx.pack(mx.unpack(every)), every)


@both_formats
@both_rules
@every_float
def test_quantised_values_quantise_to_themselves(fmt, rule, dtype):
    @prop
    @given(blocks(dtype))
    def check(x):
        codes, scale = mx.quantize(jnp.asarray(x), fmt, rule)
        if fmt == "mxfp4":
            np.testing.assert_array_equal(code_bits(mx.unpack(mx.pack(codes))), code_bits(codes))
        values = mx.dequantize(codes, scale, dtype)
        again, scale_again = mx.quantize(values, fmt, rule)
        stays = np.ones((2, 3), bool)
        if rule == "even":  # the two exceptions that are documented
            largest = np.abs(np.asarray(codes, np.float64)).reshape(2, 3, 32).max(-1)
            moved = (fmt == "mxfp8") & (largest == 448)
            np.testing.assert_array_equal(np.asarray(scale_again)[moved], np.asarray(scale)[moved] + 1)
            stays = ~moved & np.isfinite(np.asarray(values)).reshape(2, 3, 32).all(-1)
        np.testing.assert_array_equal(np.asarray(scale_again)[stays], np.asarray(scale)[stays])
        wide = np.repeat(stays, 32, axis=-1)
        np.testing.assert_array_equal(code_bits(again)[wide], code_bits(codes)[wide])

    check()


@pytest.mark.parametrize(("fmt", "rule"), [("mxfp4", "even"), ("mxfp8", "floor")])
@every_float
def test_fake_quant_is_quantised_forward_and_identity_backward(fmt, rule, dtype):
    x, weight = normal(0, (3, 4, 64), dtype), normal(1, (3, 4, 64), dtype)
    expected = mx.dequantize(*mx.quantize(x, fmt, rule), dtype)
    assert (np.asarray(expected) != np.asarray(x)).mean() > 0.5
    fake = partial(mx.fake_quant, fmt=fmt, scale_rule=rule)
    assert_same_bits(fake(x), expected)
    assert_same_bits(jax.jit(fake)(x), expected)
    assert_same_bits(jax.vmap(fake)(x), expected)

    value, tangent = jax.jvp(fake, (x,), (weight,))
    assert_same_bits(value, expected)
    assert_same_bits(tangent, weight)
    assert_same_bits(jax.vjp(fake, x)[1](weight)[0], weight)

    def loss(x):
        step = jax.checkpoint(lambda total, row: (total + (fake(row) * weight[0]).sum(), None))
        return jax.lax.scan(step, jnp.zeros((), dtype), x)[0]

    assert_same_bits(jax.jit(jax.grad(loss))(x), jnp.broadcast_to(weight[0], x.shape))
    # The gradient of f(fake(x)) is f' at the quantised point.
    square = jax.grad(lambda x: (fake(x) * fake(x) * weight).sum())(x)
    assert_same_bits(square, jax.grad(lambda q: (q * q * weight).sum())(expected))


def test_same_bits_without_compilation():
    x = normal(0, (3, 64), "float32")
    with jax.disable_jit():
        codes, scale = mx.quantize(x)
        fake = mx.fake_quant(x)
    expected = mx.quantize(x)
    np.testing.assert_array_equal(code_bits(codes), code_bits(expected[0]))
    np.testing.assert_array_equal(scale, expected[1])
    assert_same_bits(fake, mx.fake_quant(x))


def test_fake_quant_inside_shard_map():
    mesh = jax.make_mesh((4, 2), ("expert", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = normal(0, (8, 4, 64), "float32")
    spec = P("expert", None, "tensor")

    def body(x):
        codes, scale = mx.quantize(x)
        return mx.fake_quant(x), mx.unpack(mx.pack(codes)), scale

    sharded = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    for found, expected in zip(sharded(x), body(x), strict=True):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(expected).view(np.uint8))
    grad = jax.grad(lambda x: (sharded(x)[0] * x).sum())(x)
    assert_same_bits(grad, x + mx.fake_quant(x))


@pytest.mark.parametrize(
    ("dtype", "storage", "low", "high"),
    [
        ("float32", "bfloat16", -160, 128),
        ("float64", "bfloat16", -80, 140),  # float64 below 2^-126 is flushed
        ("float64", "float32", -80, 140),
    ],
)
def test_round_through_equals_the_casts(dtype, storage, low, high):
    jitted = jax.jit(lambda x: mx.round_through(x, storage))

    @prop
    @given(blocks(dtype, low, high))
    def check(x):
        with np.errstate(over="ignore"):
            expected = x.astype(jnp.dtype(storage)).astype(dtype)
        assert_same_bits(jitted(jnp.asarray(x)), expected)

    check()


def test_round_through_special_values_and_gradient():
    special = jnp.array([np.inf, -np.inf, np.nan, -0.0, 3.4e38], jnp.float32)  # 3.4e38 rounds past the range
    expected = np.array([np.inf, -np.inf, np.nan, -0.0, np.inf], np.float32)
    found = np.asarray(mx.round_through(special, jnp.bfloat16))
    np.testing.assert_array_equal(found, expected)
    assert np.signbit(found[3])
    for dtype in (jnp.float32, jnp.float64):  # nothing narrower than x: unchanged
        assert_same_bits(mx.round_through(special, dtype), special)
    half = special.astype(jnp.bfloat16)
    assert_same_bits(mx.round_through(half, jnp.float32), half)

    x, weight = normal(0, (50,), "float32"), normal(1, (50,), "float32")
    grad = jax.grad(lambda x: (mx.round_through(x, jnp.bfloat16) * weight).sum())(x)
    assert_same_bits(grad, weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: mx.quantize(x[:, :33]), r"last axis of x must be a multiple of 32, found shape \(2, 33\)"),
        (lambda x: mx.quantize(x[0, 0]), r"last axis of x must be a multiple of 32, found shape \(\)"),
        (lambda x: mx.quantize(x, "mxfp6"), "fmt must be one of mxfp4, mxfp8, found 'mxfp6'"),
        (lambda x: mx.fake_quant(x, "mxfp4", "ceil"), "scale_rule must be one of even, floor, found 'ceil'"),
        (lambda x: mx.fake_quant(x.astype(jnp.int32)), "x must be one of bfloat16, float32, .*, found int32"),
        (lambda x: mx.quantize(x.astype(jnp.float16)), "found float16"),
        (lambda x: mx.dequantize(x, x), "codes must be float4_e2m1fn or float8_e4m3fn, found float32"),
        (
            lambda x: mx.dequantize(*mx.quantize(x[:, :32])[:1], mx.quantize(x)[1]),
            r"codes of shape \(2, 32\) need a uint8 scale of shape \(2, 1\), found uint8 \(2, 2\)",
        ),
        (lambda x: mx.dequantize(mx.quantize(x)[0], x[:, :2]), r"a uint8 scale .*, found float32 \(2, 2\)"),
        (lambda x: mx.dequantize(mx.quantize(x)[0][:, :16], x), "last axis of codes must be a multiple"),
        (lambda x: mx.dequantize(*mx.quantize(x), jnp.float16), "dtype must be one of .*, found float16"),
        (lambda x: mx.pack(x), "pack: codes must be float4_e2m1fn .*, found float32"),
        (lambda x: mx.pack(mx.quantize(x)[0][:, :3]), r"pack: .*found float4_e2m1fn \(2, 3\)"),
        (lambda x: mx.unpack(mx.quantize(x)[0]), "unpack: packed must be uint8 .*, found float4_e2m1fn"),
        (lambda x: mx.round_through(x, jnp.float16), "dtype must be one of .*, found float16"),
        (lambda x: mx.round_through(x.astype(jnp.int32), jnp.bfloat16), "x must be one of .*, found int32"),
    ],
)
def test_bad_input_is_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(jnp.ones((2, 64), jnp.float32))
    assert "\n" not in str(error.value)


def test_docstring_examples():
    result = doctest.testmod(mx)
    assert result.attempted >= 6 and result.failed == 0


def test_packed_bytes_to_bfloat16_by_words_are_the_values_bit_for_bit():
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    by_words = jax.jit(mx.dequantize_packed)
    reference = jax.jit(lambda packed, scale: mx.dequantize(mx.unpack(packed), scale, jnp.bfloat16))
    for code in range(256):  # a block of each scale at a time: one that is small or large leaves the fast path
        scale = np.full((16, 1), code, np.uint8)
        found, expected = by_words(packed, scale), reference(packed, scale)
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), code
    scale = np.arange(2, 253, dtype=np.uint8)[:, None]
    packed = np.resize(packed, (251, 16))
    found, expected = by_words(packed, scale), reference(packed, scale)
    assert found.shape == (251, 32) and np.asarray(found).tobytes() == np.asarray(expected).tobytes()
