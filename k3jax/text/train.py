"""A tokenizer of one's own: byte pairs merged on given text, for small models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from k3jax.paths import expand
from k3jax.text.library import byte_characters
from k3jax.text.ranks import MARKERS, SPLIT, write_ranks


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> None:
    """Writes the files of a tokenizer of the released kind, with its split rule and markers, into `folder`.

    The pairs that are most frequent in `texts` are merged first, until there are `vocab_size` ids or the texts give no
    more; 256 of them are bytes and 256 markers. The same texts give the same files.

    Raises:
        ValueError: `vocab_size` has no room for bytes and markers.

    Example:
        >>> train_tokenizer(["some text", "and more"], 1024, "runs/words")
        >>> load_tokenizer("runs/words", 1024).encode("some").size
        1
    """
    if vocab_size < 256 + MARKERS:
        raise ValueError(f"vocab_size: found {vocab_size}, must be at least {256 + MARKERS}: bytes and markers")
    core = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - MARKERS, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainer)
    characters = byte_characters()
    in_order = sorted(core.get_vocab().items(), key=lambda item: item[1])
    folder = Path(expand(folder))
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder, [bytes([characters[character] for character in token]) for token, _ in in_order])
