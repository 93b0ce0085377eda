"""Generation against the model itself, and the sampler against hand-made distributions."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k3jax
from k3jax.config import VisionConfig
from k3jax.nn.model import init_variables
from k3jax.serve.generate import generate_text, generate_tokens, make_advance
from k3jax.serve.sampler import sample
from k3jax.text import ByteTokenizer
from k3jax.train.pairs import encode_pair
from k3jax.vision import prepare, preprocess


@pytest.fixture(scope="module")
def model(tiny):
    model = k3jax.K3(tiny)
    variables = nn.unbox(init_variables(model, jax.random.key(1)))
    # Spread the logits, so that a wrong cache or mask would change the likeliest token.
    variables["params"]["lm_head"] = 30 * variables["params"]["lm_head"]
    return model, variables


def test_greedy_is_the_likeliest_token_of_the_whole_text_each_time(model):
    model, variables = model
    prompt = ByteTokenizer.encode("hello, world")
    found = list(generate_tokens(model, variables, prompt, 6, temperature=0.0))
    text, mask = np.zeros((1, 18), np.int32), np.zeros((1, 18), np.int32)
    text[0, :12], mask[0, :12] = prompt, 1
    logits = jax.jit(lambda tokens, mask: model.apply(variables, tokens, mask).logits)
    for i in range(6):
        text[0, 12 + i] = int(np.argmax(logits(jnp.asarray(text), jnp.asarray(mask))[0, 11 + i]))
        mask[0, 12 + i] = 1
    assert found == text[0, 12:].tolist()
    end = next(i for i, token in enumerate(found) if i and token not in found[:i])
    ending = k3jax.K3(dataclasses.replace(model.cfg, eos_token_id=(300, found[end])))
    assert list(generate_tokens(ending, variables, prompt, 6, temperature=0.0)) == found[: end + 1]


def test_generation_depends_on_the_seed_alone(model):
    model, variables = model
    prompt = ByteTokenizer.encode("a")
    first, again, other = (
        list(generate_tokens(model, variables, prompt, 8, temperature=2.0, seed=seed)) for seed in (0, 0, 1)
    )
    assert first == again != other


def test_prompts_are_checked(model):
    model, variables = model
    with pytest.raises(ValueError, match="prompt: found no tokens"):
        next(generate_tokens(model, variables, np.array([], np.int32), 4))
    with pytest.raises(ValueError, match=r"token id 256 at position \[1\] is outside the vocabulary of 256"):
        next(generate_tokens(model, variables, np.array([1, 256]), 4))


def test_only_the_tokenizers_ids_are_drawn():
    """Of a model with more: here its likeliest token is one of the others."""
    logits = jnp.arange(12.0).reshape(1, 1, 12)
    model = SimpleNamespace(apply=lambda *_, cache, **__: SimpleNamespace(logits=logits, cache=cache + 1))
    ones = jnp.ones((1, 1), jnp.int32)
    for ids, likeliest in ((None, 11), (7, 6)):
        advance = make_advance(model, 0.0, ids=ids)
        token, cache = advance({}, ones, ones, jnp.zeros(1), jax.random.key(0))
        assert token.tolist() == [likeliest] and cache.tolist() == [1.0]
        hot = make_advance(model, 1e9, ids=ids)
        drawn = [int(hot({}, ones, ones, jnp.zeros(1), jax.random.key(n))[0][0]) for n in range(9)]
        assert max(drawn) <= likeliest


# ---- images ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tiny):
    vision = VisionConfig(4, 6, 5, 4, 2, 1, 32, 64, 32, 32, 32, media_placeholder_token_id=255)
    model = k3jax.K3(dataclasses.replace(tiny, vision=vision))
    variables = nn.unbox(jax.jit(lambda: init_variables(model, jax.random.key(1)))())
    variables["params"]["lm_head"] = 30 * variables["params"]["lm_head"]
    return model, variables


def picture(seed, width=16, height=8):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_an_image_and_a_clip_are_seen_where_they_stand(seeing):
    model, variables = seeing
    images = [preprocess(x, model.cfg.vision) for x in (picture(0), [picture(1), picture(2)])]
    prompt = encode_pair("a<image>b<image>c", 2, model.cfg.vision)
    found = list(generate_tokens(model, variables, prompt, 4, temperature=0.0, images=images))
    patches, grids = np.concatenate([x.values for x in images]), np.array([x.grid for x in images])
    # What was found so far decides each next token; two tokens stand in place of each placeholder.
    text, _, _, packed = prepare(model.cfg, np.append(prompt, found)[None], patches, grids)
    logits = jax.jit(lambda text, packed: model.apply(variables, text, pixel_values=packed).logits)(text, packed)
    assert logits.shape[1] == len(prompt) + 2 + 4
    assert np.argmax(logits[0, len(prompt) + 1 : -1], axis=-1).tolist() == found


def test_images_and_placeholders_must_agree(seeing, model):
    cfg = seeing[0].cfg.vision
    image = preprocess(picture(0), cfg)
    for prompt, images in (([97], [image]), ([97, 255], []), ([255, 255], [image])):
        with pytest.raises(ValueError, match=f"found {prompt.count(255)} image placeholders .*, must be {len(images)}"):
            next(generate_tokens(*seeing, np.array(prompt), 4, images=images))
    with pytest.raises(ValueError, match="images: found 1, must be none: this model has no vision"):
        next(generate_tokens(*model, np.array([97]), 4, images=[image]))


def test_text_needs_a_tokenizer_or_a_byte_model():
    folder = __file__.rsplit("serve", 1)[0] + "data/k3_tiny"
    with pytest.raises(ValueError, match="found neither tiktoken.model nor tokenizer.json, must hold one: the model has vocab_size=128"):
        next(generate_text(folder, "x"))


def test_sampler_keeps_to_top_k_and_top_p():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]] * 2000))

    def drawn(**limits):
        tokens = np.asarray(sample(logits, jax.random.key(0), 1.0, **limits))
        return np.bincount(tokens, minlength=4) / 2000

    np.testing.assert_allclose(drawn(), [0.5, 0.3, 0.15, 0.05], atol=0.04)
    np.testing.assert_allclose(drawn(top_k=2), [0.625, 0.375, 0, 0], atol=0.04)
    np.testing.assert_allclose(drawn(top_p=0.6), [0.625, 0.375, 0, 0], atol=0.04)  # the set first to hold 0.6
    np.testing.assert_array_equal(drawn(top_p=0.4), [1, 0, 0, 0])
    cold = np.asarray(sample(logits, jax.random.key(0), 0.25))
    assert abs(np.mean(cold == 0) - 0.5**4 / (0.5**4 + 0.3**4 + 0.15**4 + 0.05**4)) < 0.04
    assert np.all(np.asarray(sample(logits, jax.random.key(0), 0.0)) == 0)


def drawn(logits, rows=500, **settings):
    """The tokens that are ever drawn of one row's logits."""
    many = jnp.repeat(jnp.asarray(logits)[None], rows, axis=0)
    return np.unique(sample(many, jax.random.key(0), **{"temperature": 1.0, **settings})).tolist()


def test_equal_logits_are_cut_by_rank():
    assert drawn([0.0] * 5, top_k=2) == [0, 1]
    assert drawn([0.0, 2.0, 2.0, 1.0, 2.0], top_k=2) == [1, 2]
    assert drawn([0.0] * 5, top_p=0.4) == [0, 1]
    assert drawn([0.0] * 5, top_p=1e-60) == [0]  # zero in float32
    assert drawn([0.0] * 5, top_k=9) == [0, 1, 2, 3, 4]
    assert drawn([-0.0, 0.0, 0.0], top_k=1) == [0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_one_candidate_is_greedy(dtype):
    logits = jax.random.normal(jax.random.key(1), (2000, 200)).astype(dtype)
    greedy = sample(logits, jax.random.key(0), 0.0)
    np.testing.assert_array_equal(greedy, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(sample(logits, jax.random.key(0), 1.0, top_k=1), greedy)
    ordered = jnp.sort(logits, axis=-1)
    if dtype == "bfloat16":
        assert np.mean(ordered[:, -1] == ordered[:, -2]) > 0.005  # there are ties


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-45, 5e-324])
def test_the_coldest_take_the_likeliest(temperature):
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = jnp.asarray([[1.0, 3.0, 2.0], [-1e38, -3e38, -2e38]], dtype)
        for limits in ({}, {"top_k": 2}, {"top_p": 0.9}):
            assert sample(logits, jax.random.key(0), temperature, **limits).tolist() == [1, 0]


def test_the_hottest_take_any():
    assert drawn([1.0, 3.0, 2.0], temperature=1e300) == [0, 1, 2]
    assert drawn([1.0, -np.inf, 2.0], temperature=1e300) == [0, 2]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -1.0}, "temperature: found -1.0, must be 0 or more, and finite"),
        ({"temperature": float("nan")}, "temperature: found nan, must be 0 or more"),
        ({"temperature": float("inf")}, "temperature: found inf, must be 0 or more"),
        ({"temperature": "1"}, "temperature: found '1', must be 0 or more"),
        ({"top_k": -1}, "top_k: found -1, must be 0 or more, and whole"),
        ({"top_k": 1.5}, "top_k: found 1.5, must be 0 or more, and whole"),
        ({"top_p": 0}, "top_p: found 0, must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p: found 1.1, must be above 0"),
        ({"top_p": float("nan")}, "top_p: found nan, must be above 0"),
    ],
)
def test_settings_of_the_sampler(model, settings, message):
    settings = {"temperature": 1.0, **settings}
    for run in (
        partial(sample, jnp.zeros((1, 3)), jax.random.key(0)),
        lambda **x: next(generate_tokens(*model, np.array([97]), 4, **x)),
        lambda **x: next(generate_text("no such folder", "a", **x)),  # before anything is read
    ):
        with pytest.raises(ValueError) as error:
            run(**settings)
        assert str(error.value).startswith(message)


def test_logits_that_are_no_numbers_give_no_token(model):
    nan, inf = float("nan"), float("inf")
    logits = jnp.asarray([[nan, 1.0], [1.0, inf], [-inf, -inf], [-inf, 1.0]])
    for settings in ({"temperature": 0.0}, {}, {"top_k": 1}, {"top_p": 0.5}):
        assert sample(logits, jax.random.key(0), **{"temperature": 1.0, **settings}).tolist() == [-1, -1, -1, 1]
    net, variables = model
    broken = variables | {"params": variables["params"] | {"norm": jnp.full_like(variables["params"]["norm"], nan)}}
    with pytest.raises(ValueError, match="logits: found NaN or infinite ones for token 0"):
        next(generate_tokens(net, broken, np.array([97]), 4))


def test_no_more_tokens_than_the_model_has_positions(model):
    k3, variables = model
    short = k3.clone(cfg=dataclasses.replace(k3.cfg, max_position_embeddings=40))
    says = "max_tokens=36: found 5 tokens in the prompt, must be at most max_position_embeddings=40 together"
    with pytest.raises(ValueError, match=says):
        next(generate_tokens(short, variables, np.arange(5), 36))
