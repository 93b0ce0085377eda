"""The whole model's structure: initial mixture, packing, caching, scanning, number formats, and its refusals.

Its numbers are held against released values in test_golden.py.
"""

import dataclasses
import runpy
from functools import cache, partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import K3, ModelConfig, init_cache, load_hf, save_hf
from k3jax.config import Segment
from k3jax.nn.moe import RouterStats

ROOT = Path(__file__).parents[2]

# Both mixers and both feed-forward parts in two bodies: a dense KDA layer, then two MLA MoE layers scanned.
TINY = dataclasses.replace(
    ModelConfig.from_hf(ROOT / "tests" / "data" / "k3_tiny"),
    num_hidden_layers=3,
    kda_layers=(1,),
    full_attn_layers=(2, 3),
    attn_res_block_size=2,
    vision=None,
)
# The released pattern: 3 to 1, an extra last MLA layer, and blocks of 4 of which the last is not full.
DEEP = dataclasses.replace(
    TINY,
    num_hidden_layers=13,
    kda_layers=tuple(i for i in range(1, 13) if i % 4),
    full_attn_layers=(4, 8, 12, 13),
    attn_res_block_size=4,
)


def random_variables(cfg, dtype="float64", seed=0):
    """Every leaf random, so that nothing is hidden by a zero or a one."""
    rng = np.random.default_rng(seed)
    model = K3(cfg, param_dtype=jnp.dtype(dtype))
    shapes = jax.eval_shape(lambda: nn.unbox(model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))))

    def draw(path, leaf):
        centre = 1.0 if "norm" in path[-1].key else 0.0
        return jnp.asarray(centre + 0.1 * rng.normal(size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, {name: shapes[name] for name in ("params", "router")})


@cache
def tiny(dtype="float64", **settings):
    """(model, variables, jitted apply(variables, tokens, mask, segment_ids, cache))."""
    model = K3(TINY, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype), **settings)
    return model, random_variables(TINY, dtype), jax.jit(model.apply)


def settled(variables):
    """The same with biases that decide the routing, so that rounding cannot."""
    return variables | {"router": jax.tree.map(lambda x: 100 * x, variables["router"])}


def tokens_of(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(TINY.vocab_size, size=shape), jnp.int32)


def close(found, expected, tolerance=1e-11):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# ---- initial state ---------------------------------------------------------------------------------


@cache
def initial():
    # The cheapest generator to compile.
    key, model = jax.random.key(0, impl="rbg"), K3(TINY)
    return model, jax.jit(lambda: nn.unbox(model.init(key, jnp.zeros((1, 2), jnp.int32))))()


def test_at_init_the_mixture_over_depth_is_the_uniform_average():
    model, variables = initial()
    queries = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])
        if "res_proj" in path[-1].key
    }
    assert len(queries) == 5  # two for each of two bodies, and the output's
    assert not any(query.any() for query in queries.values())

    tokens = tokens_of(0, 2, 5)
    run = jax.jit(partial(model.apply, mutable=["intermediates"]))
    out, state = run({name: variables[name] for name in ("params", "router")}, tokens)
    sums = state["intermediates"]
    (first,), (rest,) = (sums[f"segment_{s}"]["layer_0"]["prefix_sum"] for s in range(2))
    # Blocks start at layers 0 and 2: the embedding, what layers 0 and 1 add, and what layer 2 adds.
    embedding = variables["params"]["embed_tokens"][tokens]
    expected = (embedding + rest[0] + rest[1]) / 3
    np.testing.assert_allclose(out.hidden, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert first.shape == (1, 2, 5, 64) and np.all(np.any(rest[1] != 0, axis=-1))


def test_initial_parameters():
    _, variables = initial()
    layer = variables["params"]["segment_0"]["layer_0"]
    assert np.all(layer["self_attn"]["A_log"] == 0) and np.all(layer["input_layernorm"] == 1)
    (bias,) = jax.tree.leaves(variables["router"])
    assert bias.shape == (2, 12) and not bias.any()
    experts = variables["params"]["segment_1"]["layer_0"]["block_sparse_moe"]["experts"]["w1"]
    assert experts.shape == (2, 12, 64, 32)
    assert not np.array_equal(experts[0], experts[1])  # repeats of one body draw their own
    assert float(jnp.std(experts)) == pytest.approx(TINY.initializer_range, rel=0.05)


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_linear_48b"])
def test_full_size_parameter_count(name):
    cfg = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["model"]
    shapes = jax.eval_shape(K3(cfg).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    counted = jax.tree.leaves(nn.unbox({name: shapes[name] for name in ("params", "router")}))
    assert sum(leaf.size for leaf in counted) == cfg.num_parameters


# ---- packing, padding, caching ---------------------------------------------------------------------

LENGTHS = (5, 17, 2)
IDS = jnp.asarray([np.repeat([1, 2, 3, 0], [*LENGTHS, 3])], jnp.int32)


@pytest.mark.parametrize("kda_impl", ["scan", "chunked"])
def test_packed_documents_are_alone(kda_impl):
    _, variables, apply = tiny(kda_impl=kda_impl)
    tokens = tokens_of(1, 1, 27)
    packed = apply(variables, tokens, segment_ids=IDS)
    starts = np.cumsum((0, *LENGTHS[:-1]))
    # Each on its own from index 0; what follows in the row lies ahead and is not seen.
    rows = [jnp.roll(tokens, -start, axis=1)[:, : max(LENGTHS)] for start in starts]
    alone = tiny()[2](variables, jnp.concatenate(rows))
    for row, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        close(packed.logits[0, start : start + length], alone.logits[row, :length])
    for stats in jax.tree.leaves(packed.router, is_leaf=lambda x: isinstance(x, RouterStats)):
        assert np.all(stats.load.sum(axis=-1) == sum(LENGTHS) * TINY.num_experts_per_token)
        assert np.all(stats.histogram.sum(axis=-1) == sum(LENGTHS))


# In a tile of tokens the gradients of two decays cancel to rounding, not exactly.
@pytest.mark.parametrize("kda_impl, leak", [("scan", 0), ("chunked", 1e-15)])
def test_gradients_stay_in_their_document(kda_impl, leak):
    # Documents of disjoint vocabularies: the embedding's rows tell where a gradient went.
    model, variables, _ = tiny(kda_impl=kda_impl)
    document = np.maximum(np.asarray(IDS[0]) - 1, 0)
    tokens = jnp.asarray([document * 16 + np.random.default_rng(2).integers(16, size=27)], jnp.int32)

    def loss(table):
        params = {**variables["params"], "embed_tokens": table}
        out = model.apply({**variables, "params": params}, tokens, segment_ids=IDS)
        return jnp.sum(jnp.where((IDS == 2)[..., None], out.logits, 0) ** 2)

    gradient = jax.jit(jax.grad(loss))(variables["params"]["embed_tokens"])
    sizes = np.abs(gradient).max(axis=1)
    moved = np.flatnonzero(sizes > leak * sizes.max())
    np.testing.assert_array_equal(moved, np.unique(tokens[IDS == 2]))


def continued(apply, variables, texts, chunks):
    """Logits of texts [B,T] that arrive in chunks; of a row, "." is padding and "x" the next token."""
    cache = init_cache(TINY, len(texts), sum(len(chunk[0]) for chunk in chunks), jnp.float64)
    logits, used = [[] for _ in texts], [0] * len(texts)
    for chunk in chunks:
        mask = np.asarray([[c == "x" for c in row] for row in chunk])
        tokens = np.zeros(mask.shape, np.int32)
        for row, real in enumerate(mask):
            tokens[row, real] = texts[row, used[row] : used[row] + real.sum()]
            used[row] += real.sum()
        out = apply(variables, jnp.asarray(tokens), jnp.asarray(mask), cache=cache)
        cache = out.cache
        for row, real in enumerate(mask):
            logits[row].append(np.asarray(out.logits)[row, real])
    assert used == [texts.shape[1]] * len(texts)
    return np.stack([np.concatenate(row) for row in logits])


@pytest.mark.parametrize(
    "chunks",
    [
        [("xxxxxx", "xxxxxx"), ("x", "x"), ("x", "x"), ("xxxxxx", "xxxxxx")],
        [("..xxxx", "xxxxxx"), ("x", "x"), ("xxxxxx", "xxxxx."), ("xxx...", "..xx..")],
        [("xx....", ".....x"), (".", "x"), ("..xxxx", "xxxxxx"), ("xxxxxx", "xxxxxx"), ("xx....", "......")],
    ],
    ids=["whole", "left", "both"],
)
def test_chunks_give_the_whole(chunks):
    _, variables, apply = tiny()
    texts = tokens_of(3, 2, 14)
    close(continued(apply, variables, texts, chunks), apply(variables, texts).logits)


def test_a_cache_keeps_its_own_dtypes():
    # One program, or one scan, decodes token after token only if they stay.
    model, variables, _ = tiny("float32")
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
        cache = init_cache(TINY, 2, 4, dtype)
        out = jax.eval_shape(model.apply, variables, tokens_of(4, 2, 1), jnp.ones((2, 1), bool), cache=cache)
        assert jax.tree.map(lambda x: x.dtype, out.cache) == jax.tree.map(lambda x: x.dtype, cache)


# ---- scanned layers --------------------------------------------------------------------------------


def test_scanned_segments_are_the_unrolled_layers(monkeypatch):
    variables, tokens = random_variables(DEEP), tokens_of(4, 2, 6)
    assert [segment.repeats for segment in DEEP.segments] == [1, 2, 2, 2]
    run = lambda variables: jax.jit(K3(DEEP, jnp.float64, jnp.float64).apply)(variables, tokens)  # noqa: E731
    scanned = run(variables)

    unrolled = {}
    for name, tree in variables.items():
        unrolled[name] = {key: leaf for key, leaf in tree.items() if not key.startswith("segment_")}
        for i in range(DEEP.num_hidden_layers):
            s, r, j = DEEP.layer_address(i)
            layer = tree.get(f"segment_{s}", {}).get(f"layer_{j}", {})  # a dense layer has no router
            layer = jax.tree.map(lambda x, r=r: x[r : r + 1], layer)
            unrolled[name][f"segment_{i}"] = {"layer_0": layer}
    each_alone = property(lambda self: tuple(Segment((kind,), 1) for kind in self.layers))
    monkeypatch.setattr(ModelConfig, "segments", each_alone)
    out = run(unrolled)
    close(out.logits, scanned.logits)
    assert len(out.router) == 12


# ---- number formats --------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, None], ids=["attention residuals", "plain residuals"])
def test_remat(block_size):
    """The same gradients from no more than one [B,T,D] a layer."""
    cfg = dataclasses.replace(TINY, attn_res_block_size=block_size)
    variables, (B, T) = random_variables(cfg), (2, 12)
    tokens, segment_ids = tokens_of(3, B, T), jnp.asarray([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3])
    weights = jnp.asarray(np.random.default_rng(4).normal(size=(B, T, cfg.hidden_size)))
    weights = jnp.where(segment_ids[..., None] > 0, weights, 0)

    def hidden(params, remat):
        model = K3(cfg, dtype=jnp.float64, param_dtype=jnp.float64, remat=remat)
        return model.apply(variables | {"params": params}, tokens, segment_ids=segment_ids).hidden

    def gradients(remat):
        loss = lambda params: jnp.vdot(weights, hidden(params, remat))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(variables["params"])

    jax.tree.map(close, gradients(True), gradients(False))
    kept = jax.eval_shape(lambda params: jax.vjp(lambda p: hidden(p, True), params)[1], variables["params"])
    known = [leaf.shape for leaf in jax.tree.leaves(variables)]
    wide = sum(leaf.size // (B * T * cfg.hidden_size) for leaf in jax.tree.leaves(kept) if leaf.shape not in known)
    # Beside a running sum for every layer: the finished blocks, at the end, and what the last mixture and head take.
    assert cfg.num_hidden_layers <= wide <= cfg.num_hidden_layers + 2 * cfg.num_attn_res_blocks + 4


def test_a_qat_model_is_its_packed_export_bit_for_bit(tmp_path):
    _, variables, apply = tiny("float32", experts="qat", mxfp8_inputs=True)
    save_hf(tmp_path / "export", TINY, variables)
    packed = load_hf(tmp_path / "export", experts="packed")
    experts = packed["params"]["segment_1"]["layer_0"]["block_sparse_moe"]["experts"]
    assert {leaf.dtype for leaf in jax.tree.leaves(experts)} == {jnp.dtype(jnp.uint8)}
    model = K3(TINY, experts="packed", mxfp8_inputs=True)
    tokens = tokens_of(5, 2, 19)
    exported = jax.jit(model.apply)(packed, tokens).logits
    np.testing.assert_array_equal(exported, apply(variables, tokens).logits)


def floating_dtypes(jaxpr):
    """Every floating dtype that occurs in a jaxpr and the jaxprs inside it."""
    found = set()
    for equation in jaxpr.eqns:
        dtypes = {var.aval.dtype for var in equation.outvars}
        found |= {dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
        for inner in jax.tree.leaves(equation.params):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found |= floating_dtypes(inner)
    return found


@pytest.mark.parametrize("experts", ["dequantized", "qat"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_no_other_precision_creeps_in(dtype, experts):
    model, variables, _ = tiny(dtype, experts=experts, mxfp8_inputs=experts == "qat")
    cache = init_cache(TINY, 2, 20, jnp.dtype(dtype))
    tokens, mask = tokens_of(6, 2, 18), jnp.ones((2, 18), jnp.int32)
    assert floating_dtypes(jax.make_jaxpr(model.apply)(variables, tokens, mask, cache=cache).jaxpr) == {dtype}
    assert floating_dtypes(jax.make_jaxpr(model.apply)(variables, tokens, segment_ids=mask).jaxpr) == {dtype}


def test_bfloat16():
    _, variables, apply = tiny("bfloat16")
    variables, tokens = settled(variables), tokens_of(3, 2, 14)
    out = apply(variables, tokens)
    assert out.logits.dtype == out.hidden.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
    exact = np.asarray(tiny()[2](wide, tokens).logits)
    error = np.asarray(out.logits, np.float64) - exact
    assert 1e-3 < np.linalg.norm(error) / np.linalg.norm(exact) < 5e-2  # some tens of roundings of 2^-9


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"segment_ids": (2, 5), "mask": (2, 5)}, "segment_ids: cannot be combined with mask"),
        ({"segment_ids": (2, 5), "cache": (2, 8)}, "segment_ids: cannot be combined with cache"),
        ({"mask": (2, 4)}, r"mask: found shape \(2, 4\), must be \(2, 5\) like tokens"),
        ({"segment_ids": (5,)}, r"segment_ids: found shape \(5,\), must be \(2, 5\) like tokens"),
        ({"tokens": (5,)}, r"tokens: found shape \(5,\), must be \[B,T\]"),
        ({"cache": (3, 8)}, "cache: found batch 3, must be 2 like tokens"),
        ({"cache": (2, 4)}, "cache: found max_len 4, must hold at least the 5 new tokens"),
    ],
)
def test_inputs_that_do_not_fit(inputs, message):
    model, variables, _ = tiny()
    inputs = {"tokens": (2, 5), **inputs}
    arrays = {name: jnp.ones(shape, jnp.int32) for name, shape in inputs.items() if name != "cache"}
    if "cache" in inputs:
        arrays["cache"] = init_cache(TINY, *inputs["cache"], jnp.float64)
    with pytest.raises(ValueError, match=message) as caught:
        jax.eval_shape(model.apply, variables, **arrays)
    assert "\n" not in str(caught.value)


def test_unknown_settings():
    tokens = jnp.ones((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="experts: found 'mxfp4', must be 'dequantized', 'qat' or 'packed'"):
        jax.eval_shape(K3(TINY, experts="mxfp4").init, jax.random.key(0), tokens)
    with pytest.raises(ValueError, match="impl: found 'fast', must be one of auto, scan, chunked, tokamax"):
        jax.eval_shape(K3(TINY, kda_impl="fast").init, jax.random.key(0), tokens)
