"""Collectives counted in compiled programs whose traffic is known, and in HLO text as other backends write it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from k3jax.plan.hlo import Collective, collectives, sent_by_kind
from k3jax.sharding import make_mesh

FLOATS = 12  # a device's part of the operand, 48 bytes


def compiled(body, axes=("data", "expert", "tensor"), floats=FLOATS):
    """HLO of `body` on a part of so many floats, on a mesh of 2 x 2 x 2."""
    mesh = make_mesh(data=2, expert=2, tensor=2)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    x = jax.ShapeDtypeStruct((floats * 2 ** len(axes),), jnp.float32)
    return jax.jit(run).lower(x).compile().as_text()


def gather(x, axes="tensor"):
    return x + lax.all_gather(x, axes).sum(0)


def repeat(step, times):
    """Not linear, so that no loop is unrolled or moved out of another."""
    return lambda x: lax.scan(lambda x, _: (jnp.sin(step(x)), None), x, length=times)[0]


NESTED = repeat(lambda x: gather(repeat(lambda x: lax.psum(x, "data"), 4)(x)), 3)


def sent(text):
    return {kind: n for kind, n in sent_by_kind(text).items() if n}


@pytest.mark.parametrize(
    "body, expected",
    [
        (lambda x: x * 2, {}),
        (gather, {"all-gather": 48}),
        (lambda x: gather(x, ("data", "tensor")), {"all-gather": 3 * 48}),
        (lambda x: lax.psum(x, ("expert", "tensor")), {"all-reduce": 2 * 48 * 3 // 4}),
        (lambda x: jnp.tile(lax.psum_scatter(x, ("data", "expert"), tiled=True), 4), {"reduce-scatter": 36}),
        (lambda x: lax.all_to_all(x.reshape(4, 3), ("data", "expert"), 0, 0, tiled=True).ravel(), {"all-to-all": 36}),
        (lambda x: lax.ppermute(x, "expert", [(0, 1)]), {"collective-permute": 48}),
        (repeat(gather, 5), {"all-gather": 5 * 48}),
        (NESTED, {"all-gather": 3 * 48, "all-reduce": 3 * 4 * 48}),
        (lambda x: lax.cond(x[0] > 0, repeat(gather, 7), gather, x), {"all-gather": 48}),
        (lambda x: lax.cond(x[0] > 0, gather, lambda x: x, x), {}),
    ],
)
def test_bytes_sent(body, expected):
    assert sent(compiled(body)) == expected


def test_gradients_of_a_loop():
    def body(x):
        return jax.grad(lambda x: repeat(gather, 6)(x).sum())(x)

    found = sent(compiled(body))
    assert found == {"all-gather": 6 * 48, "reduce-scatter": 6 * 48}


def test_groups_and_the_axes_they_cross():
    mesh = {"data": 2, "expert": 2, "tensor": 2}
    (one,) = collectives(compiled(lambda x: gather(x, "expert")))
    assert sorted(one.groups) == [(0, 2), (1, 3), (4, 6), (5, 7)] and one.axes(mesh) == ("expert",)
    (one,) = collectives(compiled(lambda x: gather(x, ("data", "tensor"))))
    assert sorted(one.groups) == [(0, 1, 4, 5), (2, 3, 6, 7)] and one.axes(mesh) == ("data", "tensor")
    (one,) = collectives(compiled(lambda x: lax.ppermute(x, "data", [(0, 1)])))
    assert sorted(one.groups) == [(0, 4), (1, 5), (2, 6), (3, 7)] and one.axes(mesh) == ("data",)


def test_a_loop_of_unknown_length_must_not_communicate():
    def until(step):
        return lambda x: lax.while_loop(lambda x: x[0] < 9, step, x)

    assert sent(compiled(until(lambda x: x + 1))) == {}
    with pytest.raises(ValueError, match="while.*: a loop that communicates and does not say how often it runs"):
        collectives(compiled(until(gather)))

    # Under a condition it may as well not run at all.
    branches = lambda x: lax.cond(x[0] < 3, until(gather), lambda x: x, x)  # noqa: E731
    assert sent(compiled(branches)) == {}


TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[16,4]) -> bf16[2,4] {
  %p = bf16[16,4]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %scattered = bf16[2,4]{1,0} reduce-scatter(bf16[16,4]{1,0:T(8,128)(2,1)} %p), replica_groups={}, dimensions={0}, to_apply=%add
}

%all-reduce-scatter.2.clone (q: bf16[16,4]) -> bf16[2,4] {
  %q = bf16[16,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %everywhere = bf16[16,4]{1,0} all-reduce(%q), replica_groups={}, to_apply=%add
  ROOT %part = bf16[2,4]{1,0} dynamic-slice(%everywhere, %zero, %zero), dynamic_slice_sizes={2,4}
}

ENTRY %main (x: f32[4], s: s4[6], t: token[]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="all-gather(x)"}
  %s = s4[6]{0} parameter(1)
  %half = bf16[16,4]{1,0} constant({...})
  %started = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  %gathered = f32[8]{0} all-gather-done(%started)
  %two = (f32[4]{0}, s4[6]{0}, /*index=2*/f32[4]{0}) all-reduce(%x, %s, /*index=2*/%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %alone = f32[4]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %apart = ((bf16[16,4]{1,0}), bf16[2,4]{1,0}) async-start(%half), calls=%wrapped
  %back = bf16[2,4]{1,0} async-done(%apart)
  %room = f32[6]{0} constant({...})
  %where = s32[8]{0} constant({...})
  %rows = f32[6]{0} ragged-all-to-all(%gathered, %room, %where, %where, %where, %where), replica_groups={}
  %home = f32[8]{0} ragged-all-to-all(%rows, %gathered, %where, %where, %where, %where), replica_groups={}
  %kept = bf16[2,4]{1,0} fusion(%half), kind=kCustom, calls=%all-reduce-scatter.2.clone
  ROOT %moved = f32[4]{0} collective-permute(%x), source_target_pairs={{0,4},{4,0}}
}
"""


def test_text_of_other_backends():
    assert collectives(TEXT) == {
        Collective("all-gather", 16, ((0, 2), (1, 3), (4, 6), (5, 7))): 1,
        Collective("all-reduce", 2 * (16 + 3 + 16) * 3 // 4, ((0, 1, 2, 3), (4, 5, 6, 7))): 1,
        Collective("reduce-scatter", 128 * 7 // 8, (tuple(range(8)),)): 2,
        Collective("ragged-all-to-all", 6 * 4 * 7 // 8, (tuple(range(8)),)): 2,
        Collective("collective-permute", 16, ((0, 4), (4, 0))): 1,
    }


@pytest.mark.parametrize(
    "written, groups",
    [
        ("{{0,2},{1,3}}", [(0, 2), (1, 3)]),
        ("[2,2]<=[4]", [(0, 1), (2, 3)]),
        ("[2,2]<=[2,2]", [(0, 1), (2, 3)]),
        ("[2,2]<=[2,2]T(1,0)", [(0, 2), (1, 3)]),
        ("mesh['a'=2,'b'=1,'c'=2] {'c'}", [(0, 1), (2, 3)]),
        ("mesh['a'=2,'b'=1,'c'=2] {'a','b'}", [(0, 2), (1, 3)]),
        ("mesh['a'=2,'c'=2] {'c','a'}", [(0, 2, 1, 3)]),
        ("mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [(0, 1), (2, 3)]),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'a'}", [(0, 1), (3, 2)]),
        ("{}", [(0, 1, 2, 3)]),
    ],
)
def test_ways_to_write_groups(written, groups):
    text = TEXT.replace("num_partitions=8", "num_partitions=4").replace("[4,2]<=[2,2,2]T(0,2,1)", written)
    assert Collective("all-gather", 16 * (len(groups[0]) - 1), tuple(groups)) in collectives(text)


def test_groups_in_an_unknown_form():
    with pytest.raises(ValueError, match=r"replica_groups: found <=new.*, which is in no known form"):
        collectives(TEXT.replace("[4,2]<=[2,2,2]T(0,2,1)", "<=new"))
