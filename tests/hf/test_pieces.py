"""Boxes, pieces, and the byte ranges of released tensors."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.hf import pieces
from k3jax.hf.names import Leaf
from k3jax.hf.pieces import boxes, piece_shape, sizes, spans


@st.composite
def leaf_and_box(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    layers = tuple(range(draw(st.integers(0, 3))))
    experts = draw(st.integers(0, 3))
    name = "l.{layer}." + ("e.{expert}" if experts else "x")
    leaf = Leaf(
        ("params", "x"), shape, shape, draw(st.sampled_from(["BF16", "F32", "U8"])), name, "part", layers, experts
    )
    box = []
    for size in leaf.tree_shape:
        start = draw(st.integers(0, size - 1))
        box.append(slice(start, draw(st.integers(start + 1, size))))
    return leaf, tuple(box)


@settings(deadline=None, max_examples=300)
@given(leaf_and_box())
def test_spans_are_the_bytes_of_a_box_in_order(case):
    leaf, box = case
    dtype = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}[leaf.dtype]
    values = np.arange(math.prod(leaf.tree_shape)).reshape(leaf.tree_shape).astype(dtype)
    parts = values.reshape(leaf.repeats, leaf.experts or 1, -1)
    stored = {leaf.name(r, e): parts[r, e].tobytes() for r in range(leaf.repeats) for e in range(leaf.experts or 1)}
    found = list(spans(leaf, box))
    assert b"".join(stored[name][first : first + count] for name, first, count in found) == values[box].tobytes()
    if all(size == whole for size, whole in zip(sizes(box)[-len(leaf.shape) :], leaf.shape)):
        assert len(found) == len({name for name, _, _ in found})  # a whole tensor is one read


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(1, 8))
def test_pieces_fit_and_cover_an_array_once(shape, itemsize):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 64)
        piece = piece_shape(shape, itemsize)
    assert len(piece) == len(shape) and math.prod(piece) * itemsize <= 64
    seen = np.zeros(shape, int)
    for box in boxes(shape, piece):
        seen[box] += 1
    assert (seen == 1).all()


def test_pieces_of_kimi_k3():
    assert piece_shape((22, 896, 3072, 1792), 1) == (1, 8, 3072, 1792)  # 8 divides 896, 12 would fit
    assert piece_shape((22, 896, 3072, 112), 1) == (1, 128, 3072, 112)
    assert piece_shape((163840, 7168), 2) == (4096, 7168)
    assert piece_shape((163841, 7168), 2) == (4681, 7168)  # a prime: the last piece is smaller
    assert piece_shape((22, 7168), 2) == (22, 7168)
