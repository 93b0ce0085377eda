"""Loss and gradients over images and text on meshes of eight devices equal those on one."""

import dataclasses
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import k3jax
from k3jax.config import VisionConfig
from k3jax.nn.model import init_variables
from k3jax.ops import vit
from k3jax.sharding import tree_shardings
from k3jax.train import step as training
from k3jax.vision import Patches, pack

MESHES = {
    "one": {},
    "tensor8": {"tensor": 8},
    "fsdp2_context2_expert2": {"fsdp": 2, "context": 2, "expert": 2},
}
PLACEHOLDER = 255
# Three heads, which no mesh here divides: the tower's patches are split, not its heads.
VISION = VisionConfig(4, 6, 5, 4, 3, 2, 32, 64, 48, 32, 32, media_placeholder_token_id=PLACEHOLDER)
B, T = 8, 32


def batch():
    """Two documents a row, each with an image or a clip of its own size; row 3 without, row 5 with two in one."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (B, T)).astype(np.int32)
    ids = np.where(np.arange(T)[None] < 15, 1, 2).repeat(B, 0).astype(np.int32)
    ids[2, 28:] = 0
    rows = []
    for b in range(B):
        grids = [] if b == 3 else [(1, 4, 2 + 2 * (b % 3)), (1 + b % 4, 4, 4)]
        starts = [2, 3 + grids[0][2] if b == 5 else 17] if grids else []
        for start, (_, h, w) in zip(starts, grids):
            tokens[b, start : start + h * w // 4] = PLACEHOLDER
        rows.append([Patches(rng.normal(size=(int(np.prod(g)), 3, 4, 4)), g) for g in grids])
    targets = np.roll(tokens, -1, axis=1)
    weights = (np.roll(ids, -1, axis=1) == ids) & (targets != PLACEHOLDER) & (ids > 0)
    weights[:, -1] = False
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": ids,
        "weights": weights.astype(np.float32),
        "images": pack(VISION, rows, room=192),
    }


@cache
def model(tiny):
    # One dense layer of latent attention: the rest of the text model is compared in test_mesh.py.
    text = {"num_hidden_layers": 1, "kda_layers": (), "full_attn_layers": (1,), "num_attention_heads": 8}
    cfg = dataclasses.replace(tiny, **text, vision=VISION)
    model = k3jax.K3(cfg, jnp.float64, jnp.float64, remat=True)
    return model, jax.device_get(nn.unbox(jax.jit(lambda: init_variables(model, jax.random.key(0)))()))


@cache
def gradients(tiny, name):
    """(loss, gradients) on a mesh, and how the latter are placed."""
    net, variables = model(tiny)
    mesh = k3jax.make_mesh(**MESHES[name])
    with jax.set_mesh(mesh):
        shardings = tree_shardings(jax.eval_shape(lambda: init_variables(net, jax.random.key(0))), mesh)
        placed = jax.device_put(variables, shardings)
        part = training.shard_batch(batch(), mesh)

        def loss(params, part):
            return training.batch_loss(net, params, {}, part, jnp.sum(part["weights"]))[0]

        run = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings["params"]))
        value, found = run(placed["params"], part)
    return jax.device_get((value, found)), jax.tree.map(lambda x: x.sharding.spec, found)


def errors(found, expected):
    """Largest difference of every leaf, relative to the leaf's largest value where that is not zero."""
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    return {
        jax.tree_util.keystr(path): float(np.max(np.abs(a - b)) / (np.max(np.abs(b)) or 1))
        for (path, b), a in zip(leaves, jax.tree.leaves(found), strict=True)
    }


@pytest.mark.parametrize("name", [name for name in MESHES if name != "one"])
def test_mesh_equals_one_device(tiny, name):
    found = errors(gradients(tiny, name)[0], gradients(tiny, "one")[0])
    worst = max(found, key=found.get)
    assert found[worst] <= 1e-9, (worst, found[worst])


def test_every_weight_of_tower_and_projector_learns(tiny):
    (_, found), _ = gradients(tiny, "one")
    for name in training.VISION:
        for path, leaf in jax.tree_util.tree_leaves_with_path(found[name]):
            assert np.abs(leaf).max() > 0, path


def test_keys_of_the_own_device_alone_give_something_else(tiny, monkeypatch):
    """Attention that forgets to gather keys over the devices of a row."""
    whole = vit.segment_attention

    def own(q, k, v, q_ids, kv_ids):
        first = jax.lax.axis_index("tensor") * q.shape[1]
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, q.shape[1], axis=1)  # noqa: E731
        return whole(q, cut(k), cut(v), q_ids, q_ids)

    monkeypatch.setattr("k3jax.nn.vision.segment_attention", own)
    found = errors(gradients.__wrapped__(tiny, "tensor8")[0], gradients(tiny, "one")[0])
    assert max(found.values()) > 1e-3


def test_the_tower_lies_where_the_table_says(tiny):
    _, placed = gradients(tiny, "fsdp2_context2_expert2")
    tower = placed["vision_tower"]
    assert tower["blocks"]["wqkv"] == P(None, None, None, None, "fsdp")
    assert tower["blocks"]["fc1"] == P(None, "fsdp", None)
    assert tower["pos_emb"] == P(None, None, "fsdp")
    assert placed["mm_projector"]["proj_2"] == P("fsdp", None)


def test_images_in_a_row_of_packed_documents_are_those_documents(tiny):
    """A row of two documents with an image each gives each the logits that it has alone."""
    net, variables = model(tiny)
    first = jax.tree.map(lambda x: jnp.asarray(x[:1]), batch())
    images = batch()["images"]
    out = net.apply(variables, first["tokens"], segment_ids=first["segment_ids"], pixel_values=first["images"])
    second = np.flatnonzero(images.ids[0] == 2)
    rows = [[Patches(images.patches[0, second][np.lexsort(images.places[0, second].T[::-1])], (1, 4, 4))]]
    alone = net.apply(variables, first["tokens"][:, 15:], pixel_values=jax.tree.map(jnp.asarray, pack(VISION, rows)))
    np.testing.assert_allclose(out.logits[:, 15:], alone.logits, rtol=0, atol=1e-12)
