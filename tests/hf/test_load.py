"""Import: exact values in the right place, and every damage refused before data is read."""

import dataclasses
import json
import math
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

from k3jax.config import ModelConfig
from k3jax.hf import CheckpointError, load, load_hf, pieces
from k3jax.hf.files import Checkpoint, inside, open_checkpoint
from k3jax.hf.finite import all_finite
from k3jax.hf.load import released_arrays
from k3jax.hf.names import DTYPES, table, tree_shapes
from k3jax.sharding import make_mesh

INDEX = "model.safetensors.index.json"
LAYER5 = "language_model.model.layers.5."
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored(copy):
    tensors = {}
    for shard in set(copy.weight_map.values()):
        tensors |= load_file(copy.folder / shard)
    return tensors


def decoded(packed, scale):
    """MXFP4 by its definition: low nibble is the even column, 32 columns share 2^(scale - 127)."""
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], axis=-1).reshape(*packed.shape[:-1], -1)
    return values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=-1)


def test_values_and_places(copy_golden):
    copy = copy_golden("k3_tiny")
    raw = stored(copy)
    variables = load_hf(copy.folder, param_dtype=jnp.float64)
    assert set(variables) == {"params", "router"}
    layer = variables["params"]["segment_3"]["layer_0"]  # layers 4, 5 and 6
    attn, moe = layer["self_attn"], layer["block_sparse_moe"]

    def same(found, expected, shape):
        assert found.shape == shape
        np.testing.assert_array_equal(np.asarray(found), expected.astype(np.float64).reshape(shape))

    same(variables["params"]["embed_tokens"], raw["language_model.model.embed_tokens.weight"], (128, 64))
    same(attn["q_proj"][1], raw[LAYER5 + "self_attn.q_proj.weight"], (3, 16, 64))
    same(attn["o_proj"][1], raw[LAYER5 + "self_attn.o_proj.weight"], (64, 48))
    same(attn["k_conv1d"][1], raw[LAYER5 + "self_attn.k_conv1d.weight"], (3, 16, 4))
    same(attn["A_log"][1], raw[LAYER5 + "self_attn.A_log"][:3], (3,))
    same(layer["mlp_res_proj"][1], raw[LAYER5 + "mlp_res_proj.weight"], (64,))
    bias = variables["router"]["segment_3"]["layer_0"]["block_sparse_moe"]["e_score_correction_bias"]
    same(bias[1], raw[LAYER5 + "block_sparse_moe.gate.e_score_correction_bias"], (12,))
    for w in ("w1", "w2", "w3"):
        name = f"{LAYER5}block_sparse_moe.experts.7.{w}.weight"
        expected = decoded(raw[f"{name}_packed"], raw[f"{name}_scale"])
        same(moe["experts"][w][1, 7], expected, expected.shape)
    tower, projector = variables["params"]["vision_tower"], variables["params"]["mm_projector"]
    same(tower["blocks"]["wqkv"][1], raw["vision_tower.encoder.blocks.1.wqkv.weight"], (3, 2, 24, 32))
    same(tower["blocks"]["fc1"][0], raw["vision_tower.encoder.blocks.0.mlp.fc1.weight"], (32, 64))
    same(tower["pos_emb"], raw["vision_tower.patch_embed.pos_emb.weight"], (8, 8, 32))
    same(projector["proj_2"], raw["mm_projector.proj.2.weight"], (64, 128))


def test_packed_experts_are_the_stored_bytes(copy_golden):
    copy = copy_golden("k3_tiny")
    raw = stored(copy)
    variables = load_hf(copy.folder, experts="packed")
    experts = variables["params"]["segment_3"]["layer_0"]["block_sparse_moe"]["experts"]
    assert set(experts) == {f"{w}_{part}" for w in ("w1", "w2", "w3") for part in ("packed", "scale")}
    for name, leaf in experts.items():
        assert leaf.dtype == jnp.uint8
        w, part = name.split("_")
        np.testing.assert_array_equal(
            leaf[1, 3], raw[f"{LAYER5}block_sparse_moe.experts.3.{w}.weight_{part}"]
        )


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_types_and_shapes_of_the_whole_tree(copy_golden, model, dtype):
    folder = copy_golden(model).folder
    flat = flatten_dict(load_hf(folder, param_dtype=dtype))
    cfg = ModelConfig.from_hf(folder)
    assert {path: leaf.shape for path, leaf in flat.items()} == tree_shapes(cfg, "dequantized")
    kept = {"A_log", "dt_bias", "o_norm", "q_conv1d", "k_conv1d", "v_conv1d", "e_score_correction_bias"}
    for path, leaf in flat.items():
        expected = jnp.float32 if path[-1] in kept and dtype != jnp.float64 else dtype
        assert leaf.dtype == expected, path


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float64])
def test_every_code_under_the_smallest_and_largest_scales_is_exact(copy_golden, dtype):
    copy = copy_golden("k3_tiny")
    name = LAYER5 + "block_sparse_moe.experts.0.w1.weight"
    scales = np.array([0, 1, 126, 127, 250, 251], np.uint8).repeat(11)[:64, None]
    codes = np.arange(64 * 16, dtype=np.uint64).reshape(64, 16).astype(np.uint8)
    copy.edit(f"{name}_packed", lambda _: codes)
    copy.edit(f"{name}_scale", lambda _: scales)
    layer = load_hf(copy.folder, param_dtype=dtype)["params"]["segment_3"]["layer_0"]
    found = np.asarray(layer["block_sparse_moe"]["experts"]["w1"][1, 0])
    np.testing.assert_array_equal(found.astype(np.float64), decoded(codes, scales))


def test_one_shard_without_an_index(copy_golden):
    copy = copy_golden("kimi_linear_tiny")
    expected = load_hf(copy.folder)
    whole = stored(copy)
    for file in copy.folder.glob("model*"):
        file.unlink()
    save_file(whole, copy.folder / "model.safetensors")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), load_hf(copy.folder), expected))


def test_shards_may_be_links_into_the_hub_s_cache(copy_golden, tmp_path):
    copy = copy_golden("kimi_linear_tiny")
    (tmp_path / "models--kimi" / "blobs").mkdir(parents=True)
    (tmp_path / "models--kimi" / "snapshots").mkdir()
    revision = copy.folder.rename(tmp_path / "models--kimi" / "snapshots" / "5f1c")
    for i, file in enumerate(revision.glob("*.safetensors")):
        file.rename(tmp_path / "models--kimi" / "blobs" / str(i))
        file.symlink_to(f"../../blobs/{i}")
    assert load_hf(revision)["params"]["norm"].shape == (64,)


def test_a_config_given_beats_the_folder_s(copy_golden):
    folder = copy_golden("kimi_linear_tiny").folder
    cfg = ModelConfig.from_hf(folder)
    (folder / "config.json").unlink()
    assert load_hf(folder, cfg)["params"]["norm"].shape == (64,)


@pytest.mark.parametrize("experts", ["dequantized", "packed"])
def test_leaves_are_placed_as_the_mesh_s_shardings_say(copy_golden, monkeypatch, experts):
    copy = copy_golden("k3_tiny")
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

    def model_shardings(cfg, mesh, experts):
        spec = jax.sharding.PartitionSpec
        return unflatten_dict(
            {
                path: jax.sharding.NamedSharding(mesh, spec(None, "expert") if "experts" in path else spec())
                for path in tree_shapes(cfg, experts)
            }
        )

    monkeypatch.setattr("k3jax.hf.load.model_shardings", model_shardings)
    sharded = flatten_dict(load_hf(copy.folder, mesh=mesh, experts=experts))
    plain = flatten_dict(load_hf(copy.folder, experts=experts))
    assert sharded.keys() == plain.keys()
    for path, leaf in sharded.items():
        assert len(leaf.sharding.device_set) == 4
        assert leaf.addressable_shards[0].data.size == leaf.size // (4 if "experts" in path else 1)
        np.testing.assert_array_equal(leaf, plain[path])


# ---- bad input -----------------------------------------------------------------------------------

GATE = LAYER5 + "block_sparse_moe.gate.weight"
SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def remove(copy, name):
    copy.edit(name, lambda _: None)
    copy.edit_index(**{name: None})


def add(copy, name):
    copy.edit(name, lambda _: np.zeros(3, np.float32))
    copy.edit_index(**{name: SHARD1})


def unlist_scales(copy):
    for e in range(12):
        copy.edit_index(**{f"{LAYER5}block_sparse_moe.experts.{e}.w1.weight_scale": None})


def cut(copy, length):
    file = copy.folder / SHARD2
    file.write_bytes(file.read_bytes()[:length])


def raw(copy, change):
    """Changes the header of the second shard as text; the length before it follows."""
    file = copy.folder / SHARD2
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + length])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def offsets(copy, change):
    """Changes the data_offsets of GATE."""

    def edit(header):
        tensors = json.loads(header)
        tensors[GATE]["data_offsets"] = change(*tensors[GATE]["data_offsets"])
        return json.dumps(tensors).encode()

    raw(copy, edit)


def header_length(copy, length):
    file = copy.folder / SHARD2
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def link_out(copy, to):
    file = copy.folder / SHARD2
    target = copy.folder.parent / "elsewhere"
    target.mkdir()
    file.rename(target / SHARD2)
    if to == "file":
        file.symlink_to(target / SHARD2)
    else:
        (copy.folder / "sub").symlink_to(target)
        for name, shard in copy.weight_map.items():
            if shard == SHARD2:
                copy.edit_index(**{name: f"sub/{SHARD2}"})


def to_pickle(copy):
    (copy.folder / SHARD2).rename(copy.folder / "pytorch_model.bin")
    index = copy.folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(SHARD2, "pytorch_model.bin"))


def pipe(copy):
    (copy.folder / SHARD2).unlink()
    os.mkfifo(copy.folder / SHARD2)


def contradict(copy):
    config = json.loads((copy.folder / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 32
    (copy.folder / "config.json").write_text(json.dumps(config))


EXPERT = LAYER5 + "block_sparse_moe.experts.3.w2.weight_"
DAMAGED = f"1 problem: {SHARD2}: the shard is cut short or damaged "
DAMAGE = {
    "header longer than the file": (lambda c: header_length(c, 10**7), rf"{DAMAGED}\(header length 10,000,000 in a file of"),
    "header of any length": (lambda c: header_length(c, 2**63), rf"{DAMAGED}\(header length 9,223,372"),
    "header of no length": (lambda c: header_length(c, 0), rf"{DAMAGED}\(header length 0 in a file of"),
    "header too short": (lambda c: header_length(c, 100), rf"{DAMAGED}\("),
    "header is a list": (lambda c: raw(c, lambda h: b"[]"), rf"{DAMAGED}\(the header is not a JSON object\)"),
    "header is deep": (lambda c: raw(c, lambda h: b"[" * 100_000), rf"{DAMAGED}\("),
    "header is not text": (lambda c: raw(c, lambda h: b"\xff" + h), rf"{DAMAGED}\("),
    "overlapping offsets": (lambda c: offsets(c, lambda a, b: [a - 64, b - 64]), rf"{DAMAGED}\({GATE} overlaps language_model"),
    "offsets with a gap": (lambda c: offsets(c, lambda a, b: [a + 2, b + 2]), rf"{DAMAGED}\({GATE} leaves 2 bytes unused after"),
    "offsets out of range": (lambda c: offsets(c, lambda a, b: [a + 10**9, b + 10**9]), DAMAGED),
    "negative offsets": (lambda c: offsets(c, lambda a, b: [a - b, 0]), rf"{DAMAGED}\({GATE}: not a dtype, shape and data_offsets"),
    "offsets of another size": (lambda c: offsets(c, lambda a, b: [a, b + 2]), rf"{GATE}: 1538 bytes for BF16 \[12, 64\]"),
    "unknown type": (lambda c: raw(c, lambda h: h.replace(b'"BF16"', b'"BF17x"', 1)), rf"{DAMAGED}\(unknown type 'BF17x'"),
    "duplicate names": (
        lambda c: raw(c, lambda h: h.replace(b".experts.1.w1.weight_scale", b".experts.0.w1.weight_scale", 1)),
        rf"{DAMAGED}\(language_model.*experts.0.w1.weight_scale is listed twice\)",
    ),
    "duplicate names in the index": (
        lambda c: (c.folder / INDEX).write_text((c.folder / INDEX).read_text().replace(".experts.1.", ".experts.0.", 1)),
        r"model.safetensors.index.json: not readable as JSON \(language_model.* is listed twice\)",
    ),
    "link out of the folder": (lambda c: link_out(c, "file"), f"1 problem: {SHARD2}: a link out of the folder"),
    "folder linked out of the folder": (lambda c: link_out(c, "folder"), f"1 problem: sub/{SHARD2}: a link out of the folder"),
    "pickle": (to_pickle, "1 problem: pytorch_model.bin: not a .safetensors file; nothing else is read"),
    "pipe": (pipe, rf"{DAMAGED}\(not a file\)"),
    "packed without scale": (lambda c: remove(c, f"{EXPERT}scale"), rf"1 problem: {EXPERT}scale: missing; expected U8 \[32, 2\]"),
    "odd packed width": (
        lambda c: c.edit(f"{EXPERT}packed", lambda a: a[:, :31].copy()),
        rf"1 problem: {EXPERT}packed: found U8 \[32, 31\], expected U8 \[32, 32\]",
    ),
    "config that contradicts the tensors": (
        contradict,
        r"600 problems: .*experts\.\*\.w1\.weight_packed \(96 of them\): found U8 \[64, 16\], expected U8 \[32, 16\]; .*"
        r"shared_experts\.up_proj\.weight \(8 of them\): found BF16 \[128, 64\], expected BF16 \[64, 64\]$",
    ),
    "missing": (lambda c: remove(c, GATE), rf"1 problem: {GATE}: missing; expected BF16 \[12, 64\]"),
    "extra": (lambda c: add(c, "lm_head.bias"), "1 problem: lm_head.bias: not a tensor of this model"),
    "misshaped": (
        lambda c: c.edit(GATE, lambda a: a.T.copy()),
        rf"{GATE}: found BF16 \[64, 12\], expected BF16 \[12, 64\]",
    ),
    "mistyped": (
        lambda c: c.edit(GATE, lambda a: a.astype(np.float64)),
        rf"{GATE}: found F64 \[12, 64\], expected BF16 \[12, 64\]",
    ),
    "shard missing": (
        lambda c: (c.folder / SHARD2).unlink(),
        f"1 problem: {SHARD2}: the index names this shard, but there is no such file",
    ),
    "wrong shard": (
        lambda c: c.edit_index(**{GATE: SHARD1}),
        f"1 problem: {GATE}: the index says {SHARD1}, which does not hold it",
    ),
    "not in the index": (
        lambda c: c.edit_index(**{GATE: None}),
        f"1 problem: {GATE}: in {SHARD2}, but not in the index",
    ),
    "absolute path": (
        lambda c: c.edit_index(**{GATE: str(c.folder / SHARD2)}),
        f"{SHARD2}: the index names a path outside the folder",
    ),
    "path upwards": (
        lambda c: c.edit_index(**{GATE: f"../{c.folder.name}/{SHARD2}"}),
        rf"\.\./k3_tiny/{SHARD2}: the index names a path outside the folder",
    ),
    "data cut short": (lambda c: cut(c, -1), f"1 problem: {SHARD2}: the shard is cut short or damaged"),
    "header cut short": (lambda c: cut(c, 1000), f"1 problem: {SHARD2}: the shard is cut short or damaged"),
    "empty": (lambda c: cut(c, 0), f"1 problem: {SHARD2}: the shard is cut short or damaged"),
    "many": (
        unlist_scales,
        rf"12 problems: .*\.layers\.\*\..*\.experts\.\*\.w1\.weight_scale \(12 of them\): in {SHARD2}, but not in the index$",
    ),
    "many kinds": (
        lambda c: [remove(c, name) for name in list(c.weight_map) if "vision" in name or "projector" in name],
        "18 problems: .*: missing; .*; and 2 more kinds$",
    ),
    "index missing": (
        lambda c: (c.folder / "model.safetensors.index.json").unlink(),
        "found neither model.safetensors.index.json nor model.safetensors",
    ),
    "index cut short": (
        lambda c: (c.folder / "model.safetensors.index.json").write_text('{"weight_map": {'),
        "model.safetensors.index.json: not readable as JSON",
    ),
    "index without a map": (
        lambda c: (c.folder / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'),
        "model.safetensors.index.json: 'weight_map' must map",
    ),
    "index with a wrong header": (
        lambda c: (c.folder / "model.safetensors.index.json").write_text('{"weight_map": {}, "metadata": 3}'),
        "model.safetensors.index.json: 'metadata' must be",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_before_data_is_read(copy_golden, monkeypatch, damage):
    copy = copy_golden("k3_tiny")
    change, message = DAMAGE[damage]
    change(copy)
    monkeypatch.setattr(Checkpoint, "read", lambda self, spans, out: pytest.fail(f"read {next(iter(spans))}"))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_hf(copy.folder)
    assert "\n" not in str(caught.value) and str(copy.folder) in str(caught.value)


def test_tensors_without_values_are_not_missed(copy_golden):
    """Of no shared experts, other programs keep matrices of width 0."""
    copy = copy_golden("kimi_linear_tiny")
    for name in [name for name in copy.weight_map if "shared_experts" in name]:
        copy.edit(name, lambda a, wide="down" in name: a[:, :0].copy() if wide else a[:0].copy())
    cfg = dataclasses.replace(ModelConfig.from_hf(copy.folder), num_shared_experts=0)
    assert "shared_experts" not in {part for path in flatten_dict(load_hf(copy.folder, cfg)) for part in path}


@pytest.mark.parametrize("experts", ["dequantized", "packed"])
def test_scale_code_0xff(copy_golden, experts):
    copy = copy_golden("k3_tiny")
    name = LAYER5 + "block_sparse_moe.experts.3.w2.weight_scale"

    def spoil(scale):
        scale[[4, 9], 1] = 0xFF
        return scale

    copy.edit(name, spoil)
    with pytest.raises(CheckpointError, match=f"{name}: 2 of its 64 scale codes are 0xFF"):
        load_hf(copy.folder, experts=experts)


NONFINITE = r"values are NaN or infinite; allow_nonfinite takes what it names as it is"


@pytest.mark.parametrize("model", ["k3_tiny", "kimi_linear_tiny"])
@pytest.mark.parametrize("small", [False, True], ids=["whole", "in pieces"])
def test_a_value_that_is_not_finite_is_named_whichever_float_tensor_it_is_in(copy_golden, monkeypatch, model, small):
    """One tensor of every leaf, the last value: NaN, infinity and what else has all bits of the exponent."""
    if small:
        monkeypatch.setattr(pieces, "PIECE_BYTES", 5000)
        monkeypatch.setattr(load, "PIECE_BYTES", 5000)
    folder = copy_golden(model).folder
    cfg, kept = ModelConfig.from_hf(folder), 0
    checkpoint = open_checkpoint(folder)
    values = [np.nan, -np.nan, np.inf, -np.inf]
    for number, leaf in enumerate(leaf for leaf in table(cfg) if leaf.dtype != "U8"):
        name, width = leaf.names(leaf.repeats - 1)[-1], DTYPES[leaf.dtype].itemsize
        shard, last = checkpoint.weight_map[name], width * math.prod(leaf.shape) - width
        place = checkpoint.shards[shard].begins[name] + last
        with open(folder / shard, "r+b") as file:
            file.seek(place)
            before = file.read(width)
            file.seek(place)
            file.write(np.array(values[number % 4], DTYPES[leaf.dtype]).tobytes())
        whole = tuple(slice(0, size) for size in leaf.tree_shape)
        strict, lenient = (released_arrays(cfg, checkpoint, np.dtype(np.float32), "dequantized", a) for a in ((), (name,)))
        message = f"{re.escape(f'{folder / shard}: {name}: 1 of its {math.prod(leaf.stored)} ')}{NONFINITE}"
        with pytest.raises(CheckpointError, match=message):
            strict[leaf.path].read(whole)
        np.testing.assert_equal(lenient[leaf.path].read(whole).reshape(-1)[-1], np.float32(values[number % 4]))
        with open(folder / shard, "r+b") as file:
            file.seek(place)
            file.write(before)
        strict[leaf.path].read(whole)
        kept += 1
    assert kept > 30


@pytest.mark.parametrize("on", ["one device", "a mesh"])
def test_what_is_not_finite_is_loaded_when_it_is_named(copy_golden, on):
    copy = copy_golden("kimi_linear_tiny")
    names = [f"model.layers.{i}.self_attn.A_log" for i in (0, 1)]
    for name in names:
        copy.edit(name, lambda a: np.full_like(a, np.nan))
    mesh = make_mesh(fsdp=2, expert=2) if on == "a mesh" else None
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.A_log: 3 of its 3 values are NaN or infinite; allow"):
        load_hf(copy.folder, mesh=mesh)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.A_log: 3 of its 3 values"):
        load_hf(copy.folder, mesh=mesh, allow_nonfinite=names[:1])
    for patterns in (names, ["*.A_log"], ["*"]):
        flat = flatten_dict(load_hf(copy.folder, mesh=mesh, allow_nonfinite=patterns))
        assert sum(int(jnp.isnan(x).sum()) for x in flat.values()) == 6
        if on == "a mesh":
            break
    with pytest.raises(ValueError, match="allow_nonfinite: 'A_log' is the name of no tensor of this model, nor a pattern"):
        load_hf(copy.folder, allow_nonfinite=["A_log"])


def test_all_finite():
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64):
        top = ml_dtypes.finfo(dtype).max
        values = np.zeros(300_000, dtype)
        values[:4] = [top, -top, -0.0, ml_dtypes.finfo(dtype).smallest_subnormal]
        assert all_finite(values) and all_finite(values[:0]) and all_finite(values.reshape(500, 600)[:, ::7])
        for place, value in ((0, np.nan), (150_000, -np.nan), (299_999, np.inf), (7, -np.inf)):
            spoilt = values.copy()
            spoilt[place] = value
            assert not all_finite(spoilt)


def test_packed_byte_0xff_is_two_values_of_minus_six(copy_golden):
    copy = copy_golden("k3_tiny")
    copy.edit(LAYER5 + "block_sparse_moe.experts.3.w2.weight_packed", lambda a: np.full_like(a, 0xFF))
    load_hf(copy.folder)


def test_a_log_padding_that_is_not_zero(copy_golden):
    copy = copy_golden("k3_tiny")
    name = LAYER5 + "self_attn.A_log"

    def spoil(a):
        a[[3, 127]] = 1e-30
        return a

    copy.edit(name, spoil)
    with pytest.raises(CheckpointError, match=f"{name}: 2 of its 125 padding values are not zero"):
        load_hf(copy.folder)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"experts": "quantized"}, "experts: found 'quantized', must be 'dequantized' or 'packed'"),
        ({"experts": "packed"}, "experts: 'packed' needs MXFP4 experts"),
        ({"param_dtype": jnp.float16}, "param_dtype: found float16, must be float32, bfloat16 or float64"),
    ],
)
def test_wrong_arguments(copy_golden, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_hf(copy_golden("kimi_linear_tiny").folder, **arguments)


def test_float64_without_x64(copy_golden):
    with jax.enable_x64(False), pytest.raises(ValueError, match="param_dtype: float64 needs jax_enable_x64"):
        load_hf(copy_golden("kimi_linear_tiny").folder, param_dtype=jnp.float64)


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}/none"):
        load_hf(tmp_path / "none")


def test_inside():
    assert all(inside(name) for name in ("a.safetensors", "shards/a.safetensors", "..a", "a..b"))
    outside = ("/a", "../a", "b/../../a", r"..\a", r"C:\a", r"\\host\share\a", "")
    assert not any(inside(name) for name in outside)
