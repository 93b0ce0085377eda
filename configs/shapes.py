"""A small Kimi K3 with its vision tower learns to say what a picture shows.

Command: python launch/shapes.py runs/shapes/data && python -m k3jax train --config configs/shapes.py
Time: 100 s of CPU time. Result: held-out loss about 0.08 nats per byte (0.123 is the least without seeing): the colours.
"""

import dataclasses
import runpy
from pathlib import Path

from k3jax.config import VisionConfig
from k3jax.run_config import DataConfig, RunConfig, TrainConfig

# Two layers of the quickstart's model, and byte 255, which no text holds, for images.
model = dataclasses.replace(
    runpy.run_path(str(Path(__file__).with_name("quickstart.py")))["model"],
    initializer_range=0.1,  # a larger start than the release's sees sooner
    num_hidden_layers=2,
    kda_layers=(1,),
    full_attn_layers=(2,),
    vision=VisionConfig(
        patch_size=14,
        init_pos_emb_height=8,
        init_pos_emb_width=8,
        init_pos_emb_time=4,
        vt_num_attention_heads=4,
        vt_num_hidden_layers=3,
        vt_hidden_size=96,
        vt_intermediate_size=192,
        qkv_hidden_size=128,
        mm_hidden_size=96,
        text_hidden_size=128,
        media_placeholder_token_id=255,
    ),
)

config = RunConfig(
    model=model,
    data=DataConfig(pairs=("runs/shapes/data/pairs.jsonl",), seq_len=128, batch_size=8),
    train=TrainConfig(
        steps=300, learning_rate=4e-3, warmup_fraction=0.1, qat=False, remat=False, checkpoint_every=100, log_every=20
    ),
    out="runs/shapes/run",
)
