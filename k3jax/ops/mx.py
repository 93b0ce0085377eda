"""OCP microscaling (MX) emulated on any backend: blocks of 32 values along the last axis share an E8M0 scale.

    x[i] ~ codes[i] * 2^(scale - 127),   codes E2M1 ("mxfp4") or E4M3 ("mxfp8"),   scale uint8, 0xFF is NaN

The casts work on bit patterns as integers instead of multiplying by the scale and calling `astype`, because
float arithmetic flushes subnormals on CPU and TPU. Integers are exact for every input, give the same bits on
every backend, and are no slower: `fake_quant` of a float32 [16,256,256] under jit on two CPU cores takes
0.8 ms, a scaled `astype` to the element type and back 1.0 ms.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32

_SCALE_BIAS = 127
_NAN_SCALE = 0xFF
_SCALE_RULES = ("even", "floor")


class _Element(NamedTuple):
    """A small float: mantissa bits, exponents emin..emax, code of the largest finite value, sign bit."""

    dtype: jnp.dtype
    uint: jnp.dtype
    mantissa: int
    emin: int
    emax: int
    top: int
    sign: int


_ELEMENTS = {
    "mxfp4": _Element(jnp.dtype(jnp.float4_e2m1fn), jnp.dtype(jnp.uint4), 1, 0, 2, 0x7, 0x8),
    "mxfp8": _Element(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8), 3, -6, 8, 0x7E, 0x80),
}


class _Float(NamedTuple):
    """A wide float and the integer of its size; infinity is a bit pattern."""

    dtype: jnp.dtype
    int: jnp.dtype
    mantissa: int
    bias: int
    infinity: int


_FLOAT32 = _Float(jnp.dtype("float32"), jnp.dtype("int32"), 23, 127, 0xFF << 23)
_FLOAT64 = _Float(jnp.dtype("float64"), jnp.dtype("int64"), 52, 1023, 0x7FF << 52)
_WORK = {"bfloat16": _FLOAT32, "float32": _FLOAT32, "float64": _FLOAT64}  # what each dtype is worked on as


def quantize(x, fmt="mxfp4", scale_rule="even"):
    """Codes and scales of x, rounded in blocks of 32 along its last axis: x ~ codes * 2^(scale - 127).

    With e = floor(log2 max|x|) over the block, its scale is 2^(e - 2) for E2M1 and 2^(e - 8) for E4M3, where
      "floor"  takes e as it is (OCP MX v1.0);
      "even"   takes e + 1 once max|x| >= 1.75 * 2^e (the released quantiser), so less is saturated.
    Elements are x / 2^(scale - 127) rounded once to nearest even, from x's own precision, saturating at +-6
    (E2M1) or +-448 (E4M3). Scale codes are clamped to 0..254; an all-zero block has scale 0, and zeros keep
    their sign. A block with a NaN or an infinity gets scale 0xFF and elements without meaning: all its values
    dequantise to NaN.

    Quantising `dequantize(codes, scale)` again by the same rule gives the same codes and scale bit for bit.
    Exceptions: blocks with a non-finite value, and under "even" two more. An E4M3 block whose largest element
    is 448 (1.75 * 2^8) moves to the next scale, where odd multiples of 2^-9 round again. And a block with
    max|x| >= 1.75 * 2^127 may round to 2^128, which overflows float32 and bfloat16.

    Args:
      x: [..., n], float32, float64 or bfloat16, n a multiple of 32.
      fmt: "mxfp4" or "mxfp8".
      scale_rule: "even" or "floor".
    Returns:
      codes [..., n], float4_e2m1fn or float8_e4m3fn, and scale [..., n/32], uint8; neither has a gradient.
    Raises:
      ValueError: another dtype, fmt or scale_rule, or n not a multiple of 32.

    >>> codes, scale = quantize(jnp.full(32, 0.3).at[0].set(-1.0))
    >>> codes[:2], scale                                                # -4 * 2^-2 and 1 * 2^-2
    (Array([-4, 1], dtype=float4_e2m1fn), Array([125], dtype=uint8))
    """
    element = _check(x, fmt, scale_rule)
    codes, scale = _encode(x, element, scale_rule)
    return lax.bitcast_convert_type(codes.astype(element.uint), element.dtype), scale


def dequantize(codes, scale, dtype=jnp.float32):
    """The values codes * 2^(scale - 127), in dtype.

    Exact wherever dtype can hold the value, subnormals included. Otherwise infinite (float32 and bfloat16 at
    the largest scales) or rounded to nearest even (E4M3 in bfloat16 at the smallest). Scale 0xFF and the NaN
    codes of E4M3 give NaN.

    Args:
      codes: [..., n], float4_e2m1fn or float8_e4m3fn, n a multiple of 32.
      scale: [..., n/32], uint8.
      dtype: float32, float64 or bfloat16.
    Raises:
      ValueError: other dtypes, or a scale whose shape does not fit the codes.

    >>> dequantize(jnp.full(32, 3.0, jnp.float4_e2m1fn), jnp.array([126], jnp.uint8))[0]
    Array(1.5, dtype=float32)
    """
    element = next((e for e in _ELEMENTS.values() if e.dtype == codes.dtype), None)
    if element is None:
        raise ValueError(f"mx.dequantize: codes must be float4_e2m1fn or float8_e4m3fn, found {codes.dtype}")
    _check_blocks("codes", codes.shape)
    blocks = (*codes.shape[:-1], codes.shape[-1] // BLOCK)
    if scale.dtype != jnp.uint8 or scale.shape != blocks:
        raise ValueError(
            f"mx.dequantize: codes of shape {codes.shape} need a uint8 scale of shape {blocks}, "
            f"found {scale.dtype} {scale.shape}"
        )
    dtype = jnp.dtype(dtype)
    _check_float("dtype", dtype)
    return _decode(lax.bitcast_convert_type(codes, element.uint), scale, element, dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def fake_quant(x, fmt="mxfp4", scale_rule="even"):
    """`dequantize(*quantize(x, fmt, scale_rule), x.dtype)` bit for bit, with the gradient of the identity.

    Arguments and errors are those of `quantize`; the quantised values are exact in every dtype it takes.

    >>> jax.grad(lambda x: fake_quant(x).sum())(jnp.full(32, 0.3, jnp.float32))[0]
    Array(1., dtype=float32)
    """
    element = _check(x, fmt, scale_rule)
    return _decode(*_encode(x, element, scale_rule), element, x.dtype)


@fake_quant.defjvp
def _fake_quant_jvp(fmt, scale_rule, primals, tangents):
    return fake_quant(*primals, fmt, scale_rule), *tangents


def pack(codes):
    """Two E2M1 codes a byte, the even column in the low nibble: float4_e2m1fn [..., n] -> uint8 [..., n/2].

    >>> pack(jnp.array([1.0, -6.0], jnp.float4_e2m1fn))                 # codes 0x2 and 0xF
    Array([242], dtype=uint8)
    """
    if codes.dtype != jnp.float4_e2m1fn or codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"mx.pack: codes must be float4_e2m1fn [..., 2k], found {codes.dtype} {codes.shape}")
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2), jnp.uint8)


def unpack(packed):
    """Inverse of `pack`: uint8 [..., n/2] -> float4_e2m1fn [..., n]."""
    if packed.dtype != jnp.uint8 or packed.ndim == 0:
        raise ValueError(f"mx.unpack: packed must be uint8 [..., n/2], found {packed.dtype} {packed.shape}")
    codes = lax.bitcast_convert_type(packed, jnp.float4_e2m1fn)
    return codes.reshape(*packed.shape[:-1], -1)


def dequantize_packed(packed, scale):
    """`dequantize(unpack(packed), scale, jnp.bfloat16)` bit for bit, at the speed of writing its result.

    Both nibbles of a byte are worked on at once, as the halves of a 32-bit word. Where a scale is so small or large
    that a value would be subnormal or infinite, and for NaN, `dequantize` does the work.

    Args:
      packed: [..., n/2], uint8, n a multiple of 32.
      scale: [..., n/32], uint8.

    >>> dequantize_packed(jnp.full(16, 0xF2, jnp.uint8), jnp.array([126], jnp.uint8))[:2]
    Array([0.5, -3], dtype=bfloat16)
    """
    plain = jnp.all((scale >= 2) & (scale <= 252))
    return lax.cond(plain, _decode_words, lambda p, s: dequantize(unpack(p), s, jnp.bfloat16), packed, scale)


def _decode_words(packed, scale):
    """bfloat16 [..., n] of packed [..., n/2] whose values are all zero or normal."""
    word = packed.reshape(*scale.shape, BLOCK // 2).astype(jnp.uint32)
    word = (word | (word << 12)) & 0x000F000F
    magnitude = word & 0x00070007
    above = (magnitude >> 1) | (magnitude >> 2)
    nonzero = (magnitude | above) & 0x00010001
    half = nonzero & ~above  # code 1 is 0.5, the one that is subnormal in E2M1
    exponent = (scale.astype(jnp.uint32)[..., None] - 1) << 7  # of 0.5 * 2^(scale - 127), in place
    bits = ((magnitude - half) << 6) + nonzero * exponent
    bits |= (word & 0x00080008) << 12
    values = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return values.reshape(*packed.shape[:-1], -1)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_through(x, dtype):
    """x rounded to the storage dtype and back, with the gradient of the identity (which is not rounded).

    Equal to `x.astype(dtype).astype(x.dtype)`, but a compiler may drop that pair of casts, and not this.
    float64 goes to bfloat16 through float32, as JAX and ml_dtypes cast it; what is subnormal there becomes 0.

    Args:
      x: any shape, float32, float64 or bfloat16.
      dtype: float32, float64 or bfloat16.
    Raises:
      ValueError: other dtypes.

    >>> round_through(jnp.float32(1.001), jnp.bfloat16)
    Array(1., dtype=float32)
    """
    dtype = jnp.dtype(dtype)
    _check_float("x", x.dtype)
    _check_float("dtype", dtype)
    if dtype == jnp.float64:
        return x
    x = lax.reduce_precision(x, 8, 23)  # float32; what is no wider stays as it is
    return lax.reduce_precision(x, 8, 7) if dtype == jnp.bfloat16 else x


@round_through.defjvp
def _round_through_jvp(dtype, primals, tangents):
    return round_through(*primals, dtype), *tangents


# Called outside jit too, at export and import: compiled, they take one pass instead of twenty temporaries.
@partial(jax.jit, static_argnums=(1, 2))
def _encode(x, element, scale_rule):
    """Codes [..., n], as integers of x's size, and scale [..., n/32] uint8 of x [..., n]."""
    # Blocks have an axis of their own only where their largest value is taken: on TPUs a minor axis of 32 is a copy.
    work = _WORK[x.dtype.name]
    # As integers of its own size: a convert could be merged with the one that made x, and see it before its rounding.
    narrow = x.dtype == jnp.bfloat16
    bits = lax.bitcast_convert_type(x, jnp.uint16 if narrow else work.int)
    magnitude = bits & jnp.iinfo(jnp.int16 if narrow else work.int).max
    amax = magnitude.reshape(*x.shape[:-1], -1, BLOCK).max(axis=-1)  # floats of one sign are ordered like their bits
    if narrow:
        bits, magnitude, amax = (part.astype(work.int) << 16 for part in (bits, magnitude, amax))
    quarter = 1 << (work.mantissa - 2)  # added to a mantissa of 1.75 or more, it carries into the exponent
    exponent = ((amax + quarter if scale_rule == "even" else amax) >> work.mantissa) - work.bias
    scale = jnp.clip(exponent - element.emax + _SCALE_BIAS, 0, _NAN_SCALE - 1)
    code = jnp.where(amax < work.infinity, scale, _NAN_SCALE).astype(jnp.uint8)
    scale = _spread(code).astype(work.int)

    # A subnormal is that many 2^(1 - bias - mantissa); as a float it is normal, with an exponent field below 1.
    count = lax.bitcast_convert_type(magnitude.astype(work.dtype), work.int)
    below = count - ((work.bias + work.mantissa - 1) << work.mantissa)
    magnitude = jnp.where(magnitude < 1 << work.mantissa, below, magnitude)

    # |x| / 2^(scale - 127) = significand * 2^(exponent - mantissa)
    field = magnitude >> work.mantissa
    significand = magnitude - ((field - 1) << work.mantissa)
    exponent = field - work.bias - (scale - _SCALE_BIAS)
    # Shift out what the element cannot hold, rounding half to even; mantissa + 2 bits already leave nothing.
    shift = work.mantissa - element.mantissa + jnp.maximum(element.emin - exponent, 0)
    shift = jnp.minimum(shift, work.mantissa + 2)
    kept = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    # The hidden bit of `kept` is one step of the exponent field, and so is a carry out of it.
    codes = (jnp.maximum(exponent - element.emin, 0) << element.mantissa) + kept
    sign = (bits >> (jnp.iinfo(work.int).bits - 1)) & element.sign
    return jnp.minimum(codes, element.top) | sign, code


def _spread(scale):
    """[..., n/32] -> [..., n], to each value its block's."""
    return jnp.broadcast_to(scale[..., None], (*scale.shape, BLOCK)).reshape(*scale.shape[:-1], -1)


@partial(jax.jit, static_argnums=(2, 3))
def _decode(codes, scale, element, dtype):
    """Values [..., n] of integer codes [..., n] and scale [..., n/32] uint8, in dtype."""
    work = _WORK[dtype.name]
    codes, scale = codes.astype(work.int), _spread(scale).astype(work.int)
    magnitude = codes & (element.sign - 1)

    # |value| = significand * 2^power
    field = jnp.maximum(magnitude >> element.mantissa, 1)
    significand = magnitude - ((field - 1) << element.mantissa)
    power = field - 1 + element.emin - element.mantissa + scale - _SCALE_BIAS
    unscaled = lax.bitcast_convert_type(significand.astype(work.dtype), work.int)
    exponent = (unscaled >> work.mantissa) + power
    normal = unscaled + (power << work.mantissa)
    # Zeros and subnormals are multiples of 2^(1 - bias - mantissa), and their bits are that multiple.
    subnormal = significand << jnp.clip(power - (1 - work.bias - work.mantissa), 0, work.mantissa)
    bits = jnp.where((significand > 0) & (exponent > 0), normal, subnormal)
    bits = jnp.where(exponent > 2 * work.bias, work.infinity, bits)
    nan = work.infinity | (1 << (work.mantissa - 1))
    bits = jnp.where((scale == _NAN_SCALE) | (magnitude > element.top), nan, bits)
    bits = jnp.where(codes >= element.sign, bits | jnp.iinfo(work.int).min, bits)
    return lax.bitcast_convert_type(bits, work.dtype).astype(dtype)


def _check(x, fmt, scale_rule):
    """The element format named fmt, when all arguments are in order."""
    if fmt not in _ELEMENTS:
        raise ValueError(f"mx: fmt must be one of {', '.join(_ELEMENTS)}, found {fmt!r}")
    if scale_rule not in _SCALE_RULES:
        raise ValueError(f"mx: scale_rule must be one of {', '.join(_SCALE_RULES)}, found {scale_rule!r}")
    _check_float("x", x.dtype)
    _check_blocks("x", x.shape)
    return _ELEMENTS[fmt]


def _check_float(name, dtype):
    if dtype.name not in _WORK:
        raise ValueError(f"mx: {name} must be one of {', '.join(_WORK)}, found {dtype.name}")


def _check_blocks(name, shape):
    if not shape or shape[-1] % BLOCK:
        raise ValueError(f"mx: the last axis of {name} must be a multiple of {BLOCK}, found shape {shape}")
