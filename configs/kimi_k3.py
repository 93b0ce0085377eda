"""Kimi K3: the released model of 2.8 trillion parameters, 104 billion active a token.

A model for other configs to build on: `runpy.run_path("configs/kimi_k3.py")["model"]`.
"""

from k3jax.config import ModelConfig, VisionConfig

model = ModelConfig(
    model_type="kimi_k3",
    vocab_size=163840,
    hidden_size=7168,
    intermediate_size=33792,
    num_hidden_layers=93,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_output_gate=True,
    kda_layers=tuple(i for i in range(1, 93) if i % 4),
    full_attn_layers=(*range(4, 93, 4), 93),
    kda_head_dim=128,
    kda_num_heads=96,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    latent_moe_use_norm=True,
    hidden_act="situ",
    attn_res_block_size=12,
    quantized_experts=True,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
    vision=VisionConfig(
        patch_size=14,
        init_pos_emb_height=64,
        init_pos_emb_width=64,
        init_pos_emb_time=4,
        vt_num_attention_heads=12,
        vt_num_hidden_layers=27,
        vt_hidden_size=1024,
        vt_intermediate_size=4096,
        qkv_hidden_size=1536,
        mm_hidden_size=1024,
        text_hidden_size=7168,
        media_placeholder_token_id=163605,
    ),
)
