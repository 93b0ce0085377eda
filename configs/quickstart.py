"""The whole life of a small Kimi K3 on 8 simulated CPU devices (fsdp=2, expert=2, tensor=2), on real text.

Command: bash launch/quickstart.sh
Time: six minutes on 2 CPU cores, compilation included. Result: held-out loss about 2.3 nats per byte (a byte bigram has 2.47).
"""

from k3jax.config import ModelConfig
from k3jax.run_config import DataConfig, MeshConfig, RunConfig, TrainConfig

# Everything of the large model, small: three KDA layers to one MLA layer and one more MLA layer at the end, blocks of 4
# over 13 layers (the last is partial), a dense first layer, 16 experts of which 4 are active, and 2 shared.
model = ModelConfig(
    model_type="kimi_k3",
    vocab_size=256,  # bytes
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=13,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    q_lora_rank=64,
    mla_use_output_gate=True,
    kda_layers=(1, 2, 3, 5, 6, 7, 9, 10, 11),
    full_attn_layers=(4, 8, 12, 13),
    kda_head_dim=32,
    kda_num_heads=4,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=2,
    moe_intermediate_size=64,
    routed_expert_hidden_size=64,
    latent_moe_use_norm=True,
    hidden_act="situ",
    attn_res_block_size=4,
    quantized_experts=True,
)

config = RunConfig(
    model=model,
    data=DataConfig(seq_len=64, batch_size=8),
    train=TrainConfig(
        steps=205, learning_rate=2e-3, warmup_fraction=0.1, remat=False, checkpoint_every=50, eval_windows=256
    ),
    mesh=MeshConfig(fsdp=2, expert=2, tensor=2),
    out="runs/quickstart",
    cpu_devices=8,
)
