"""Whatever rows, lengths and ids are given: the same on every mesh as on one device, or the same refusal."""

import dataclasses
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.cache import cache_shardings
from k3jax.config import VisionConfig
from k3jax.nn.model import init_variables, model_shardings
from k3jax.ops.loss import cross_entropy
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig
from k3jax.serve.generate import generate_tokens
from k3jax.train import step as training
from k3jax.vision import Patches, pack

MESHES = {
    "one": {},
    "expert4": {"expert": 4},
    "tensor2": {"tensor": 2},
    "fsdp2": {"fsdp": 2},
    "fsdp2_expert2_tensor2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "context2_tensor2": {"context": 2, "tensor": 2},
}
VOCAB = 256
RNG = np.random.default_rng(0)


@cache
def model(cfg):
    model = k3jax.K3(cfg, jnp.float64, jnp.float64)
    return model, jax.device_get(nn.unbox(jax.jit(lambda: init_variables(model, jax.random.key(1)))()))


def drawn(*shape):
    return jnp.asarray(RNG.integers(VOCAB, size=shape), jnp.int32)


@cache
def apply(cfg):
    """One program for every shape: (variables, tokens, mask, segment_ids, cache) -> what can be compared."""
    net, _ = model(cfg)

    def run(variables, tokens, mask=None, segment_ids=None, cache=None):
        out = net.apply(variables, tokens, mask, segment_ids, cache)
        return (out.logits, out.hidden, out.router), out.cache

    return jax.jit(run)


PLAIN = {
    # Ids that no vocabulary has, at real positions and at padding; three rows of an odd length.
    "mask": (drawn(3, 7).at[1, 2].set(-1).at[2, 0].set(VOCAB).at[0, 1].set(2**31 - 1).at[2, 6].set(-(2**31)),
             {"mask": jnp.asarray([[0, 0, 1, 1, 1, 1, 1], [1] * 7, [1] * 5 + [0] * 2])}),
    "segments": (drawn(1, 5), {"segment_ids": jnp.asarray([[1, 1, 2, 2, 0]], jnp.int32)}),
    "single tokens": (drawn(5, 1).astype(jnp.uint8), {}),
}  # fmt: skip
# Prompts of two rows, then tokens until two are beyond the room; all rows end in padding of their own.
PIECES = [drawn(2, 3), drawn(2, 1), drawn(2, 1), drawn(2, 3)]
MASKS = [jnp.asarray([[1, 1, 1], [0, 1, 1]], jnp.int32)] + [jnp.ones(piece.shape, jnp.int32) for piece in PIECES[1:]]
ROOM = 6


@cache
def plain(cfg, name, case):
    tokens, options = PLAIN[case]
    with jax.set_mesh(k3jax.make_mesh(**MESHES[name])):
        return jax.device_get(apply(cfg)(model(cfg)[1], tokens, **options)[0])


@cache
def cached(cfg, name):
    """What pieces give one after the other, and the cache after them."""
    found, make = [], partial(k3jax.init_cache, cfg, 2, ROOM, jnp.float64)
    cache = make() if name == "expert4" else None  # without the mesh, which does not divide its rows
    with jax.set_mesh(k3jax.make_mesh(**MESHES[name])):
        cache = cache or make()
        shapes = jax.tree.map(jnp.shape, cache)
        for piece, mask in zip(PIECES, MASKS, strict=True):
            out, cache = apply(cfg)(model(cfg)[1], piece, mask, cache=cache)
            found.append(jax.device_get(out))
        assert jax.tree.map(jnp.shape, cache) == shapes
    rows = jax.tree.map(lambda x: x[:, :2], cache.layers), cache.present[:2], cache.length
    return jax.device_get((found, rows))


def equal(found, expected, tolerance=1e-9):
    """NaN where the other is NaN; else within the tolerance of the leaf's largest value."""

    def one(a, b):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.nanmax(np.abs(b), initial=0))

    jax.tree.map(one, found, expected)


@pytest.mark.parametrize(
    "case, name",
    [("mask", name) for name in MESHES if name != "one"]
    + [("segments", "context2_tensor2"), ("single tokens", "fsdp2_expert2_tensor2")],
)
def test_any_rows_lengths_and_ids(tiny, name, case):
    equal(plain(tiny, name, case), plain(tiny, "one", case))


def test_unknown_ids_embed_as_zeros(tiny):
    """In a traced program, on one device, which all meshes equal: what a table with a row of zeros more gives."""
    tokens, options = PLAIN["mask"]
    net, variables = model(tiny)
    table = jnp.pad(variables["params"]["embed_tokens"], ((0, 1), (0, 0)))
    head = jnp.pad(variables["params"]["lm_head"], ((0, 1), (0, 0)))
    larger = variables | {"params": variables["params"] | {"embed_tokens": table, "lm_head": head}}
    zero = jnp.where((tokens < 0) | (tokens >= VOCAB), VOCAB, tokens)
    out = jax.jit(net.clone(cfg=dataclasses.replace(tiny, vocab_size=VOCAB + 1)).apply)(larger, zero, **options)
    equal(plain(tiny, "one", "mask")[0], jax.device_get(out.logits[:, :, :VOCAB]), 1e-12)


@pytest.mark.parametrize("name", ["expert4", "fsdp2_expert2_tensor2", "context2_tensor2"])
def test_any_rows_and_lengths_through_a_cache(tiny, name):
    equal(cached(tiny, name), cached(tiny, "one"))


def test_beyond_the_room_nothing_is_written_and_logits_are_nan(tiny):
    """Five tokens fill a cache of six; of the three that follow, one fits."""
    found, (layers, present, length) = cached(tiny, "one")
    assert length == 8 and present.tolist() == [[1] * 6, [0, *[1] * 5]]
    (*_, (logits, hidden, router)), fits = found, np.array([True, False, False])
    for x in (logits, hidden):
        assert np.all(np.isnan(x) == ~fits[None, :, None])
    # As if only what fits had been given; the program that sees all of it once is an independent reference.
    tokens, mask = (jnp.concatenate([*all_[:3], all_[3][:, :1]], axis=1) for all_ in (PIECES, MASKS))
    empty = k3jax.init_cache(tiny, 2, ROOM, jnp.float64)
    (whole, _, _), cache = jax.device_get(apply(tiny)(model(tiny)[1], tokens, mask, cache=empty))
    equal(logits[:, 0], whole[:, -1], 1e-11)
    equal((layers, present), (cache.layers, cache.present), 1e-11)
    assert [int(s.load.sum()) for s in training.router_stats(router)] == [2 * 1 * tiny.num_experts_per_token]


# ---- images ------------------------------------------------------------------------------------------------


@cache
def seeing(tiny, name):
    """Three rows, of which two have an image, on one layer of latent attention."""
    vision = VisionConfig(4, 6, 5, 4, 3, 1, 32, 64, 48, 32, 32, media_placeholder_token_id=0)
    cfg = dataclasses.replace(tiny, num_hidden_layers=1, kda_layers=(), full_attn_layers=(1,), vision=vision)
    net, variables = model(cfg)
    rng = np.random.default_rng(2)
    first, last = (Patches(rng.normal(size=(h * 2, 3, 4, 4)), (1, h, 2)) for h in (4, 2))
    images = pack(vision, [[first], [], [last]], room=12)  # three cells, which the meshes do not divide either
    tokens = jnp.asarray([[1, 0, 0, 2, 3], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4]], jnp.int32)
    with jax.set_mesh(k3jax.make_mesh(**MESHES[name])):
        run = jax.jit(lambda v, t, i: net.apply(v, t, pixel_values=i).logits)
        return jax.device_get(run(variables, tokens, images))


def test_images_of_any_rows(tiny):
    assert not np.isnan(seeing(tiny, "one")).any()
    equal(seeing(tiny, "fsdp2_expert2_tensor2"), seeing(tiny, "one"))


# ---- refusals ----------------------------------------------------------------------------------------------


def refused(do, *args, **options):
    with pytest.raises(ValueError) as error:
        do(*args, **options)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
    return str(error.value)


REFUSED = {
    "an unknown id": (drawn(3, 4).at[1, 2].set(VOCAB), {}, "token id 256 at position [1, 2] is outside the vocabulary"),
    "a negative id": (drawn(3, 4).at[0, 0].set(-1), {}, "token id -1 at position [0, 0] is outside the vocabulary"),
    "an id that int32 would wrap": (np.full((3, 4), 2**32 + 5), {}, "token id 4294967301 at position [0, 0] is"),
    "numbers that are no ids": (jnp.ones((3, 4)), {}, "tokens: found dtype float64, must be integers"),
    "no rows": (drawn(0, 4), {}, "tokens: found shape (0, 4), must be [B,T]"),
    "a full cache": (drawn(3, 4), {"length": 5}, "cache: found length 5 of max_len 8, must leave room for the 4 new"),
    "another's rows": (drawn(3, 1), {"rows": 4}, "cache: found batch 4, must be 3 like tokens"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_refusals(tiny, mesh):
    net, variables = model(tiny)
    with jax.set_mesh(k3jax.make_mesh(**MESHES[mesh])):
        for tokens, change, message in REFUSED.values():
            cache = None
            if change:
                cache = k3jax.init_cache(tiny, change.get("rows", 3), 8)
                cache = cache.replace(length=jnp.int32(change.get("length", 0)))
            assert refused(net.apply, variables, tokens, cache=cache).startswith(message)


def test_ids_that_are_not_looked_at_are_not_refused(tiny):
    net, variables = model(tiny)
    tokens = np.array([[-1, 2, 3]])
    for ids in ("mask", "segment_ids"):  # known while it is traced
        jax.eval_shape(lambda: net.apply(variables, tokens, **{ids: np.array([[0, 1, 1]])}))  # noqa: B023
        assert "-1" in refused(lambda: net.apply(variables, tokens, **{ids: np.array([[1, 1, 1]])}))  # noqa: B023


@pytest.mark.parametrize("mesh", ["one", "tensor2", "fsdp2_expert2_tensor2"])
def test_targets_outside_the_vocabulary(mesh):
    """Refused where they are known; else the loss is NaN, unless nothing is learnt there, and gradients are finite."""
    hidden, head = (jnp.asarray(RNG.normal(size=shape)) for shape in ((4, 2, 8), (10, 8)))
    weights = jnp.ones((4, 2)).at[1, 1].set(0)
    loss = jax.value_and_grad(lambda hidden, targets: cross_entropy(hidden, head, targets, weights))
    for wrong, message in ((10, "target id 10"), (-1, "target id -1")):
        targets = jnp.ones((4, 2), jnp.int32).at[1, 1].set(-100)  # not looked at
        expected = loss(hidden, targets)
        with jax.set_mesh(k3jax.make_mesh(**MESHES[mesh])):
            equal(jax.device_get(jax.jit(loss)(hidden, targets)), jax.device_get(expected))
            targets = targets.at[2, 0].set(wrong)
            assert refused(loss, hidden, targets).startswith(f"{message} at position [2, 0] is outside the vocabulary")
            value, gradient = jax.jit(loss)(hidden, targets)
        assert np.isnan(value) and np.isfinite(gradient).all() and not gradient[2, 0].any()


SIZES = {
    # What is changed, of which mesh, and the line from each entrance.
    "vocab": ({"vocab_size": 130}, {"tensor": 4}, "vocab: found size 130, must be a multiple of mesh.tensor = 4"),
    "heads": ({"kda_num_heads": 3}, {"tensor": 2}, "heads: found size 3, must be a multiple of mesh.tensor = 2"),
    "mlp": ({"intermediate_size": 66}, {"tensor": 4}, "mlp: found size 66, must be a multiple of mesh.tensor = 4"),
    "embed": ({"hidden_size": 33}, {"fsdp": 2}, "embed: found size 33, must be a multiple of mesh.fsdp = 2"),
    "experts": ({"num_experts": 6}, {"expert": 4}, "experts: found size 6, must be a multiple of mesh.expert = 4"),
    "F": ({"moe_intermediate_size": 33}, {"fsdp": 2}, "expert_out: found size 33, must be a multiple of mesh.fsdp = 2"),
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_that_the_mesh_does_not_divide(tiny, size):
    change, mesh, message = SIZES[size]
    # Where each size is that of a part of its own, heads of both kinds are four.
    cfg = dataclasses.replace(tiny, quantized_experts=False, num_attention_heads=4, **{"kda_num_heads": 4, **change})
    net = k3jax.K3(cfg)
    variables = jax.eval_shape(lambda: nn.unbox(init_variables(net, jax.random.key(0))))
    config = RunConfig(cfg, DataConfig(seq_len=8, batch_size=8), TrainConfig(qat=False), MeshConfig(**mesh))
    mesh = k3jax.make_mesh(**mesh)
    tokens = jnp.ones((4, 8), jnp.int32)
    entrances = {
        "apply": lambda: jax.eval_shape(net.apply, variables, tokens),
        "decode": lambda: jax.eval_shape(net.apply, variables, tokens[:, :1], cache=k3jax.init_cache(cfg, 4, 8)),
        "init": lambda: jax.eval_shape(lambda: init_variables(net, jax.random.key(0))),
        "train": lambda: training.abstract_state(config, mesh),
        "load": lambda: model_shardings(cfg, mesh),
    }
    if size == "heads":
        entrances["init_cache"] = lambda: k3jax.init_cache(cfg, 4, 8)
    with jax.set_mesh(mesh):
        assert {name: refused(do) for name, do in entrances.items()} == dict.fromkeys(entrances, message)
    if size == "heads":
        assert refused(cache_shardings, jax.eval_shape(partial(k3jax.init_cache, cfg, 4, 8)), mesh) == message


def test_a_batch_that_training_cannot_split(tiny):
    mesh = k3jax.make_mesh(fsdp=2)
    config = RunConfig(tiny, DataConfig(seq_len=8, batch_size=2), TrainConfig(), MeshConfig(fsdp=2))
    batch = {key: np.ones((3, 8), np.int32) for key in ("tokens", "targets", "segment_ids", "weights")}
    message = "batch: found size 3, must be a multiple of mesh.fsdp = 2"
    with jax.set_mesh(mesh):
        assert refused(training.shard_batch, batch, mesh) == message
        state, shardings = training.abstract_state(config, mesh)
        batch["weights"] = np.ones((3, 8), np.float32)
        assert refused(training.make_train_step(config, shardings).lower, state, batch) == message


def test_generation_of_one_row_on_a_mesh(tiny):
    net, variables = model(tiny)
    variables = variables | {"params": variables["params"] | {"lm_head": 30 * variables["params"]["lm_head"]}}
    run = lambda: list(generate_tokens(net, variables, np.arange(5, dtype=np.uint8), 5, temperature=1.0))  # noqa: E731
    expected = run()
    with jax.set_mesh(k3jax.make_mesh(expert=4)):
        assert run() == expected
