"""Kimi K3 at a width where matrix products dominate, to time: eight layers of 2048 in blocks of two, 4 experts.

Command: python -m k3jax bench step --config configs/wide.py
Time: seven minutes on 2 CPU cores with --repeats 2, 15 GB of memory. Result: AttnRes adds 2.8 % to a training step and 1.3 %
to a decoding step (JAX 0.12).
"""

from k3jax.config import ModelConfig
from k3jax.run_config import DataConfig, RunConfig, TrainConfig

model = ModelConfig(
    model_type="kimi_k3",
    vocab_size=4096,
    hidden_size=2048,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    q_lora_rank=1024,
    mla_use_output_gate=True,
    kda_layers=(1, 2, 3, 5, 6, 7),
    full_attn_layers=(4, 8),
    kda_head_dim=128,
    kda_num_heads=16,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=4,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_expert_hidden_size=1024,
    latent_moe_use_norm=True,
    hidden_act="situ",
    attn_res_block_size=2,
)

config = RunConfig(
    model=model,
    data=DataConfig(seq_len=512, batch_size=2),
    train=TrainConfig(steps=100, qat=False, remat=False),
    out="runs/wide",
)
