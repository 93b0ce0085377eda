"""Eight simulated devices, float64 available, and strict promotion for every test."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is compilation, and nothing here is timed.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax  # noqa: E402
import pytest  # noqa: E402

import k3jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


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
