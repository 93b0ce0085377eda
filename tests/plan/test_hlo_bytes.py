"""Bytes accessed, in HLO text whose traffic is counted by hand and against the compiler's own count."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from k3jax.plan import hlo
from k3jax.plan.hlo_bytes import Access, accessed

# A loop as the TPU compiler writes it, which does not say how often it runs: three layers' slices of a stack [3,8,128] are
# read, a row of a table [16,128] written in place, and a kernel says itself what it reads. S(1) is beside the cores.
LOOP = """HloModule loop, is_scheduled=true

%reads (p0: f32[3,8,128], p1: s32[], p2: f32[8,128]) -> f32[8,128] {
  %p0 = f32[3,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,128]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,128}
  %layer = f32[8,128]{1,0} bitcast(%slice)
  %p2 = f32[8,128]{1,0:T(8,128)S(1)} parameter(2)
  ROOT %sum = f32[8,128]{1,0} add(%layer, %p2)
}

%writes (q0: f32[16,128], q1: f32[1,128], q2: s32[]) -> f32[16,128] {
  %q0 = f32[16,128]{1,0} parameter(0)
  %q1 = f32[1,128]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %put = f32[16,128]{1,0} dynamic-update-slice(%q0, %q1, %q2, %none)
}

%body (state: (s32[], f32[3,8,128], f32[16,128])) -> (s32[], f32[3,8,128], f32[16,128]) {
  %state = (s32[], f32[3,8,128], f32[16,128]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[3,8,128]{2,1,0} get-tuple-element(%state), index=1
  %table = f32[16,128]{1,0} get-tuple-element(%state), index=2
  %near = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%stack), custom_call_target="tpu_custom_call", backend_config={"bytes_accessed":"1000"}
  %read = f32[8,128]{1,0:T(8,128)S(1)} fusion(%stack, %i, %near), kind=kLoop, calls=%reads
  %row = f32[1,128]{1,0} slice(%read), slice={[0:1], [0:128]}
  %written = f32[16,128]{1,0} fusion(%table, %row, %i), kind=kLoop, calls=%writes
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[3,8,128], f32[16,128]) tuple(%next, %stack, %written)
}

%condition (before: (s32[], f32[3,8,128], f32[16,128])) -> pred[] {
  %before = (s32[], f32[3,8,128], f32[16,128]) parameter(0)
  %count = s32[] get-tuple-element(%before), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%count, %limit), direction=LT
}

ENTRY %main (a: f32[3,8,128], b: f32[16,128]) -> (s32[], f32[3,8,128], f32[16,128]) {
  %a = f32[3,8,128]{2,1,0} parameter(0)
  %b = f32[16,128]{1,0} parameter(1)
  %first = s32[] constant(2)
  %start = (s32[], f32[3,8,128], f32[16,128]) tuple(%first, %a, %b)
  ROOT %loop = (s32[], f32[3,8,128], f32[16,128]) while(%start), condition=%condition, body=%body
}
"""
LAYER, ROW = 8 * 128 * 4, 128 * 4


def test_slices_updates_and_kernels_count_as_what_they_move():
    counter = 4 + 4 + 4  # i + 1
    body = 1000 + (LAYER + 4 + LAYER + LAYER) + 2 * ROW + (ROW + 4 + ROW) + counter
    beside = LAYER + LAYER  # what `read` takes from S(1) and leaves there
    assert accessed(LOOP, once=True) == Access(body, body - beside)
    assert accessed(LOOP) == Access(3 * body, 3 * (body - beside))  # the counter goes from 2 to 5


def test_asynchronous_copies_count_as_what_they_move():
    text = """HloModule ahead, is_scheduled=true

ENTRY %main (a: f32[16,128]) -> f32[4,128] {
  %a = f32[16,128]{1,0:T(8,128)} parameter(0)
  %begin = ((f32[16,128]{1,0:T(8,128)}), f32[4,128]{1,0:T(4,128)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:4], [0:128]}
  %part = f32[4,128]{1,0:T(4,128)S(1)} slice-done(%begin)
  %back = (f32[4,128]{1,0:T(4,128)}, f32[4,128]{1,0:T(4,128)S(1)}, u32[]{:S(2)}) copy-start(%part)
  ROOT %end = f32[4,128]{1,0:T(4,128)} copy-done(%back)
}
"""
    assert accessed(text) == Access(4 * 4 * ROW, 2 * 4 * ROW)  # four rows there and back, each with one end in main memory


def test_trip_counts_of_conditions():
    computations, entry = hlo.parse(LOOP)
    rest = computations[entry][-1][3]
    assert hlo.trip_count(computations, entry, rest) == 3
    told = rest + ', backend_config={"known_trip_count":{"n":"7"}}'
    assert hlo.trip_count(computations, entry, told) == 7
    assert hlo.trip_count(hlo.parse(LOOP.replace("direction=LT", "direction=NE"))[0], entry, rest) is None
    with pytest.raises(ValueError, match="a loop that does not say how often it runs"):
        accessed(LOOP.replace("%limit = s32[] constant(5)", "%limit = s32[] get-tuple-element(%before), index=0"))


def test_the_compilers_own_count():
    def run(x, w):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
    compiled = jax.jit(run).lower(*shapes).compile()
    text = compiled.as_text()
    once, all_of_it = accessed(text, once=True).bytes, accessed(text).bytes
    assert once == pytest.approx(compiled.cost_analysis()["bytes accessed"], rel=0.1)
    matrix = 64 * 64 * 4
    assert 5 * 6 * matrix < all_of_it < 8 * 6 * matrix  # a step slices w, reads x and w twice, and writes twice
