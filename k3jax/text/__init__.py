"""Text to token ids and back. Nothing here imports JAX."""

from __future__ import annotations

from pathlib import Path

from k3jax.paths import expand
from k3jax.text.base import Stream, Tokenizer, printable
from k3jax.text.bytes import ByteTokenizer
from k3jax.text.files import (
    LIBRARY,
    RANKS,
    copy_tokenizer,
    has_tokenizer,
    read_files,
    read_stop_ids,
    tokenizer_files,
    write_files,
)
from k3jax.text.library import LibraryTokenizer
from k3jax.text.ranks import RankTokenizer
from k3jax.text.train import train_tokenizer

__all__ = [
    "ByteTokenizer",
    "Stream",
    "Tokenizer",
    "copy_tokenizer",
    "has_tokenizer",
    "load_tokenizer",
    "printable",
    "read_files",
    "tokenizer_files",
    "train_tokenizer",
    "write_files",
]


def load_tokenizer(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a folder: of its tiktoken.model, else its tokenizer.json, else bytes.

    `vocab_size`: the model's. `stop_ids` are what the folder's config.json, generation_config.json and
    tokenizer_config.json name, together.

    Raises:
        ValueError: a damaged file, in one line that names it; a tokenizer with more ids than the model has; no file for
            a model whose tokens are not bytes.

    Example:
        >>> load_tokenizer("/data/kimi-k3", 163840).kind
        'tiktoken'
    """
    folder = Path(expand(folder))
    if (folder / RANKS).is_file():
        tokenizer = RankTokenizer(folder)
    elif (folder / LIBRARY).is_file():
        tokenizer = LibraryTokenizer(folder)
    elif vocab_size in (None, ByteTokenizer.vocab_size):
        tokenizer = ByteTokenizer()
    else:
        raise ValueError(
            f"{folder}: found neither {RANKS} nor {LIBRARY}, must hold one: the model has vocab_size={vocab_size}, and "
            f"only {ByteTokenizer.vocab_size} can be bytes"
        )
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{folder}: its tokenizer ({tokenizer.kind}) has {tokenizer.vocab_size} ids, must have at most the model's "
            f"vocab_size={vocab_size}"
        )
    tokenizer.stop_ids = read_stop_ids(folder, tokenizer.markers)
    return tokenizer
