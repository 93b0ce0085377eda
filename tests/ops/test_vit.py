"""The tower's operations against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import vit

RNG = np.random.default_rng(0)


def places_of(*grids):
    """Places and grids [1,P,3] of images one after the other, row-major."""
    places = [np.stack(np.unravel_index(np.arange(np.prod(grid)), grid), axis=-1) for grid in grids]
    sizes = [np.broadcast_to(grid, (int(np.prod(grid)), 3)) for grid in grids]
    return tuple(jnp.asarray(np.concatenate(x)[None], jnp.int32) for x in (places, sizes))


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("grid", [(1, 6, 5), (1, 3, 12), (1, 2, 2), (1, 16, 14), (3, 4, 10)])
def test_positions_are_the_table_resized(grid):
    table = RNG.normal(size=(6, 5, 8))
    found = vit.position_embedding(jnp.asarray(table), vit.frame_table(4, 8), *places_of(grid))[0]
    _, h, w = grid
    expected = np.asarray(jax.image.resize(table, (h, w, 8), "linear", antialias=False)).reshape(1, -1, 8)
    expected = np.broadcast_to(expected, (grid[0], h * w, 8)).copy()
    if grid[0] > 1:
        for f in range(3):
            w_i = 10000.0 ** (-2 * np.arange(4) / 8)
            expected[f] += np.concatenate([np.sin(f * w_i), np.cos(f * w_i)])
    # The frames' table is rounded to float32.
    close(found, expected.reshape(-1, 8), 1e-12 if grid[0] == 1 else 1e-7)


def test_the_table_itself_where_the_grid_is_its_own():
    table = RNG.normal(size=(4, 6, 8))
    found = vit.position_embedding(jnp.asarray(table), vit.frame_table(4, 8), *places_of((1, 4, 6)))
    np.testing.assert_array_equal(found[0], table.reshape(-1, 8))


def test_rotary_turns_pairs_in_the_complex_plane():
    x = RNG.normal(size=(1, 40, 2, 16))
    places, _ = places_of((1, 4, 6), (2, 2, 4))
    found = vit.rotary_2d(jnp.asarray(x), places)
    expected = np.empty_like(x)
    for i, (_, row, column) in enumerate(np.asarray(places[0])):
        for p in range(8):
            angle = (column if p % 2 == 0 else row) * 10000.0 ** (-4 * (p // 2) / 16)
            turned = (x[0, i, :, 2 * p] + 1j * x[0, i, :, 2 * p + 1]) * np.exp(1j * angle)
            expected[0, i, :, 2 * p], expected[0, i, :, 2 * p + 1] = turned.real, turned.imag
    close(found, expected)


def ids_of(*lengths):
    return jnp.asarray(np.repeat(np.arange(1, len(lengths) + 1), lengths), jnp.int32)


@pytest.mark.parametrize("block", [4, 7, 64])
def test_attention_and_its_gradients(block, monkeypatch):
    monkeypatch.setattr(vit, "BLOCK", block)
    ids = jnp.stack([jnp.pad(ids_of(9, 5, 3), (0, 3)), ids_of(2, 1, 1, 16), jnp.zeros(20, jnp.int32)])
    q, k, v, do = (jnp.asarray(RNG.normal(size=(3, 20, 2, 4))) for _ in range(4))

    def run(fn):
        out, pull = jax.vjp(lambda *x: fn(*x, ids, ids), q, k, v)
        return out, *pull(do)

    found = jax.jit(lambda: run(vit.segment_attention))()
    for a, b in zip(found, run(vit.segment_attention_reference), strict=True):
        close(a, b)
    assert not found[0][0, 17:].any() and not found[0][2].any()


def test_attention_of_some_queries_to_more_keys(monkeypatch):
    monkeypatch.setattr(vit, "BLOCK", 4)
    ids = ids_of(5, 8)[None]
    q, k = (jnp.asarray(RNG.normal(size=(1, 13, 2, 4))) for _ in range(2))
    v = jnp.asarray(RNG.normal(size=(1, 13, 2, 3)))
    found = vit.segment_attention(q[:, 3:9], k, v, ids[:, 3:9], ids)
    close(found, vit.segment_attention_reference(q, k, v, ids, ids)[:, 3:9])


def test_images_do_not_see_each_other():
    ids = ids_of(6, 6)[None]
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 12, 1, 4))) for _ in range(3))
    found = vit.segment_attention(q, k, v, ids, ids)
    other = vit.segment_attention(q, k.at[:, 6:].set(9), v.at[:, 6:].set(1e9), ids, ids)
    np.testing.assert_array_equal(found[:, :6], other[:, :6])


def test_blocks_without_a_common_segment_are_passed_over(monkeypatch):
    """Their scores would be NaN times zero."""
    monkeypatch.setattr(vit, "BLOCK", 4)
    ids = ids_of(4, 4, 4)[None]
    q, k, v = (jnp.asarray(RNG.normal(size=(1, 12, 1, 4))) for _ in range(3))
    found = vit.segment_attention(q, k.at[:, 4:].set(jnp.nan), v.at[:, 4:].set(jnp.nan), ids, ids)
    assert np.isfinite(found[:, :4]).all() and np.isnan(found[:, 4:]).all()


def test_cells_are_joined_and_frames_averaged():
    # A clip of two frames of two cells, a single cell, and padding.
    slots = jnp.asarray([[0, 1, 0, 1, 2, -1]], jnp.int32)
    x = RNG.normal(size=(1, 24, 3))
    found = vit.join_cells(jnp.asarray(x), slots, 4)
    cells = x.reshape(6, 12)
    expected = np.zeros((1, 6, 12))
    expected[0, :3] = (cells[0] + cells[2]) / 2, (cells[1] + cells[3]) / 2, cells[4]
    close(found, expected)


def test_numbers_formats():
    places, grids = places_of((2, 2, 2))
    x = jnp.ones((1, 8, 1, 4), jnp.bfloat16)
    ids = jnp.ones((1, 8), jnp.int32)
    assert vit.segment_attention(x, x, x, ids, ids).dtype == vit.rotary_2d(x, places).dtype == jnp.bfloat16
    table = jnp.ones((2, 2, 4), jnp.bfloat16)
    assert vit.position_embedding(table, vit.frame_table(4, 4), places, grids).dtype == jnp.float32
    assert vit.frame_table(4, 8).dtype == np.float32
