"""(images, text) pairs from JSONL files, as rows of bytes and image tokens.

A byte that no UTF-8 text holds stands for images: `media_placeholder_token_id` of a byte model is 245 to 255.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3jax import strict_json
from k3jax.config import VisionConfig
from k3jax.paths import expand, read_text
from k3jax.text import ByteTokenizer, Tokenizer
from k3jax.train.data import Batch, RowDataset
from k3jax.vision.batch import UNIT, bucket, pack, tokens_of, widen
from k3jax.vision.image import file_grid, preprocess

IMAGE = "<image>"  # stands for the next image in a text
NOT_UTF8 = range(0xF5, 0x100)


class Pair(NamedTuple):
    """One text and its images: each a file, or the files of a clip's frames."""

    images: tuple[Path | tuple[Path, ...], ...]
    text: str
    where: str  # "file:line"


def encode_pair(
    text: str, images: int, cfg: VisionConfig, tokenizer: Tokenizer | type[ByteTokenizer] = ByteTokenizer
) -> np.ndarray:
    """Ids [T] int32 of a text whose every `<image>` is a placeholder; a text without any has its images first.

    Raises:
        ValueError: another number of `<image>` than images, or a placeholder that is a byte of text.

    Example:
        >>> encode_pair("a <image>", 1, cfg.vision)      # media_placeholder_token_id=255
        array([ 97,  32, 255], dtype=int32)
    """
    placeholder = cfg.media_placeholder_token_id
    if tokenizer.kind == "bytes" and placeholder not in NOT_UTF8:
        raise ValueError(
            f"media_placeholder_token_id: found {placeholder}, must be {NOT_UTF8[0]} to {NOT_UTF8[-1]} in a byte "
            "model: a byte that no UTF-8 text holds"
        )
    if tokenizer.kind != "bytes" and placeholder not in tokenizer.markers.values():
        raise ValueError(
            f"media_placeholder_token_id: found {placeholder}, must be a marker of its tokenizer ({tokenizer.kind}, "
            f"{tokenizer.vocab_size} tokens): an id that no text becomes"
        )
    parts = text.split(IMAGE)
    if len(parts) == 1:
        parts = [""] * images + parts
    if len(parts) - 1 != images:
        raise ValueError(
            f"found {len(parts) - 1} {IMAGE} in the text, must be {images} like its images (or none: they come first)"
        )
    ids = [np.full(1, placeholder, np.int32)] * (2 * len(parts) - 1)
    ids[::2] = [tokenizer.encode(part) for part in parts]
    return np.concatenate(ids)


def find_pairs(paths: Sequence[str]) -> list[Pair]:
    """The pairs of JSONL files, one `{"image": ..., "text": ...}` a line.

    "image" is a path, or a list whose entries are paths and, for clips, lists of the frames' paths; all relative to the
    JSONL file's folder, `~` being a home folder. Raises ValueError naming file and line.

    Example:
        >>> find_pairs(["shapes/pairs.jsonl"])[0].text
        'a red disc'
    """
    pairs = []
    for path in map(Path, map(expand, paths)):
        try:
            lines = read_text(path).split("\n")  # JSON may hold the other characters that end a line
        except (OSError, ValueError) as error:
            raise ValueError(f"data.pairs: {path}: cannot be read as UTF-8 text ({error})") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                pairs.append(_pair(path, f"{path}:{number}", line))
    if not pairs:
        raise ValueError(f"data.pairs: no pair in {', '.join(map(str, paths))}")
    return pairs


def _pair(path: Path, where: str, line: str) -> Pair:
    try:
        record = strict_json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict) or set(record) != {"image", "text"} or not isinstance(record["text"], str):
        raise ValueError(f'{where}: found {line:.60}, must be {{"image": a path or a list of them, "text": a string}}')
    images = record["image"] if isinstance(record["image"], list) else [record["image"]]
    for image in images:
        for frame in image if isinstance(image, list) and image else [image]:
            if not isinstance(frame, str) or not frame.strip():
                raise ValueError(f"{where}: found image {frame!r:.60}, must be a path")
    beside = lambda name: path.parent / expand(name)  # noqa: E731
    found = (tuple(map(beside, image)) if isinstance(image, list) else beside(image) for image in images)
    return Pair(tuple(found), record["text"], where)


def split_pairs(pairs: Sequence[Pair], held_out: float) -> tuple[list[Pair], list[Pair]]:
    """(train, held-out): the pairs whose content's SHA-256 is lowest are held out, at least one."""
    if len(pairs) < 2:
        raise ValueError(f"data.pairs: found {len(pairs)} pair, a split into train and held-out needs 2")
    count = min(max(1, round(held_out * len(pairs))), len(pairs) - 1)

    def rank(i):
        frames = (image if isinstance(image, tuple) else [image] for image in pairs[i].images)
        names = [[frame.name for frame in image] for image in frames]
        return hashlib.sha256(json.dumps([names, pairs[i].text]).encode()).digest()

    held = set(sorted(range(len(pairs)), key=rank)[:count])
    return [p for i, p in enumerate(pairs) if i not in held], [p for i, p in enumerate(pairs) if i in held]


class PairDataset(RowDataset):
    """Pairs packed whole into rows of T = `seq_len`, in their order; every row's images into one bucket of patches.

    A batch is `ByteDataset`'s dictionary with `images`, an `Images` of the same rows. A placeholder is no target: only
    text is learnt. A pair of n tokens, image tokens included, takes n - 1 places. Files are opened once for their sizes, and
    their pixels are read when a batch needs them; in memory are the texts.

    Raises:
        ValueError: naming a pair that does not fit a row, or whose image cannot be read.

    Example:
        >>> PairDataset(pairs, cfg.vision, seq_len=256, batch_size=8).batch(0)["images"].patches.shape
        (8, 448, 3, 14, 14)
    """

    key = "data.pairs"

    def __init__(
        self, pairs: Sequence[Pair], cfg: VisionConfig, seq_len: int, batch_size: int, seed: int = 0, unit: int = UNIT
    ):
        super().__init__(seq_len, batch_size, seed)
        self._pairs, self._cfg = list(pairs), cfg
        self._rows: list[list[int]] = []
        self._grids, room, most = [], 0, 0
        patches = 0
        for i, pair in enumerate(self._pairs):
            grids = [self._grid(pair, image) for image in pair.images]
            length = len(self._ids(pair)) - 1 + sum(tokens_of(grid, cfg) - 1 for grid in grids)
            if not 1 <= length <= seq_len:
                raise ValueError(
                    f"{pair.where}: found {length + 1} tokens, image tokens included, "
                    f"must be 2 to data.seq_len+1={seq_len + 1}"
                )
            if length > room:
                self._rows.append([])
                room, patches = seq_len, 0
            self._rows[-1].append(i)
            self._grids.append(grids)
            room, patches = room - length, patches + sum(int(np.prod(grid)) for grid in grids)
            most = max(most, patches)
        self._patches = bucket(most, unit)

    def __len__(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def identity(self) -> str:
        return hashlib.sha256(repr([(pair.text, grids) for pair, grids in zip(self._pairs, self._grids)]).encode()).hexdigest()

    def _ids(self, pair: Pair) -> np.ndarray:
        try:
            ids = encode_pair(pair.text, len(pair.images), self._cfg)
        except ValueError as error:
            raise ValueError(f"{pair.where}: {error}") from None
        if len(ids) and ids[-1] == self._cfg.media_placeholder_token_id:
            # The last token is a target alone: of the image, one token less would be seen than it has.
            raise ValueError(f"{pair.where}: found an image at the end, must be before text that can be learnt from it")
        return ids

    def _grid(self, pair: Pair, image) -> tuple[int, int, int]:
        frames = image if isinstance(image, tuple) else (image,)
        try:
            return len(frames), *file_grid(frames[0], self._cfg)[1:]
        except ValueError as error:
            raise ValueError(f"{pair.where}: {error}") from None

    def _read(self, pair: Pair):
        try:
            return [preprocess(image, self._cfg) for image in pair.images]
        except ValueError as error:
            raise ValueError(f"{pair.where}: {error}") from None

    def _cut(self, windows: np.ndarray, images: bool = True) -> Batch:
        shape = len(windows), self.seq_len
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segment_ids")}
        batch["weights"] = np.zeros(shape, np.float32)
        rows = [self._rows[row] if row < len(self) else [] for row in windows]
        for b, row in enumerate(rows):
            at = 0
            for number, i in enumerate(row, 1):
                ids = widen(self._cfg, self._ids(self._pairs[i])[None], self._grids[i])[0][0]
                here = slice(at, at + len(ids) - 1)
                batch["tokens"][b, here], batch["targets"][b, here] = ids[:-1], ids[1:]
                batch["segment_ids"][b, here] = number
                batch["weights"][b, here] = ids[1:] != self._cfg.media_placeholder_token_id
                at = here.stop
        if images:
            read = [[patches for i in row for patches in self._read(self._pairs[i])] for row in rows]
            batch["images"] = pack(self._cfg, read, room=self._patches)
        return batch
