"""Kimi-Linear-48B-A3B: the released parent of Kimi K3, 49 billion parameters, 3 billion active a token.

A model for other configs to build on: `runpy.run_path("configs/kimi_linear_48b.py")["model"]`.
"""

from k3jax.config import ModelConfig

model = ModelConfig(
    model_type="kimi_linear",
    vocab_size=163840,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=27,
    num_attention_heads=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_layers=tuple(i for i in range(1, 27) if i % 4),
    full_attn_layers=(*range(4, 27, 4), 27),
    kda_head_dim=128,
    kda_num_heads=32,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_scaling_factor=2.446,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)
