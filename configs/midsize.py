"""Kimi K3 at a width that two CPU cores train, to time: nine layers of 512, 8 heads, 8 experts of which 2 are active.

Command: python -m k3jax bench step --config configs/midsize.py
Time: three minutes on 2 CPU cores. Result: 48.3 % of the rate of a matrix product (JAX 0.12).
"""

from k3jax.config import ModelConfig
from k3jax.run_config import DataConfig, RunConfig, TrainConfig

model = ModelConfig(
    model_type="kimi_k3",
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=9,
    num_attention_heads=8,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    q_lora_rank=256,
    mla_use_output_gate=True,
    kda_layers=(1, 2, 3, 5, 6, 7),
    full_attn_layers=(4, 8, 9),
    kda_head_dim=64,
    kda_num_heads=8,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=8,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=512,
    routed_expert_hidden_size=256,
    latent_moe_use_norm=True,
    hidden_act="situ",
    attn_res_block_size=3,
)

config = RunConfig(
    model=model,
    data=DataConfig(seq_len=512, batch_size=2),
    train=TrainConfig(steps=100, qat=False, remat=False),
    out="runs/midsize",
)
