"""Kimi-Linear beside Hugging Face Transformers: what it saves is read here, and what is written here it reads.

Run as a program, `python tests/hf/test_peers.py tests/data/transformers`, it writes the fixtures of tests/hf/test_dialects.py.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import k3jax
from k3jax.hf import load_hf, report, save_hf
from k3jax.hf.layouts import Form
from k3jax.hf.synthesize import synthesize
from k3jax.train.convert import export_checkpoint, import_checkpoint

if __name__ != "__main__":
    pytest.importorskip("transformers", "5.24", reason="Transformers is not installed: pip install -e .[peers]")
torch = pytest.importorskip("torch")
from transformers import AutoModelForCausalLM, KimiLinearConfig, KimiLinearForCausalLM  # noqa: E402

PROMPT, NEW = 7, 64
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def draw(seed, dtype, q_lora, dense, tied):
    """A model of random sizes and weights, none of which is a new model's zero or one."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    layers, groups = pick(3, 4, 5), pick(1, 1, 2)
    heads = pick(1, 2, 3)
    kinds = [pick("linear_attention", "linear_attention", "full_attention") for _ in range(layers)]
    kinds[rng.integers(layers)] = "full_attention"
    config = KimiLinearConfig(
        vocab_size=pick(64, 96, 131),
        hidden_size=pick(16, 24, 40),
        intermediate_size=pick(24, 33),
        moe_intermediate_size=pick(8, 12),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        kv_lora_rank=pick(8, 12),
        q_lora_rank=pick(6, 10) if q_lora else None,
        qk_nope_head_dim=pick(8, 10),
        qk_rope_head_dim=pick(4, 6),
        v_head_dim=pick(8, 12),
        num_local_experts=pick(4, 6, 8),
        num_experts_per_tok=2,
        n_group=groups,
        topk_group=pick(*range(1, groups + 1)),
        n_shared_experts=pick(1, 2),
        norm_topk_prob=pick(True, False),
        routed_scaling_factor=pick(1.0, 2.446),
        linear_head_dim=pick(8, 12),
        linear_num_heads=pick(1, 2, 3),
        linear_conv_kernel_dim=pick(2, 3, 4),
        max_position_embeddings=512,
        layer_types=kinds,
        mlp_layer_types=["dense" if i < dense else "sparse" for i in range(layers)],
        tie_word_embeddings=tied,
        rms_norm_eps=pick(1e-5, 1e-6),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=pick(2, [2], [2, 3]),
    )
    torch.manual_seed(seed)
    model = KimiLinearForCausalLM(config)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            x.copy_(values(name, tuple(x.shape), lambda shape: torch.randn(shape).numpy()))
    wide = {name: x.clone() for name, x in model.state_dict().items()}
    model = model.to(TORCH[dtype]).eval()
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in model._keep_in_fp32_modules_strict):  # as its loader does
            x.data = wide[name]
    return model


def values(name, shape, normal):
    """Weights as of a model that has learnt something."""
    x = normal(shape).astype(np.float32)
    if "norm" in name or name.endswith("A_log"):
        return torch.from_numpy(1 + 0.2 * x)
    if "bias" in name:
        return torch.from_numpy(0.3 * x)
    if "embed" in name:
        return torch.from_numpy(x)
    return torch.from_numpy(x * (0.5 if "conv" in name else 0.5 * shape[-1] ** -0.5))


def greedy(model, tokens):
    """Logits of the model in float32 of the tokens with what it adds, greedily and from its cache, and all tokens."""
    model = model.float()
    with torch.no_grad():
        ids = model.generate(
            torch.tensor(tokens), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones(tokens.shape, dtype=torch.long), eos_token_id=None,
        )  # fmt: skip
        return model(ids).logits.numpy(), ids.numpy()


def prompt(vocab_size):
    return np.random.default_rng(3).integers(4, vocab_size, (2, PROMPT))


def compare(cfg, variables, logits, ids, forward):
    """Logits, and that every token is the one that follows greedily."""
    found = np.asarray(forward(variables, jnp.asarray(ids, jnp.int32)))
    error = np.abs(found - logits).max() / np.abs(logits).max()
    assert error <= 1e-5
    np.testing.assert_array_equal(found[:, PROMPT - 1 : -1].argmax(-1), ids[:, PROMPT:])
    return error


def equal_bits(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert x.dtype == other[name].dtype and torch.equal(x.view(torch.uint8), other[name].view(torch.uint8)), name


def random_like(variables, rng):
    """Other weights of the same shapes and types."""
    flat = flatten_dict(variables)
    new = {path: values(path[-1], x.shape, rng.standard_normal).numpy() for path, x in flat.items()}
    return unflatten_dict({path: jnp.asarray(x, flat[path].dtype) for path, x in new.items()})


def both_ways(folder, seed, dtype, q_lora, dense, tied):
    model = draw(seed, dtype, q_lora, dense, tied)
    model.save_pretrained(folder / "theirs")
    assert report(folder / "theirs").problems == {}
    cfg = k3jax.ModelConfig.from_hf(folder / "theirs")
    assert (cfg.first_k_dense_replace, cfg.q_lora_rank is not None) == (dense, q_lora)
    ids = model.config.eos_token_id
    assert cfg.eos_token_id == (tuple(ids) if isinstance(ids, list) else ids)
    forward = jax.jit(lambda variables, tokens: k3jax.K3(cfg).apply(variables, tokens).logits)
    variables = load_hf(folder / "theirs")

    # through Orbax, and back
    import_checkpoint(folder / "theirs", folder / "import")
    export_checkpoint(folder / "import", folder / "back", form=Form("transformers", dtype))
    assert json.loads((folder / "back" / "config.json").read_text())["eos_token_id"] == ids
    assert (folder / "back" / "generation_config.json").read_bytes() == (
        folder / "theirs" / "generation_config.json"
    ).read_bytes()
    back, info = AutoModelForCausalLM.from_pretrained(folder / "back", output_loading_info=True)
    assert not any(info.values()) and back.dtype == TORCH[dtype]
    equal_bits(model, back)
    errors = [compare(cfg, variables, *greedy(model, prompt(cfg.vocab_size)), forward)]

    # weights of our own
    save_hf(folder / "ours", cfg, random_like(variables, np.random.default_rng(seed)), layout="transformers", dtype=dtype)
    model, info = AutoModelForCausalLM.from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(info.values()) and model.dtype == TORCH[dtype]
    # What Transformers keeps in bfloat16 it has rounded; saved, both have the same values.
    model.save_pretrained(folder / "again")
    variables = load_hf(folder / "again")
    errors.append(compare(cfg, variables, *greedy(model, prompt(cfg.vocab_size)), forward))
    return errors


CASES = [
    (seed, dtype, (seed // 2) % 2 == 1, seed % 3, seed % 4 == 3)
    for seed, dtype in ((seed, ("float32", "bfloat16")[seed % 2]) for seed in range(20))
]


@pytest.mark.parametrize("seed, dtype, q_lora, dense, tied", CASES[:3])
def test_both_ways(tmp_path, seed, dtype, q_lora, dense, tied):
    both_ways(tmp_path, seed, dtype, q_lora, dense, tied)


@pytest.mark.slow
@pytest.mark.parametrize("seed, dtype, q_lora, dense, tied", CASES[3:])
def test_both_ways_of_more_sizes(tmp_path, seed, dtype, q_lora, dense, tied):
    """With those above, five of each type, with and without a query latent, of 0, 1 and 2 dense layers, and tied."""
    both_ways(tmp_path, seed, dtype, q_lora, dense, tied)


def test_a_shared_embedding_is_written_as_a_head_too(tmp_path, tiny_linear):
    """Transformers gives Kimi-Linear a head of its own, whatever its configuration says."""
    cfg = dataclasses.replace(tiny_linear, tie_word_embeddings=True)
    synthesize(cfg, tmp_path / "released")
    variables = random_like(load_hf(tmp_path / "released"), np.random.default_rng(1))
    save_hf(tmp_path / "ours", cfg, variables, layout="transformers", dtype="float32")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()) and torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    forward = jax.jit(lambda variables, tokens: k3jax.K3(cfg).apply(variables, tokens).logits)
    compare(cfg, variables, *greedy(model, prompt(cfg.vocab_size)), forward)
    assert not k3jax.ModelConfig.from_hf(tmp_path / "ours").tie_word_embeddings and report(tmp_path / "ours").problems == {}


def test_quantised_experts_are_written_as_values(tmp_path, tiny_linear):
    cfg = dataclasses.replace(tiny_linear, quantized_experts=True, moe_intermediate_size=32, hidden_size=32)
    synthesize(cfg, tmp_path / "packed")
    import_checkpoint(tmp_path / "packed", tmp_path / "import", experts="packed")
    with pytest.raises(ValueError, match="Transformers lacks packed MXFP4 experts .*experts='bf16'"):
        export_checkpoint(tmp_path / "import", tmp_path / "out", form=Form("transformers", "float32"))
    export_checkpoint(tmp_path / "import", tmp_path / "out", form=Form("transformers", "float32", "bf16"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    forward = jax.jit(lambda variables, tokens: k3jax.K3(cfg).apply(variables, tokens).logits)
    compare(cfg, load_hf(tmp_path / "packed"), *greedy(model, prompt(cfg.vocab_size)), forward)


def test_what_transformers_saves_of_a_released_folder(tmp_path):
    """Its keys beside the released ones."""
    released = Path(__file__).parents[1] / "data" / "kimi_linear_tiny"
    model = AutoModelForCausalLM.from_pretrained(released)
    model.save_pretrained(tmp_path)
    cfg = k3jax.ModelConfig.from_hf(tmp_path)
    assert cfg == k3jax.ModelConfig.from_hf(released) and report(tmp_path).problems == {}
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path, cfg), rounded(load_hf(released, cfg)))


def rounded(variables):
    """As Transformers keeps a bfloat16 model: only a router's parameters and biases of the decay in float32."""
    flat = flatten_dict(variables)
    wide = ("gate", "dt_bias", "e_score_correction_bias")
    return unflatten_dict(
        {path: x if path[-1] in wide else x.astype(jnp.bfloat16).astype(x.dtype) for path, x in flat.items()}
    )


def write_fixture(folder, seed, dtype, q_lora, dense, tied):
    model = draw(seed, dtype, q_lora, dense, tied)
    model.save_pretrained(folder, max_shard_size="50KB" if dtype == "bfloat16" else "1MB")  # with an index, and without
    logits, ids = greedy(model, prompt(model.config.vocab_size))
    np.savez_compressed(folder / "golden.npz", logits=logits[:, -8:], ids=ids, prompt=PROMPT)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    for name, case in (("float32", (31, "float32", False, 1, False)), ("bfloat16", (33, "bfloat16", True, 2, True))):
        write_fixture(Path(sys.argv[1]) / name, *case)
