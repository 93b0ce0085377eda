"""Folders of other programs: what they call things, and what lies in them that is not of the checkpoint."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import k3jax
from k3jax import cli
from k3jax.hf import CheckpointError, load_hf, report, save_hf
from k3jax.hf.files import INDEX, open_checkpoint
from k3jax.hf.layouts import Form
from k3jax.hf.statistics import tensor_report
from k3jax.hf.synthesize import synthesize
from k3jax.text import load_tokenizer
from k3jax.train.convert import export_checkpoint, import_checkpoint

DATA = Path(__file__).parents[1] / "data"
SAVED = DATA / "transformers"  # by it; tests/hf/test_peers.py writes them


def raw(name="float32"):
    return json.loads((SAVED / name / "config.json").read_text())


# ---- Transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_logits_and_greedy_tokens_of_what_transformers_saved(name):
    cfg = k3jax.ModelConfig.from_hf(SAVED / name)
    assert report(SAVED / name).problems == {} and cfg.stop_ids == {2, 3}
    golden = np.load(SAVED / name / "golden.npz")
    ids, logits, prompt = golden["ids"], golden["logits"], int(golden["prompt"])
    found = np.asarray(jax.jit(k3jax.K3(cfg).apply)(load_hf(SAVED / name), jnp.asarray(ids, jnp.int32)).logits)
    np.testing.assert_array_equal(found[:, prompt - 1 : -1].argmax(-1), ids[:, prompt:])
    assert np.abs(found[:, -logits.shape[1] :] - logits).max() <= 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_import_and_export_give_the_folder_back(tmp_path, name):
    import_checkpoint(SAVED / name, tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out", form=Form("transformers", name))
    before, after = (
        {key: value for shard in sorted(folder.glob("*.safetensors")) for key, value in load_file(shard).items()}
        for folder in (SAVED / name, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for key, x in before.items():  # float32 where the release has it: of the same values
        assert x.dtype == after[key].dtype or after[key].dtype == np.float32
        np.testing.assert_array_equal(x.astype(np.float32), after[key].astype(np.float32), strict=True)
    says, said = json.loads((tmp_path / "out" / "config.json").read_text()), raw(name)
    effectless = {"output_router_logits", "pretraining_tp", "transformers_version", "tie_word_embeddings"}
    assert {key: said[key] for key in said.keys() - effectless} == {key: says[key] for key in says.keys() - effectless}
    for file in ("generation_config.json",):
        assert (tmp_path / "out" / file).read_bytes() == (SAVED / name / file).read_bytes()


def test_weights_in_float32_are_not_rounded():
    """Not in bfloat16 either, nor those in bfloat16 that a model needs in float32."""
    wide = load_hf(SAVED / "float32", param_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}
    mixed = flatten_dict(load_hf(SAVED / "bfloat16", param_dtype=jnp.bfloat16))
    kept = {path[-1] for path, x in mixed.items() if x.dtype == jnp.float32}
    assert kept == {
        "A_log", "dt_bias", "o_norm", "q_conv1d", "k_conv1d", "v_conv1d", "gate", "e_score_correction_bias",
    }  # fmt: skip


def test_a_tensor_is_found_by_either_name():
    one, other = (f"model.layers.0.{part}.up_proj.weight" for part in ("block_sparse_moe", "mlp"))
    assert one in json.loads((SAVED / "bfloat16" / INDEX).read_text())["weight_map"]
    assert tensor_report(SAVED / "bfloat16", one) == tensor_report(SAVED / "bfloat16", other)


def test_a_stack_of_two_types_is_refused(tmp_path):
    shutil.copytree(SAVED / "float32", tmp_path / "mixed")
    file = tmp_path / "mixed" / "model.safetensors"
    name = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    edit(file, lambda x: {name: x[name].astype(ml_dtypes.bfloat16)})
    with pytest.raises(CheckpointError, match=f"1 problem: {name}: found BF16 .*, expected F32"):
        load_hf(tmp_path / "mixed")


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"norm_topk_prob": False, "moe_renormalize": None}, {"moe_renormalize": False}),
        ({"n_group": 2, "num_expert_group": None, "topk_group": 2}, {"num_expert_group": 2}),
        ({"num_local_experts": 8, "num_experts": None}, {"num_experts": 8}),
        ({"n_routed_experts": 8, "num_experts": None}, {"num_experts": 8}),
        ({"num_experts_per_tok": 2, "num_experts_per_token": None}, {"num_experts_per_token": 2}),
        ({"n_shared_experts": 3, "num_shared_experts": None}, {"num_shared_experts": 3}),
        ({"max_position_embeddings": 77, "model_max_length": 99}, {"max_position_embeddings": 77}),
        ({"model_max_length": 99}, {"max_position_embeddings": 99}),
        ({"mlp_layer_types": ["dense"] * 4}, {"first_k_dense_replace": 4, "moe_layer_freq": 1}),
        ({"mlp_layer_types": ["sparse"] * 4}, {"first_k_dense_replace": 0, "moe_layer_freq": 1}),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, {"first_k_dense_replace": 0, "moe_layer_freq": 2}),
        ({"layer_types": ["full_attention"] * 4}, {"kda_layers": (), "full_attn_layers": (1, 2, 3, 4)}),
        (
            {
                "attention_dropout": 0, "mlp_bias": False, "router_aux_loss_coef": 0.001, "use_cache": False,
                "_attn_implementation": "sdpa", "_anything": 1, "attn_implementation": None, "rope_parameters": {"rope_theta": 1.0},
            },
            {},
        ),
        ({"eos_token_id": [5]}, {"eos_token_id": (5,)}),
        ({"eos_token_id": 5}, {"eos_token_id": 5}),
    ],
)  # fmt: skip
def test_keys_of_other_programs(changes, found):
    source = {key: value for key, value in (raw() | changes).items() if key not in changes or value is not None}
    cfg = k3jax.ModelConfig.from_hf(source)
    assert cfg == dataclasses.replace(k3jax.ModelConfig.from_hf(raw()), **found)
    assert k3jax.ModelConfig.from_hf(Form("transformers").config(cfg)) == cfg


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True}, "attention_bias: found True, only False is implemented"),
        ({"attention_bias": 0}, "attention_bias: found 0, only False is implemented"),
        ({"attention_dropout": 0.1}, "attention_dropout: found 0.1, only 0.0 is implemented"),
        ({"attention_sinks": True}, "attention_sinks: unknown config key"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types: found .*, must be a list of num_hidden_layers=4 times linear"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: found .*, must be a list of num_hidden_layers=4 times linear"),
        ({"mlp_layer_types": "dense"}, "mlp_layer_types: found 'dense', must be a list of num_hidden_layers=4 times dense or"),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "dense"]}, "mlp_layer_types: found .*, must be dense layers, then"),
        ({"first_k_dense_replace": 3}, "mlp_layer_types: found .*, must be as first_k_dense_replace=3 and moe_layer_freq=1 say"),
        ({"qk_head_dim": 99}, "qk_head_dim: found 99, must be the sum of qk_nope_head_dim=.* and qk_rope_head_dim=.*"),
        ({"n_group": 3}, "n_group: found 3, and 2 as num_expert_group; both must say the same"),
        ({"linear_attn_config": {"head_dim": 64}}, "linear_head_dim: found .*, and 64 as head_dim; both must say the same"),
        ({"linear_attn_config": {"kda_layers": [1]}}, r"layer_types: found .*, and \[1\] as kda_layers; both must say"),
        ({"linear_attn_config": 3}, "linear_attn_config: found 3, must be a JSON object"),
    ],
)
def test_keys_that_contradict_or_change_the_mathematics(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        k3jax.ModelConfig.from_hf(raw() | changes)
    assert "\n" not in str(caught.value)


def test_what_transformers_lacks_is_named(tiny, tmp_path):
    message = (
        r"^layout: Transformers lacks Kimi K3 \(model_type='kimi_k3'\), Attention Residuals \(attn_res_block_size=2\), .*"
        r"packed MXFP4 experts \(experts='bf16' writes their values\) \(quantized_experts=True\); 'released' has all$"
    )
    synthesize(tiny, tmp_path / "released")
    with pytest.raises(ValueError, match=message):
        save_hf(tmp_path / "out", tiny, load_hf(tmp_path / "released"), layout="transformers")
    assert not (tmp_path / "out").exists()


# ---- values of packed experts, and float32 -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("held", ["packed", "dequantized", "trained"])
def test_experts_as_values(tmp_path, tiny, dtype, held):
    """Those that the packed export stands for, which a tool that reads no packed experts takes."""
    synthesize(tiny, tmp_path / "released")
    if held == "trained":
        variables = load_hf(tmp_path / "released")
        variables = jax.tree.map(lambda x: x * 1.01 if x.ndim > 3 else x, variables)  # of no MXFP4
        packed, values = tmp_path / "packed", tmp_path / "values"
        save_hf(packed, tiny, variables)
        save_hf(values, tiny, variables, experts="bf16", dtype=dtype)
    else:
        import_checkpoint(tmp_path / "released", tmp_path / "in", experts=held)
        packed, values = tmp_path / "released", tmp_path / "values"
        export_checkpoint(tmp_path / "in", values, form=Form("released", dtype, "bf16"))
    config = k3jax.ModelConfig.from_hf(values)
    assert config == dataclasses.replace(tiny, quantized_experts=False) and report(values).problems == {}
    types = {header.dtype for name, header in open_checkpoint(values).headers.items() if ".experts." in name}
    rest = {header.dtype for name, header in open_checkpoint(values).headers.items() if ".experts." not in name}
    assert types == {"BF16"} and rest == ({"F32"} if dtype == "float32" else {"BF16", "F32"})
    want, found = flatten_dict(load_hf(packed)), flatten_dict(load_hf(values))
    assert want.keys() == found.keys()
    for path, x in found.items():
        kept = held == "trained" and dtype == "float32" and path[-2] != "experts"
        np.testing.assert_array_equal(x, flatten_dict(variables)[path] if kept else want[path])


def test_float32_comes_back_bit_for_bit(tmp_path, tiny_linear):
    synthesize(tiny_linear, tmp_path / "random")
    variables = jax.tree.map(lambda x: x * np.float32(1.001), load_hf(tmp_path / "random"))
    for layout in ("released", "transformers"):
        save_hf(tmp_path / layout, tiny_linear, variables, layout=layout, dtype="float32")
        jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / layout), variables)
    with pytest.raises(ValueError, match="dtype: found 'float16', must be 'bfloat16' or 'float32'"):
        save_hf(tmp_path / "none", tiny_linear, variables, dtype="float16")


def test_on_the_command_line(tmp_path, tiny_linear, monkeypatch, capsys):
    synthesize(tiny_linear, tmp_path / "released")
    monkeypatch.chdir(tmp_path)
    run = lambda *words: cli.main(list(words))  # noqa: E731
    run("convert", "import", "released", "in")
    run("convert", "export", "in", "out", "--layout", "transformers", "--dtype", "float32")
    assert json.loads(Path("out/config.json").read_text())["layer_types"][-1] == "full_attention"
    jax.tree.map(np.testing.assert_array_equal, load_hf("out"), load_hf("released"))
    capsys.readouterr()
    run("inspect", "out")
    assert "problems    none" in capsys.readouterr().out


# ---- ends of a generation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer, inner", [(7, 9), ([7, 9], 9), (7, [9, 11]), (9, 9), ([7], None)])
def test_end_tokens_of_kimi_k3_come_back_as_they_were(outer, inner):
    source = json.loads((DATA / "k3_tiny" / "config.json").read_text())
    source["eos_token_id"], source["text_config"]["eos_token_id"] = outer, inner
    cfg = k3jax.ModelConfig.from_hf(source)
    every = [*(outer if isinstance(outer, list) else [outer]), *(inner if isinstance(inner, list) else [inner])]
    assert cfg.stop_ids == set(every) - {None}
    written = json.loads(json.dumps(cfg.to_hf()))
    assert written["eos_token_id"] == outer and written["text_config"]["eos_token_id"] == (outer if inner is None else inner)
    assert k3jax.ModelConfig.from_hf(written) == cfg and hash(cfg)


def test_end_tokens_that_files_disagree_on_travel(tmp_path, tiny_linear, words):
    cfg = dataclasses.replace(tiny_linear, vocab_size=2560, eos_token_id=(5, 6))
    synthesize(cfg, tmp_path / "source")
    for file in words.iterdir():
        shutil.copy(file, tmp_path / "source")
    beside = {"generation_config.json": b'\xef\xbb\xbf{"eos_token_id": [7]}'}
    for name, content in beside.items():
        (tmp_path / "source" / name).write_bytes(content)
    import_checkpoint(tmp_path / "source", tmp_path / "in")
    for layout in ("released", "transformers"):
        export_checkpoint(tmp_path / "in", tmp_path / layout, form=Form(layout))
        assert json.loads((tmp_path / layout / "config.json").read_text())["eos_token_id"] == [5, 6]
        for file in (*words.iterdir(), *map(Path, beside)):
            assert (tmp_path / layout / file.name).read_bytes() == (tmp_path / "source" / file.name).read_bytes()
        assert {5, 6, 7} <= load_tokenizer(tmp_path / layout, 2560).stop_ids
        assert load_tokenizer(tmp_path / layout, 2560).stop_ids == load_tokenizer(tmp_path / "source", 2560).stop_ids


# ---- what lies in a folder and is not of the checkpoint ------------------------------------------------------


def edit(file, change):
    tensors = load_file(file)
    save_file(tensors | change(tensors), file, {"format": "pt"})


@pytest.fixture
def odd(tmp_path, copy_golden):
    """A Kimi-Linear as public checkpoints are: shards hold more than the index names."""
    folder = copy_golden("kimi_linear_tiny").folder
    one, two = sorted(folder.glob("*.safetensors"))
    first, second = load_file(one), load_file(two)
    moved = next(name for name in sorted(first) if name.endswith("o_proj.weight"))
    buffer = "model.layers.3.self_attn.rotary_emb.inv_freq"
    edit(two, lambda x: {moved: x[max(x)] * 0, buffer: np.ones(4, np.float32), "optimizer.step": np.ones(3)})
    edit(one, lambda x: {min(second): second[min(second)].reshape(-1)[:1]})  # of another shape, even
    save_file({"anything": np.ones(3)}, folder / "model-00003-of-00002.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + config)
    (folder / INDEX).write_bytes(b"\xef\xbb\xbf" + (folder / INDEX).read_bytes())
    return folder, moved, min(second), buffer


def test_the_index_alone_says_what_there_is(odd, tmp_path):
    folder, moved, superseded, buffer = odd
    found = report(folder)
    assert found.problems == {}
    (line,) = [line for line in found.text.splitlines() if line.startswith("ignored")]
    one, two = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert line.startswith("ignored     6 things: ")
    for part in (
        f"{moved}: in {two}, but the index says {one}",
        f"{superseded}: in {one}, but the index says {two}",
        f"{buffer}: in {two}, but not in the index",
        f"optimizer.step: in {two}, but not in the index",
        "model-00003-of-00002.safetensors: not named by the index",
        "pytorch_model.bin: not named by the index",
    ):
        assert part in line
    want = load_hf(DATA / "kimi_linear_tiny")
    jax.tree.map(np.testing.assert_array_equal, load_hf(folder), want)
    import_checkpoint(folder, tmp_path / "first", layers=2)  # a prefix, too
    import_checkpoint(folder, tmp_path / "in")
    export_checkpoint(tmp_path / "in", tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "out"), want)


def test_a_buffer_that_the_index_names_is_not_missed(odd):
    folder, _, _, buffer = odd
    index = json.loads((folder / INDEX).read_text(encoding="utf-8-sig"))
    index["weight_map"][buffer] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    found = report(folder)
    assert found.problems == {}
    assert f"{buffer}: in model-00002-of-00002.safetensors, a buffer that the model does not use" in found.text


def test_without_an_index_the_file_says_what_there_is(tmp_path):
    shutil.copytree(SAVED / "float32", tmp_path / "one")
    edit(tmp_path / "one" / "model.safetensors", lambda x: {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)})
    save_file({"anything": np.ones(3)}, tmp_path / "one" / "consolidated.safetensors")
    found = report(tmp_path / "one")
    assert found.problems == {} and "ignored     2 things: consolidated.safetensors: beside model.safetensors" in found.text
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "one"), load_hf(SAVED / "float32"))
    edit(tmp_path / "one" / "model.safetensors", lambda x: {"lm_head.bias": np.ones(4)})
    assert report(tmp_path / "one").problems == {"lm_head.bias": "not a tensor of this model"}


@pytest.mark.parametrize("where", ["index", "shard"])
def test_one_tensor_under_two_names(tmp_path, where):
    shutil.copytree(SAVED / "bfloat16", tmp_path / "two")
    name, other = "model.layers.0.block_sparse_moe.up_proj.weight", "model.layers.0.mlp.up_proj.weight"
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    if where == "index":
        index["weight_map"][other] = index["weight_map"][name]
        (tmp_path / "two" / INDEX).write_text(json.dumps(index))
    else:
        edit(tmp_path / "two" / index["weight_map"][name], lambda x: {other: x[name]})
    with pytest.raises(CheckpointError, match=f"{other} is listed twice, under another name too"):
        load_hf(tmp_path / "two")
