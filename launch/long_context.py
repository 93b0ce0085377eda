"""Prefills 1,048,576 tokens through a small KDA + MLA + KDA model, chunk by chunk, in bounded memory.

`bash launch/long_context.sh [--tokens N] [--chunk N]` runs it: some 13 minutes of CPU time, nearly all of it the
5.5e11 scores of the one attention head.
"""

import sys
import time
from functools import cache, partial

import numpy as np
import tyro
from tqdm import tqdm

from k3jax import runtime
from k3jax.config import ModelConfig

MODEL = ModelConfig(
    model_type="kimi_k3",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    first_k_dense_replace=3,
    num_attention_heads=1,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    mla_use_output_gate=True,
    kda_layers=(1, 3),
    full_attn_layers=(2,),
    kda_head_dim=64,
    kda_num_heads=1,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=2,  # of no use: all three layers are dense
    num_experts_per_token=1,
    num_shared_experts=1,
    moe_intermediate_size=32,
    hidden_act="situ",
    attn_res_block_size=2,
    initializer_range=0.125,  # hidden_size^-0.5: every part has a say in the logits
)
LATENT_BYTES = 4 * (MODEL.kv_lora_rank + MODEL.qk_rope_head_dim)  # a token, in float32
BOUND = 1e-4  # on relative differences; rounding gives some 1e-5, a forgotten state about 1


def main(tokens: int = 1 << 20, chunk: int = 4096) -> dict:
    """Prefills random tokens and prints speed, memory, and how far another chunk size moves the result.

    Args:
        tokens: tokens to prefill, a multiple of chunk and at least two chunks.
        chunk: tokens a step.

    Returns:
        What it prints, as numbers: sizes in bytes, times in seconds.

    Raises:
        ValueError: an option that does not fit, a cache of another size than it should have, or a result that depends
            on the chunk size by more than rounding.
    """
    if chunk < 2:
        raise ValueError(f"chunk: found {chunk}, must be 2 or more")
    if tokens < 2 * chunk or tokens % chunk:
        raise ValueError(f"tokens: found {tokens}, must be a multiple of chunk={chunk} and at least two chunks")
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    from k3jax.cache import init_cache
    from k3jax.nn.model import K3, init_variables

    variables = jax.jit(lambda key: nn.unbox(init_variables(K3(MODEL), key)))(jax.random.key(0))
    text = np.random.default_rng(0).integers(MODEL.vocab_size, size=(1, tokens), dtype=np.int32)
    empty = partial(init_cache, MODEL, 1, tokens)
    step = cache(partial(compile_step, variables, tokens))

    def prefill(cache, start, end, chunk, watch=lambda tokens: None):
        """(logits of the last token, cache) after text[start:end]; `watch` hears of every chunk."""
        for at in range(start, end, chunk):
            piece = text[:, at : min(at + chunk, end)]
            logits, cache = jax.block_until_ready(step(piece.shape[1])(variables, cache, piece))
            watch(piece.shape[1])
        return logits, cache

    # An odd chunk size cuts KDA's tiles, MLA's blocks and the convolutions' windows at other places each time.
    odd, few = chunk // 3 | 1, chunk * min(4, tokens // chunk - 1)
    first = relative_difference(prefill(empty(), 0, few, chunk), prefill(empty(), 0, few, odd))

    times = [time.monotonic()]
    with tqdm(total=tokens, unit="token", unit_scale=True, disable=None) as bar:

        def watch(tokens):
            times.append(time.monotonic())
            bar.update(tokens)

        _, filled = prefill(empty(), 0, tokens - few, chunk, watch)
        held = runtime.peak_memory()
        before = jax.tree.map(jnp.copy, filled)
        logits, filled = prefill(filled, tokens - few, tokens, chunk, watch)
    last = relative_difference((logits, filled), prefill(before, tokens - few, tokens, odd))

    latents = states = 0
    for path, x in jax.tree_util.tree_leaves_with_path(filled.layers):
        if path[-1].key in ("latent", "k_rope"):
            latents += x.nbytes
        else:
            states += x.nbytes
    tenth = max(1, tokens // chunk // 10)
    report = {
        "tokens": int(filled.length),
        "seconds": times[-1] - times[0],
        "tokens_per_second": tokens / (times[-1] - times[0]),
        "first_tenth": tenth * chunk / (times[tenth] - times[0]),
        "last_tenth": tenth * chunk / (times[-1] - times[-1 - tenth]),
        "peak_rss": held,
        "working_memory": working_memory(step(chunk)),
        "latent_bytes_per_token": latents / int(filled.length),
        "state_bytes": states,
        "differences": (first, last),
    }
    mib = 1 << 20
    rows = [
        ("prefilled", f"{report['tokens']:,} tokens in {report['seconds']:.0f} s, {chunk:,} at a time"),
        ("tokens/s", "{tokens_per_second:,.0f}; first tenth {first_tenth:,.0f}, last tenth {last_tenth:,.0f}".format(**report)),
        ("peak RSS", f"{held / mib:.0f} MiB; a step works in {report['working_memory'] / mib:.1f} MiB beside the cache"),
        ("MLA latents", f"{report['latent_bytes_per_token']:g} bytes a token (expected {LATENT_BYTES}), {latents / mib:.1f} MiB"),
        ("KDA states", f"{states:,} bytes at any length"),
        ("chunk size", f"{odd:,} in place of {chunk:,} moves the result by {first:.1e} over the first {few:,}"
                       f" tokens, by {last:.1e} over the last; bound {BOUND:.0e}"),
    ]
    for name, value in rows:
        print(f"  {name:<14} {value}")
    if report["latent_bytes_per_token"] != LATENT_BYTES:
        raise ValueError(f"latents: found {report['latent_bytes_per_token']:g} bytes a token, must be {LATENT_BYTES}")
    if not (first <= BOUND and last <= BOUND):
        raise ValueError(f"chunk size: moves the result by {first:.1e} and {last:.1e}, must stay within {BOUND:.0e}")
    return report


def compile_step(variables, tokens: int, length: int):
    """The program that takes variables, a cache for `tokens` tokens, which it writes in place, and `length` new tokens.

    It gives the last token's logits and the cache.
    """
    import jax
    import jax.numpy as jnp

    from k3jax.cache import init_cache
    from k3jax.nn.model import K3

    @partial(jax.jit, donate_argnums=1)
    def advance(variables, cache, tokens):
        out = K3(MODEL).apply(variables, tokens, cache=cache)
        return out.logits[:, -1], out.cache

    shapes = jax.eval_shape(partial(init_cache, MODEL, 1, tokens)), jax.ShapeDtypeStruct((1, length), jnp.int32)
    return advance.lower(variables, *shapes).compile()


def working_memory(step) -> int:
    """Bytes a compiled step takes beside what it is given: its intermediate values and what it does not write in place."""
    sizes = step.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes


def relative_difference(a, b) -> float:
    """Largest difference over largest value of two trees' arrays: that of the arrays that differ most."""
    import jax

    def relative(x, y):
        x, y = np.asarray(x), np.asarray(y)
        return np.max(np.abs(x - y)) / np.max(np.abs(x))

    return float(np.max(jax.tree.leaves(jax.tree.map(relative, a, b))))  # NaN if any is


if __name__ == "__main__":
    try:
        runtime.setup()
        tyro.cli(main)
    except ValueError as error:
        sys.exit(f"error: {error}")
