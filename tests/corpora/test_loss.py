"""Packed conversations and the model: each is alone in its row's company."""

import dataclasses
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.data.corpus import fill, to_record
from k3jax.data.encoding import Encoder, Encoding, open_tokenizer
from k3jax.data.packing import Packer
from k3jax.data.sources import Document
from k3jax.nn.model import K3, init_variables
from k3jax.ops.loss import token_losses

PLACES, ROWS = 320, 4


@pytest.fixture(scope="module")
def conversations(marked, conversation):
    """Four of them, which fit two rows; the last says nothing but z, and no other says it."""
    encode, draw = Encoder(open_tokenizer(marked), Encoding(PLACES, thinking=False)), random.Random(1)
    found = []
    while len(found) < ROWS - 1:
        record = conversation(draw, turns=1, most=20)
        tokens = [*encode(Document("", 0, messages=record["messages"]))]
        found += [each for each in tokens if len(each.ids) < PLACES // 2]
    messages = [{"role": "user", "content": "zz"}, {"role": "assistant", "content": "zzz"}]
    return [*found, *encode(Document("", 0, messages=messages))]


def batch_of(rows):
    batch = {name: np.zeros((ROWS, PLACES), np.int32) for name in ("tokens", "targets", "segment_ids")}
    batch["weights"] = np.zeros((ROWS, PLACES), np.float32)
    for b, row in enumerate(rows):
        fill(batch, b, to_record(row))
    return batch


@pytest.fixture(scope="module")
def losses(tiny):
    """A function of a batch and places of it, in float64: weighted losses of all places, and the gradient of the
    sum over those places with respect to the embeddings."""
    model = K3(dataclasses.replace(tiny, vocab_size=512), dtype=jnp.float64, param_dtype=jnp.float64)
    variables = jax.jit(lambda: nn.unbox(init_variables(model, jax.random.key(0))))()

    def of(embeddings, batch, places):
        params = variables["params"] | {"embed_tokens": embeddings}
        out = model.apply(variables | {"params": params}, batch["tokens"], segment_ids=batch["segment_ids"])
        every = batch["weights"].astype(jnp.float64) * token_losses(out.logits * 3, batch["targets"])
        return jnp.sum(jnp.where(places, every, 0)), every

    compiled = jax.jit(jax.grad(of, has_aux=True))

    def run(batch, places=np.ones((ROWS, PLACES), bool)):
        return tuple(map(np.asarray, compiled(variables["params"]["embed_tokens"], batch, places)[::-1]))

    return run


def test_packed_conversations_lose_what_they_lose_alone(conversations, losses):
    packer = Packer(PLACES)
    rows = [row for tokens in conversations for row in packer.push(len(tokens.ids) - 1, tokens)] + list(packer.finish())
    assert len(rows) <= ROWS // 2
    packed, alone = batch_of(rows), batch_of([[tokens] for tokens in conversations])
    learnt = alone["weights"].sum(1)
    assert packed["weights"].sum() == learnt.sum() == sum(tokens.learnt[1:].sum() for tokens in conversations)
    mean, each = losses(packed)[0].sum() / learnt.sum(), losses(alone)[0].sum(1) / learnt
    assert each.std() > 1e-3 and abs(mean - np.average(each, weights=learnt)) < 1e-9


def test_no_gradient_crosses_conversations(marked, conversations, losses):
    *others, last = conversations
    batch = batch_of([[others[0], last], [last, others[1]]])
    of_last = np.zeros((ROWS, PLACES), bool)
    of_last[0], of_last[1] = batch["segment_ids"][0] == 2, batch["segment_ids"][1] == 1
    (z,) = open_tokenizer(marked).encode("z")
    assert z in last.ids and z not in np.concatenate([tokens.ids for tokens in others])
    assert np.any(losses(batch, of_last)[1][z]) and losses(batch, ~of_last)[1].any()
    assert not np.any(losses(batch, ~of_last)[1][z])
