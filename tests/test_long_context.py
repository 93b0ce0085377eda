"""The long prefill with few tokens: what it reports, and that its check of chunk sizes sees a broken cache."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from k3jax.nn import mixers
from k3jax.nn.model import K3, init_variables

LAUNCH = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "long_context.py"))
main = LAUNCH["main"]


def test_report(capsys):
    report = main(tokens=2048, chunk=64)
    assert report["tokens"] == 2048
    assert report["latent_bytes_per_token"] == 4 * (8 + 4)  # float32 latent and shared key of one MLA layer
    assert report["state_bytes"] == 2 * 4 * (64 * 64 + 3 * 3 * 64)  # state and three tails of two KDA layers
    assert len(report["differences"]) == 2 and all(0 < x < 1e-4 for x in report["differences"])
    assert 0 < report["last_tenth"] and 0 < report["first_tenth"]
    assert 50 << 20 < report["peak_rss"] < 16 << 30 and report["working_memory"] > 0
    printed = capsys.readouterr().out
    for name in ("prefilled", "tokens/s", "peak RSS", "MLA latents", "KDA states", "chunk size"):
        assert name in printed


def test_a_step_needs_no_room_beside_the_cache():
    variables = jax.eval_shape(lambda: nn.unbox(init_variables(K3(LAUNCH["MODEL"]), jax.random.key(0))))
    few, many = (LAUNCH["working_memory"](LAUNCH["compile_step"](variables, tokens, 16)) for tokens in (1024, 1 << 20))
    assert 0 < few <= many < few + (1 << 20)  # a copy of the cache would be 50 MiB


def test_what_a_chunk_forgets_is_seen(monkeypatch):
    short_conv = mixers.short_conv

    def without_tail(x, weight, tail, ids):
        return short_conv(x, weight, None if tail is None else jnp.zeros_like(tail), ids)

    monkeypatch.setattr(mixers, "short_conv", without_tail)
    with pytest.raises(ValueError, match="chunk size: moves the result by .* and .*, must stay within 1e-04"):
        main(tokens=256, chunk=64)


@pytest.mark.parametrize("options, message", [
    ({"chunk": 1}, "chunk: found 1, must be 2 or more"),
    ({"chunk": 64, "tokens": 100}, "tokens: found 100, must be a multiple of chunk=64 and at least two chunks"),
    ({"chunk": 64, "tokens": 64}, "tokens: found 64, must be a multiple of chunk=64 and at least two chunks"),
])
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        main(**options)
