"""MoonViT-V2 and the projector: from packed patches to embeddings of the text model.

Patches are split over the devices of a row as the text's tokens are ("seq"), weights over fsdp alone: the released
tower has 12 heads, which few numbers of devices divide, and 0.4 of the 2,780 billion parameters.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from k3jax.config import VisionConfig
from k3jax.nn.layers import Policy, project, rms_norm, weight
from k3jax.ops.vit import frame_table, join_cells, position_embedding, rotary_2d, segment_attention
from k3jax.sharding import along, constrain, on_shards
from k3jax.vision.batch import Images


def tower_eps(policy: Policy) -> float:
    """Of the tower's norms, which name none in the release: the machine epsilon of the compute dtype."""
    return float(jnp.finfo(policy.dtype).eps)


class VisionLayer(nn.Module):
    """x + W_o attention(RMSNorm(x)), then + fc1 gelu(fc0 RMSNorm(x)); attention within an image or clip."""

    cfg: VisionConfig
    policy: Policy
    std: float

    @nn.compact
    def __call__(self, x: Array, images: Images):
        cfg, std = self.cfg, self.std
        D, F, H, K = cfg.vt_hidden_size, cfg.vt_intermediate_size, cfg.vt_num_attention_heads, cfg.head_dim
        eps = tower_eps(self.policy)
        row, part = ("batch",), ("batch", along("seq", x.shape[1]))
        norm = lambda name: weight(self, name, (D,), (None,))  # noqa: E731

        w = weight(self, "wqkv", (3, H, K, D), (None, None, None, "embed"), std)
        qkv = project(rms_norm(x, norm("norm0"), eps), w)
        q, k, v = constrain(qkv, *part, None, None, None).transpose(2, 0, 1, 3, 4)
        q, k = rotary_2d(q, images.places), rotary_2d(k, images.places)
        attend = on_shards(lambda *x: (segment_attention(*x),), [part, row, row, part, row], [part])
        (o,) = attend(q, k, v, images.ids, images.ids)
        x = constrain(x + project(o, weight(self, "wo", (D, H, K), ("embed", None, None), std)), *part, None)

        h = project(rms_norm(x, norm("norm1"), eps), weight(self, "fc0", (F, D), (None, "embed"), std))
        h = project(jax.nn.gelu(h, approximate=True), weight(self, "fc1", (D, F), ("embed", None), std))
        return constrain(x + h, *part, None), None


class VisionTower(nn.Module):
    """Patch embedding, positions, layers, norm; then cells joined and frames averaged."""

    cfg: VisionConfig
    policy: Policy
    std: float
    remat: bool = False

    @nn.compact
    def __call__(self, images: Images) -> Array:
        """Packed patches -> [B,P/cell,cell*D]: token j of a row at index j."""
        cfg, policy, std = self.cfg, self.policy, self.std
        D, p = cfg.vt_hidden_size, cfg.patch_size
        part = ("batch", along("seq", images.ids.shape[1]))
        x = constrain(images.patches.astype(policy.dtype), *part, None, None, None)
        x = project(x, weight(self, "proj", (D, 3, p, p), ("embed", None, None, None), std))
        grid = (cfg.init_pos_emb_height, cfg.init_pos_emb_width)
        table = weight(self, "pos_emb", (*grid, D), (None, None, "embed"), std)
        frames = frame_table(cfg.init_pos_emb_time, D)
        x = x + position_embedding(table, frames, images.places, images.grids).astype(policy.dtype)
        x = constrain(x, *part, None)
        layer = nn.remat(VisionLayer, prevent_cse=False) if self.remat else VisionLayer
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=cfg.vt_num_hidden_layers,
            in_axes=nn.broadcast,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(cfg, policy, std, name="blocks")(x, images)
        x = rms_norm(x, weight(self, "final_layernorm", (D,), (None,)), tower_eps(policy))
        return join_cells(constrain(x, "batch", None, None), images.slots, cfg.cell)


class Projector(nn.Module):
    """RMSNorm( W_2 gelu(W_0 x) ), with the exact gelu: [B,M,cell*D] -> [B,M,text width]."""

    cfg: VisionConfig
    policy: Policy
    std: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        cfg, std, width = self.cfg, self.std, self.cfg.joined_size
        x = constrain(x, "batch", along("seq", x.shape[1]), None)
        x = jax.nn.gelu(project(x, weight(self, "proj_0", (width, width), (None, "embed"), std)), approximate=False)
        x = project(x, weight(self, "proj_2", (cfg.text_hidden_size, width), ("embed", None), std))
        return rms_norm(x, weight(self, "post_norm", (cfg.text_hidden_size,), (None,)), cfg.projector_ln_eps)


def place_images(x: Array, features: Array, tokens: Array, images: Images, placeholder: int) -> Array:
    """Puts a row's image tokens, in order, where its placeholders stand.

    A row with another number of placeholders than image tokens, which a traced program cannot refuse, becomes NaN.

    Args:
        x: [B,T,D] embedded tokens. features: [B,M,D] image tokens. tokens: [B,T], placeholders widened.
    """
    is_image = tokens == placeholder
    place = jnp.cumsum(is_image, axis=1, dtype=jnp.int32) - 1
    fits = place[:, -1] == jnp.max(images.slots, axis=1)

    def put(x, features, is_image, place, fits):
        chosen = jnp.take_along_axis(features, jnp.maximum(place, 0)[..., None], axis=1, mode="clip")
        x = jnp.where(is_image[..., None], chosen.astype(x.dtype), x)
        return (jnp.where(fits[:, None, None], x, jnp.nan),)

    part = ("batch", along("seq", x.shape[1]))
    return on_shards(put, [part, ("batch",), part, part, ("batch",)], [part])(x, features, is_image, place, fits)[0]
