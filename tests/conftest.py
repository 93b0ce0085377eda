"""Eight simulated devices, float64 available, and strict promotion for every test; models and checkpoints to share."""

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is compilation, and nothing here is timed.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax  # noqa: E402
import pytest  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

import k3jax  # noqa: E402
from k3jax.text import train_tokenizer  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module", autouse=True)
def programs_of_one_file(request):
    """Compiled programs go when their file's tests are done: XLA crashes where a process has too many of them."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def tiny():
    """A Kimi K3 of bytes with one KDA and one MLA layer, the smallest that has every part but the latent of the experts."""
    return k3jax.ModelConfig(
        model_type="kimi_k3",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mla_use_output_gate=True,
        kda_layers=(1,),
        full_attn_layers=(2,),
        kda_head_dim=16,
        kda_num_heads=2,
        gate_lower_bound=-5.0,
        use_full_rank_gate=True,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        hidden_act="situ",
        attn_res_block_size=2,
        quantized_experts=True,
    )


@pytest.fixture(scope="session")
def tiny_linear():
    """A Kimi-Linear of one dense KDA layer, one KDA and one MLA layer with experts."""
    return k3jax.ModelConfig(
        model_type="kimi_linear",
        vocab_size=96,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        kda_layers=(1, 2),
        full_attn_layers=(3,),
        kda_head_dim=8,
        kda_num_heads=2,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=16,
        eos_token_id=2,
    )


@pytest.fixture(scope="session")
def refusal():
    """Runs a command that must fail by itself, in a process: what it says, in one line, soon after which it has ended."""

    def run(*argv, code=2, seconds=5, cwd=None, **env):
        command = [sys.executable, "-m", "k3jax", *map(str, argv)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"} | env
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=cwd, env=env, text=True, **pipes)
        try:
            line = process.stderr.readline()
            told = time.monotonic()
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()
        assert line.startswith("error: ") and rest == "", line + rest
        assert process.returncode == code
        assert time.monotonic() - told <= seconds
        return line.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """Folder of a tokenizer of the released kind with 2,560 ids, trained on some sources and on other scripts."""
    folder = tmp_path_factory.mktemp("words")
    sources = [Path(json.__file__), Path(shutil.__file__), Path(os.__file__)]
    scripts = [
        "Der Käse — naïve Straße, déjà vu. Съешь ещё этих мягких булок. Ελληνικά γράμματα.\n" * 9,
        "你好，世界！我是学生。漢字とかなとカタカナ。안녕하세요 세계.\n" * 9,
        "مرحبا بالعالم שלום עולם नमस्ते दुनिया 🙂👩‍💻\n" * 9,
    ]
    train_tokenizer([*(source.read_text(encoding="utf-8") for source in sources), *scripts], 2560, folder)
    return folder


ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
INDEX = "model.safetensors.index.json"


class Copy:
    """A copy of a golden checkpoint folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def weight_map(self) -> dict[str, str]:
        return json.loads((self.folder / INDEX).read_text())["weight_map"]

    def edit_index(self, **weight_map: str | None) -> None:
        """Sets entries of the weight map; None removes one."""
        index = json.loads((self.folder / INDEX).read_text())
        entries = (index["weight_map"] | weight_map).items()
        index["weight_map"] = {name: shard for name, shard in entries if shard is not None}
        (self.folder / INDEX).write_text(json.dumps(index))

    def edit(self, name: str, change) -> None:
        """Replaces a tensor by change(tensor), or removes it where that is None; the index stays as it is."""
        file = self.folder / self.weight_map.get(name, "model-00001-of-00002.safetensors")
        tensors = load_file(file)
        tensors[name] = change(tensors.get(name))
        save_file({key: value for key, value in tensors.items() if value is not None}, file)


@pytest.fixture
def copy_golden(tmp_path):
    """Makes a writable copy of a golden checkpoint."""
    def copy(name: str) -> Copy:
        folder = tmp_path / name
        folder.mkdir()
        for file in (*(DATA / name).glob("model*"), DATA / name / "config.json"):
            shutil.copy(file, folder)
        return Copy(folder)

    return copy
