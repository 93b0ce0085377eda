"""Text from a prompt, one token at a time through the cache."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from k3jax.cache import Cache, init_cache
from k3jax.config import ModelConfig
from k3jax.hf import load_hf
from k3jax.nn.model import K3
from k3jax.paths import expand
from k3jax.runtime import compiler_options
from k3jax.serve import sampling
from k3jax.serve.sampler import sample
from k3jax.text import ByteTokenizer, Tokenizer, load_tokenizer
from k3jax.tokens import check_tokens
from k3jax.train.checkpoint import open_model
from k3jax.train.folder import was_of_bytes
from k3jax.train.loop import restore_weights
from k3jax.train.pairs import encode_pair
from k3jax.vision.batch import bucket, pack, widen
from k3jax.vision.image import Patches, preprocess

PROMPT_UNIT = 32  # prompts are padded to a `bucket` of this, so that few lengths are compiled


def load_model(
    checkpoint: str | Path, experts: str = "packed", mxfp8_inputs: bool = True
) -> tuple[K3, dict]:
    """(model, variables) of a released checkpoint, or of a run's, which keeps its high-precision weights.

    Raises:
        ValueError: neither kind of checkpoint, or one without packed experts asked for `experts="packed"`.
    """
    checkpoint = expand(checkpoint)
    if (Path(checkpoint) / "config.json").is_file():
        variables = load_hf(checkpoint, experts=experts)
        return K3(ModelConfig.from_hf(checkpoint), experts=experts, mxfp8_inputs=mxfp8_inputs), variables
    cfg, variables, meta = restore_weights(checkpoint)
    if meta["kind"] == "weights":  # an import, with its experts as they were imported
        return K3(cfg, experts=meta.get("experts", "dequantized"), mxfp8_inputs=mxfp8_inputs), variables
    # A run's weights are not packed; used as they were trained they give what their export gives packed.
    qat = meta.get("train", {}).get("qat", False)
    return K3(cfg, experts="qat" if qat else "dequantized", mxfp8_inputs=qat and mxfp8_inputs), variables


def load_text(checkpoint: str | Path) -> tuple[ModelConfig, Tokenizer, Path]:
    """(model, tokenizer, folder with its files) of what `load_model` takes, without its weights; `stop_ids` are those of both.

    Raises:
        ValueError: no checkpoint, a tokenizer that cannot be read or has more ids than the model, or none for a model whose
            tokens are not bytes.
    """
    folder, meta = Path(expand(checkpoint)), None
    if (folder / "config.json").is_file():
        cfg = ModelConfig.from_hf(folder)
    else:
        checkpoints, _, cfg, meta = open_model(folder)
        folder = checkpoints.folder.parent
    of_bytes = meta is not None and was_of_bytes(meta)
    tokenizer = ByteTokenizer() if of_bytes else load_tokenizer(folder, cfg.vocab_size)
    tokenizer.stop_ids |= cfg.stop_ids
    return cfg, tokenizer, folder


def make_advance(
    model: K3, temperature: float, top_k: int = 0, top_p: float = 1.0, cache_shardings=None, ids: int | None = None
):
    """The jitted step of prefill and decoding: (variables, tokens [B,T], mask [B,T], cache, key, images=None) -> (next
    tokens [B], cache), the cache donated. With `ids` only ids below it are drawn."""

    @partial(jax.jit, donate_argnums=3, out_shardings=(None, cache_shardings), compiler_options=compiler_options())
    def advance(variables, tokens, mask, cache, key, images=None) -> tuple[Array, Cache]:
        out = model.apply(variables, tokens, mask, cache=cache, pixel_values=images)
        return sample(out.logits[:, -1, :ids], key, temperature, top_k, top_p), out.cache

    return advance


_advance = lru_cache(maxsize=16)(make_advance)  # what has been compiled for one prompt serves the next


def fit_prompt(cfg: ModelConfig, prompt: np.ndarray, grids: Sequence[tuple[int, int, int]] = ()) -> np.ndarray:
    """`prompt` [T] int with each placeholder as often as its image, of which `grids` has one each, has tokens.

    Raises:
        ValueError: no prompt, a token outside the vocabulary, images that do not fit its placeholders, or any where the model
            has no vision.
    """
    if prompt.size == 0:
        raise ValueError("prompt: found no tokens, must hold at least one")
    check_tokens(prompt, cfg.vocab_size)
    if cfg.vision:
        return widen(cfg.vision, prompt[None], grids)[0][0]
    if grids:
        raise ValueError(f"images: found {len(grids)}, must be none: this model has no vision")
    return prompt


def check_room(cfg: ModelConfig, tokens: int, max_tokens: int) -> None:
    """Raises ValueError where the model has not the positions for `max_tokens` behind a prompt of `tokens`."""
    if tokens + max_tokens > cfg.max_position_embeddings:
        raise ValueError(
            f"max_tokens={max_tokens}: found {tokens} tokens in the prompt, must be at most "
            f"max_position_embeddings={cfg.max_position_embeddings} together"
        )


def generate_tokens(
    model: K3,
    variables: dict,
    prompt: np.ndarray,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    images: Sequence[Patches] = (),
    stop_ids: Container[int] | None = None,
    ids: int | None = None,
) -> Iterator[int]:
    """Yields up to `max_tokens` token ids that continue `prompt` [T] int; one of `stop_ids` is the last of them.

    Args:
        images: those of the prompt's placeholders, in their order.
        stop_ids: by default the model's end tokens.
        ids: only ids below it are drawn: a model may have more than its tokenizer has tokens.

    Raises:
        ValueError: no prompt, a token outside the vocabulary, a setting of the sampler out of its range, images that do
            not fit, or logits that are no numbers.

    Example:
        >>> list(generate_tokens(model, variables, ByteTokenizer.encode("def "), 5, temperature=0.0))
        [115, 101, 108, 102, 44]
    """
    cfg = model.cfg
    sampling.check(temperature, top_k, top_p)
    prompt = fit_prompt(cfg, prompt, [image.grid for image in images])
    check_room(cfg, prompt.size, max_tokens)
    packed = pack(cfg.vision, [images]) if images else None
    pad = bucket(prompt.size, PROMPT_UNIT) - prompt.size
    tokens = jnp.asarray(np.pad(prompt.astype(np.int32), (pad, 0), constant_values=-1))[None]
    mask = jnp.asarray(np.arange(tokens.shape[1]) >= pad, jnp.int32)[None]

    advance = _advance(model, float(temperature), int(top_k), float(top_p), ids=ids)
    stop_ids = cfg.stop_ids if stop_ids is None else stop_ids
    cache = init_cache(cfg, 1, tokens.shape[1] + max_tokens, model.dtype)
    one = jnp.ones((1, 1), jnp.int32)
    for n, key in enumerate(jax.random.split(jax.random.key(seed), max_tokens)):
        drawn, cache = advance(variables, tokens, mask, cache, key, packed)
        token = int(drawn[0])
        if token < 0:
            raise ValueError(f"logits: found NaN or infinite ones for token {n}: weights hold such values, or overflow")
        yield token
        if token in stop_ids:
            return
        tokens, mask, packed = drawn[:, None], one, None


def generate_text(
    checkpoint: str | Path,
    prompt: str,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    experts: str = "packed",
    mxfp8_inputs: bool = True,
    images: Sequence = (),
) -> Generator[str, None, str | None]:
    """Yields pieces of text that continue `prompt`, and returns which token ended it ("name (id)"), None for `max_tokens`.

    `images`: what `k3jax.vision.preprocess` takes; each stands where the prompt says `<image>`, or all before it. What is
    wrong with any of these is a ValueError, one line, before the weights are read.
    """
    sampling.check(temperature, top_k, top_p)
    cfg, tokenizer, _ = load_text(checkpoint)
    if images and cfg.vision is None:
        raise ValueError(f"{checkpoint}: found {len(images)} images, must be none: this model has no vision")
    patches = [preprocess(image, cfg.vision) for image in images]
    ids = encode_pair(prompt, len(images), cfg.vision, tokenizer) if cfg.vision else tokenizer.encode(prompt)
    check_room(cfg, fit_prompt(cfg, ids, [image.grid for image in patches]).size, max_tokens)
    model, variables = load_model(checkpoint, experts, mxfp8_inputs)
    drawn = temperature, top_k, top_p, seed, patches, tokenizer.stop_ids, tokenizer.vocab_size
    stream, ended = tokenizer.stream(), None
    for token in generate_tokens(model, variables, ids, max_tokens, *drawn):
        if token in tokenizer.stop_ids:
            ended = tokenizer.describe(token)
        elif piece := stream.push(token):
            yield piece
    if piece := stream.finish():
        yield piece
    return ended
