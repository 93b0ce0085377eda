"""ModelConfig: released configs in and out, derived numbers, and every refusal."""

import copy
import dataclasses
import json
import runpy
from pathlib import Path

import pytest

from k3jax.config import LayerKind, ModelConfig, Segment, _segments

DATA = Path(__file__).parent / "data"
CONFIGS = Path(__file__).parents[1] / "configs"

KDA, MLA = LayerKind("kda", "moe"), LayerKind("mla", "moe")


def raw(model: str) -> dict:
    return json.loads((DATA / model / "config.json").read_text())


@pytest.fixture(scope="module")
def k3():
    return ModelConfig.from_hf(DATA / "kimi_k3")


@pytest.fixture(scope="module")
def linear():
    return ModelConfig.from_hf(DATA / "kimi_linear_48b")


# ---- released numbers -----------------------------------------------------------------------------


def test_kimi_k3_size(k3):
    assert k3.num_parameters == 2_779_484_476_000
    assert k3.num_active_parameters == 104_189_591_136
    assert k3.mixer_parameters("kda") == 443_740_384
    assert k3.mixer_parameters("mla") == 232_196_096
    assert 92 * k3.num_experts * k3.expert_parameters == 2_722_740_830_208
    residuals = 6 * k3.hidden_size  # two norms, and two mixtures of a norm and a query
    assert k3.layer_parameters(KDA) - 443_740_384 - residuals == 29_784_936_832


def test_kimi_linear_size(linear):
    assert linear.num_parameters == 49_122_681_728
    assert linear.num_active_parameters == 3_106_972_544


def test_kimi_k3_schedule(k3):
    mixers = [kind.mixer for kind in k3.layers]
    assert (len(mixers), mixers.count("kda"), mixers.count("mla")) == (93, 69, 24)
    assert [i for i, mixer in enumerate(mixers) if mixer == "mla"] == [*range(3, 92, 4), 92]
    assert [i for i, kind in enumerate(k3.layers) if kind.ffn == "dense"] == [0]
    assert k3.segments == (
        Segment((LayerKind("kda", "dense"),), 1),
        Segment((KDA,), 2),
        Segment((MLA, KDA, KDA, KDA), 22),
        Segment((MLA,), 2),
    )
    assert k3.num_attn_res_blocks == 8
    assert (k3.latent_size, k3.shared_intermediate_size) == (3584, 6144)


def test_kimi_linear_schedule(linear):
    assert linear.segments == (
        Segment((LayerKind("kda", "dense"),), 1),
        Segment((KDA, KDA, MLA, KDA), 6),
        Segment((KDA, MLA), 1),
    )
    assert linear.num_attn_res_blocks == 0
    assert linear.latent_size == linear.hidden_size


@pytest.mark.parametrize(
    "layer, address",
    [(0, (0, 0, 0)), (2, (1, 1, 0)), (3, (2, 0, 0)), (9, (2, 1, 2)), (90, (2, 21, 3)), (92, (3, 1, 0))],
)
def test_layer_address(k3, layer, address):
    assert k3.layer_address(layer) == address


def test_layer_address_beyond_the_stack(k3):
    with pytest.raises(ValueError, match="layer 93: the model has num_hidden_layers=93"):
        k3.layer_address(93)


@pytest.mark.parametrize("model", ["kimi_k3", "kimi_linear_48b", "k3_tiny", "kimi_linear_tiny"])
def test_segments_unroll_to_the_layers(model):
    cfg = ModelConfig.from_hf(DATA / model)
    unrolled = [kind for unit, repeats in cfg.segments for _ in range(repeats) for kind in unit]
    assert unrolled == list(cfg.layers)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("a", "a1"),
        ("aaa", "a3"),
        ("ab", "ab1"),
        ("abab", "ab2"),
        ("aabab", "a1 ab2"),
        ("xaabaaabaaabb", "x1 a2 baaa2 b2"),
        ("aabbaabb", "aabb2"),
        ("aaaabbbb", "a4 b4"),
    ],
)
def test_segments_have_the_fewest_layers_in_units(kinds, expected):
    found = [("".join(unit), repeats) for unit, repeats in _segments(tuple(kinds))]
    assert " ".join(f"{unit}{n}" for unit, n in found) == expected


def test_moe_layer_freq(linear):
    cfg = dataclasses.replace(linear, first_k_dense_replace=3, moe_layer_freq=2)
    moe = [i for i, kind in enumerate(cfg.layers) if kind.ffn == "moe"]
    assert moe == [*range(4, 27, 2)]  # 0-based, from layer 3 on, even ones


# ---- the released format --------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["kimi_k3", "kimi_linear_48b", "k3_tiny", "kimi_linear_tiny"])
def test_round_trip(model):
    cfg = ModelConfig.from_hf(raw(model))
    again = json.loads(json.dumps(cfg.to_hf()))
    assert ModelConfig.from_hf(again) == cfg
    assert hash(cfg) == hash(ModelConfig.from_hf(again))


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
def test_export_says_what_the_source_said(model):
    source, written = raw(model), ModelConfig.from_hf(raw(model)).to_hf()

    def compare(found, expected, path=""):
        for key in expected.keys() - {"use_cache", "ignore_index", "image_placeholder"}:
            if isinstance(expected[key], dict):
                compare(found[key], expected[key], f"{path}{key}.")
            else:
                assert found[key] == expected[key], path + key

    compare(written, source)


@pytest.mark.parametrize("model", ["kimi_k3", "kimi_linear_48b"])
def test_shipped_config_is_the_released_one(model):
    file = CONFIGS / f"{model}.py"
    assert len(file.read_text().splitlines()) <= 60
    assert runpy.run_path(str(file))["model"] == ModelConfig.from_hf(DATA / model)


def test_from_a_folder_a_file_or_a_mapping():
    folder = DATA / "k3_tiny"
    assert ModelConfig.from_hf(folder) == ModelConfig.from_hf(str(folder / "config.json"))
    assert ModelConfig.from_hf(folder) == ModelConfig.from_hf(raw("k3_tiny"))


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
def test_the_order_of_a_layer_list_means_nothing(model):
    source = raw(model)
    linear = source.get("text_config", source)["linear_attn_config"]
    linear["kda_layers"].reverse()
    linear["full_attn_layers"].reverse()
    cfg, expected = ModelConfig.from_hf(source), ModelConfig.from_hf(raw(model))
    assert cfg == expected and hash(cfg) == hash(expected) and cfg.to_hf() == expected.to_hf()
    assert dataclasses.replace(cfg, kda_layers=cfg.kda_layers[::-1]) == expected


@pytest.mark.parametrize("where", ["inside", "outside", "both"])
def test_tied_embeddings_are_read_wherever_they_stand(where):
    source = raw("k3_tiny")
    for place, node in (("inside", source["text_config"]), ("outside", source)):
        del node["tie_word_embeddings"]
        if where in (place, "both"):
            node["tie_word_embeddings"] = True
    cfg = ModelConfig.from_hf(source)
    assert cfg.tie_word_embeddings and ModelConfig.from_hf(cfg.to_hf()) == cfg
    untied = dataclasses.replace(cfg, tie_word_embeddings=False)
    assert untied == ModelConfig.from_hf(raw("k3_tiny"))
    assert untied.num_parameters - cfg.num_parameters == 128 * 64
    assert untied.num_active_parameters == cfg.num_active_parameters
    written = cfg.to_hf()
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_token": 12},
        {"num_expert_group": 4, "topk_group": 1},  # of three experts, of which three are chosen
        {"num_expert_group": 12, "topk_group": 12},  # all stay: nothing decides between groups
        {"moe_router_activation_func": "softmax"},
        {"num_shared_experts": 0},
        {"first_k_dense_replace": 9},
    ],
    ids=str,
)
def test_routers_that_the_released_code_has(changes):
    source = raw("k3_tiny")
    source["text_config"] |= changes
    cfg = ModelConfig.from_hf(source)
    assert {name: getattr(cfg, name) for name in changes} == changes
    assert ModelConfig.from_hf(json.loads(json.dumps(cfg.to_hf()))) == cfg


def test_no_shared_experts_may_be_null():
    source = raw("k3_tiny")
    source["text_config"]["num_shared_experts"] = None
    assert ModelConfig.from_hf(source).num_shared_experts == 0


def test_a_mapping_is_left_as_it_was():
    source = raw("k3_tiny")
    before = copy.deepcopy(source)
    ModelConfig.from_hf(source)
    assert source == before


def test_fields_that_are_easily_mixed_up(k3, linear):
    assert (k3.gate_lower_bound, linear.gate_lower_bound) == (-5.0, None)
    assert (k3.use_full_rank_gate, linear.use_full_rank_gate) == (True, False)
    assert (k3.q_lora_rank, linear.q_lora_rank) == (1536, None)
    assert (k3.eos_token_id, k3.vision.media_placeholder_token_id) == (163586, 163605)
    assert (k3.quantized_experts, linear.quantized_experts) == (True, False)
    assert (linear.hidden_act, linear.routed_scaling_factor, linear.vision) == ("silu", 2.446, None)


@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_tiny"])
@pytest.mark.parametrize("ids, stop_ids", [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_one_or_several_tokens_end_a_generation(name, ids, stop_ids):
    cfg = ModelConfig.from_hf(raw(name) | {"eos_token_id": ids})
    its_own = {2} if name == "k3_tiny" else set()  # of the text model
    assert cfg.stop_ids == stop_ids | its_own and hash(cfg) == hash(ModelConfig.from_hf(cfg.to_hf()))
    assert cfg.to_hf()["eos_token_id"] == ids


# ---- refusals -------------------------------------------------------------------------------------

NULL = object()  # JSON's null; None below takes the key away



@pytest.mark.parametrize(
    "model, where, value, message",
    [
        ("k3_tiny", "model_type", "llama", "model_type: found 'llama', must be 'kimi_k3' or 'kimi_linear'"),
        ("k3_tiny", "text_config", None, "text_config: missing"),
        ("k3_tiny", "tie_embeddings", True, "tie_embeddings: unknown config key"),
        ("k3_tiny", "text_config.num_expert", 3, "text_config.num_expert: unknown config key"),
        ("kimi_linear_tiny", "num_expert", 3, "num_expert: unknown config key .value 3."),
        ("k3_tiny", "text_config.num_experts", None, "num_experts: missing"),
        ("k3_tiny", "text_config.linear_attn_config", None, "linear_attn_config: missing"),
        ("k3_tiny", "text_config.linear_attn_config.head_dim", None, "linear_attn_config.head_dim: missing"),
        (
            "k3_tiny",
            "text_config.linear_attn_config.heads",
            3,
            "linear_attn_config.heads: unknown config key",
        ),
        ("k3_tiny", "text_config.mla_use_nope", False, "mla_use_nope: found False, only True is implemented"),
        ("k3_tiny", "text_config.num_key_value_heads", 1, "num_key_value_heads: found 1, must equal"),
        (
            "k3_tiny",
            "text_config.tie_word_embeddings",
            True,
            "tie_word_embeddings: found False, and True as text_config.tie_word_embeddings; both must say the same",
        ),
        ("k3_tiny", "tie_word_embeddings", True, "tie_word_embeddings: found True, and False as text_config.tie"),
        ("kimi_linear_tiny", "tie_word_embeddings", 1, "tie_word_embeddings: found 1, must be True or False"),
        ("k3_tiny", "text_config.use_grouped_topk", 1, "use_grouped_topk: found 1, only True is implemented"),
        ("k3_tiny", "text_config.num_nextn_predict_layers", False, "num_nextn_predict_layers: found False, only 0 is"),
        ("k3_tiny", "vision_config.attn_bias", 0, "vision_config.attn_bias: found 0, only False is implemented"),
        ("k3_tiny", "text_config.num_nextn_predict_layers", 1, "num_nextn_predict_layers: found 1"),
        ("k3_tiny", "text_config.moe_router_activation_func", "relu", "found 'relu', must be one of sigmoid, softmax"),
        (
            "k3_tiny",
            "text_config.quantization_config.format",
            "int4",
            "quantization_config.format: found 'int4'",
        ),
        ("k3_tiny", "text_config.quantization_config", {}, "quantization_config.format: found None, only"),
        ("k3_tiny", "text_config.hidden_size", "64", "hidden_size: found '64', must be an integer"),
        ("k3_tiny", "text_config.hidden_size", 64.5, "hidden_size: found 64.5, must be an integer"),
        ("k3_tiny", "text_config.num_experts", [12], r"num_experts: found \[12\], must be an integer"),
        ("k3_tiny", "text_config.vocab_size", NULL, "vocab_size: found None, must be an integer"),
        ("k3_tiny", "text_config.rms_norm_eps", "1e-5", "rms_norm_eps: found '1e-5', must be a number"),
        ("k3_tiny", "text_config.q_lora_rank", "48", "q_lora_rank: found '48', must be an integer or None"),
        ("k3_tiny", "text_config.q_lora_rank", 0, "q_lora_rank: found 0, must be positive or None"),
        ("k3_tiny", "text_config.moe_renormalize", 1, "moe_renormalize: found 1, must be True or False"),
        ("k3_tiny", "text_config.num_attention_heads", "3", "num_attention_heads: found '3', must be an int"),
        ("k3_tiny", "text_config.num_key_value_heads", NULL, "num_key_value_heads: found None, must equal"),
        ("k3_tiny", "bos_token_id", [2], r"bos_token_id: found \(2,\), must be an integer or None"),
        ("k3_tiny", "eos_token_id", ["2"], r"eos_token_id: found \('2',\), must be an integer or a tuple of .* or None"),
        ("k3_tiny", "text_config", [], r"text_config: found \[\], must be a JSON object"),
        ("k3_tiny", "text_config.linear_attn_config", NULL, "linear_attn_config: found None, must be a JSON"),
        ("k3_tiny", "text_config.quantization_config", "fp4", "quantization_config: found 'fp4', must be a"),
        (
            "k3_tiny",
            "text_config.linear_attn_config.kda_layers",
            5,
            "linear_attn_config.kda_layers: found 5, must be a tuple of values, each an integer",
        ),
        (
            "kimi_linear_tiny",
            "linear_attn_config.head_dim",
            "16",
            "linear_attn_config.head_dim: found '16', must be an integer",
        ),
        ("k3_tiny", "vision_config", 3, "vision_config: found 3, must be a JSON object"),
        (
            "k3_tiny",
            "vision_config.merge_kernel_size",
            [2],
            r"vision_config.merge_kernel_size: found \(2,\), must be a tuple of 2 values, each an integer",
        ),
        ("k3_tiny", "vision_config.patch_size", 1.5, "vision_config.patch_size: found 1.5, must be an int"),
        ("k3_tiny", "vision_config.patch_size", 0, "vision_config.patch_size: found 0, must be positive"),
        ("k3_tiny", "vision_config.projector_ln_eps", float("nan"), "projector_ln_eps: found nan, must be a finite number"),
        ("k3_tiny", "vision_config.patch_size", 2**31, "patch_size: found 2147483648, must be from -2147483647 to 2147483647"),
        ("k3_tiny", "vision_config.mm_hidden_size", 16, "mm_hidden_size: found 16, must equal vt_hidden_size=32"),
        ("k3_tiny", "vision_config.qkv_hidden_size", 44, "qkv_hidden_size: found 44, must be a multiple of 4 .*=8"),
        ("k3_tiny", "vision_config.vt_hidden_size", 31, "vision_config.vt_hidden_size: found 31, must be even"),
        ("k3_tiny", "media_placeholder_token_id", 128, "found 128, must be a token of vocab_size=128"),
        ("k3_tiny", "vision_config.text_hidden_size", 96, "found 96, must equal hidden_size=64"),
        ("k3_tiny", "vision_config.patch_size", None, "vision_config.patch_size: missing"),
        ("k3_tiny", "vision_config.patches", 3, "vision_config.patches: unknown config key"),
        ("k3_tiny", "vision_config.norm_type", "layernorm", "vision_config.norm_type: found 'layernorm'"),
    ],
)
def test_a_wrong_released_config(model, where, value, message):
    source = raw(model)
    *above, key = where.split(".")
    node = source
    for step in above:
        node = node[step]
    if value is None:
        del node[key]
    else:
        node[key] = None if value is NULL else value
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_hf(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "llama"}, "model_type: found 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu', must be one of situ, silu"),
        ({"hidden_size": 0}, "hidden_size: found 0, must be positive"),
        ({"num_attention_heads": -1}, "num_attention_heads: found -1, must be positive"),
        ({"kda_layers": (1, 2, 3, 5, 6, 7, 7)}, r"layers \[7\] are missing, extra or listed twice"),
        ({"kda_layers": (1, 2, 3, 5, 6)}, r"layers \[7\] are missing, extra or listed twice"),
        ({"full_attn_layers": (4, 8, 9, 10)}, r"layers \[10\] are missing, extra or listed twice"),
        ({"full_attn_layers": (4, 7, 8, 9)}, r"layers \[7\] are missing, extra or listed twice"),
        ({"num_hidden_layers": 2**31 - 1}, r"layers \[10, 11, .*, 19\] are missing, .* each of 1..num_hidden_layers=2147483647 once"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers: found 1000000000000000000, must be from -2147483647 to 2147483647"),
        ({"num_experts_per_token": 13}, "num_experts_per_token: found 13, must be at most num_experts=12"),
        ({"num_expert_group": 5}, "num_expert_group: found 5, must divide num_experts=12"),
        ({"num_expert_group": 4, "topk_group": 5}, "topk_group: found 5, must be between 1 and"),
        (
            {"num_expert_group": 6, "topk_group": 1},
            "topk_group: found 1, whose groups hold 2 experts, fewer than num_experts_per_token=3",
        ),
        ({"gate_lower_bound": 0.0}, "gate_lower_bound: found 0.0, must be negative"),
        ({"gate_lower_bound": float("-inf")}, "gate_lower_bound: found -inf, must be a finite number that float32 can hold"),
        ({"attn_res_block_size": 0}, "attn_res_block_size: found 0, must be positive or None"),
        ({"q_lora_rank": -1}, "q_lora_rank: found -1, must be positive or None"),
        ({"routed_expert_hidden_size": -32}, "routed_expert_hidden_size: found -32, must be positive or"),
        ({"initializer_range": -0.02}, "initializer_range: found -0.02, must be 0 or more"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: found nan, must be a finite number that float32 can hold"),
        ({"activation_situ_beta": 0.0}, "activation_situ_beta: found 0.0, must be positive"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace: found -1, must be 0 or more"),
        ({"num_expert_group": 12, "topk_group": 4}, "must leave two or more of num_experts=12 in a group"),
        ({"hidden_size": True}, "hidden_size: found True, must be an integer"),
        ({"hidden_size": None}, "hidden_size: found None, must be an integer"),
        ({"kda_layers": [1, 2, 3, 5, 6, 7]}, r"kda_layers: found \[1, .*, must be a tuple of values, each"),
        ({"vision": {"patch_size": 14}}, "vision: found {'patch_size': 14}, must be VisionConfig or None"),
        (
            {"moe_intermediate_size": 48},
            "moe_intermediate_size: found 48, MXFP4 experts need a multiple of 32",
        ),
        ({"routed_expert_hidden_size": 40}, "routed_expert_hidden_size: found 40, MXFP4 experts need"),
    ],
)
def test_settings_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(ModelConfig.from_hf(DATA / "k3_tiny"), **changes)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="none: no such file"):
        ModelConfig.from_hf(tmp_path / "none")
    with pytest.raises(ValueError, match="config.json: no such file"):
        ModelConfig.from_hf(tmp_path)
    for content, message in (
        (b"{", "config.json: not valid JSON"),
        (b"\x93\x00\xff", "config.json: not valid JSON"),
        (b"[1, 2]", r"config.json: found \[1, 2\], must be a JSON object"),
        (b'{"hidden_size": 64, "hidden_size": 32}', r"config.json: not valid JSON \(hidden_size is listed twice\)"),
        (b'{"a": {"b": 1, "b": 1}}', r"config.json: not valid JSON \(b is listed twice\)"),
        (b'{"rms_norm_eps": NaN}', r"config.json: not valid JSON \(NaN is not a number\)"),
        (b'{"rms_norm_eps": -Infinity}', r"config.json: not valid JSON \(-Infinity is not a number\)"),
        (b"[" * 100_000, r"config.json: not valid JSON \(nested too deeply\)"),
        (b'{"hidden_size": ' + b"1" * 5000 + b"}", r"config.json: not valid JSON \(Exceeds the limit"),
    ):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            ModelConfig.from_hf(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="config.json: cannot be read"):
        ModelConfig.from_hf(tmp_path)
