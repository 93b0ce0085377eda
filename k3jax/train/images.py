"""The images of packed rows, read when a batch needs them."""

from __future__ import annotations

from collections.abc import Sequence

from k3jax.chat.encode import MEDIA_PAD
from k3jax.config import VisionConfig
from k3jax.data.encoding import ImageFile
from k3jax.data.packed import ReadImages
from k3jax.text import Tokenizer
from k3jax.vision.batch import UNIT, Images, bucket, pack
from k3jax.vision.image import Patches, preprocess


def reader(cfg: VisionConfig | None, tokenizer: Tokenizer, unit: int = UNIT) -> ReadImages | None:
    """What `PackedDataset` reads images with: `Images` of one shape for all batches. None where the model has no vision.

    `unit`: of the buckets of patches, see `patch_unit`. When it reads, an image that cannot be read, or has another size than when its
    row was made, is a ValueError that names its file.

    Raises:
        ValueError: a tokenizer whose `<|media_pad|>` is not the model's placeholder.

    Example:
        >>> data = PackedDataset(corpus.rows("train"), 8, images=reader(cfg.vision, tokenizer))
    """
    if cfg is None:
        return None
    found, right = cfg.media_placeholder_token_id, tokenizer.markers.get(MEDIA_PAD)
    if right not in (None, found):
        raise ValueError(f"media_placeholder_token_id={found}: must be {right}, the tokenizer's {MEDIA_PAD}")

    def read(rows: Sequence[Sequence[ImageFile]], patches: int) -> Images:
        return pack(cfg, [[_read(image, cfg) for image in row] for row in rows], room=bucket(patches, unit))

    return read


def _read(image: ImageFile, cfg: VisionConfig) -> Patches:
    patches = preprocess(image.path, cfg)
    if patches.grid != image.grid:
        found, made = ("x".join(map(str, grid[1:])) for grid in (patches.grid, image.grid))
        raise ValueError(f"{image.path}: found {found} patches, must be {made} as when its row was made; make the corpus anew")
    return patches
