"""The files of a folder that say how text becomes ids and what ends a generation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from k3jax import strict_json
from k3jax.paths import expand

RANKS = "tiktoken.model"
LIBRARY = "tokenizer.json"
CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
# With what other programs read beside them.
_TRAVEL = (RANKS, LIBRARY, CONFIG, GENERATION, "special_tokens_map.json", "added_tokens.json", "chat_template.*",
           "tokenization_*.py", "encoding_*.py")  # fmt: skip


def read_json(path: Path) -> dict:
    """The object of a JSON file; ValueError naming the file when there is none in it."""
    try:
        found = strict_json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: found {json.dumps(found):.60}, must be a JSON object")
    return found


def has_tokenizer(folder: str | Path) -> bool:
    """Whether tokens are anything but bytes there."""
    return any((Path(expand(folder)) / name).is_file() for name in (RANKS, LIBRARY))


def tokenizer_files(folder: str | Path) -> list[Path]:
    """The files that belong to the folder's tokenizer, in order of their names; none where tokens are bytes."""
    return sorted({path for name in _TRAVEL for path in Path(expand(folder)).glob(name) if path.is_file()})


def read_files(folder: str | Path) -> dict[str, bytes]:
    """Content of `tokenizer_files` by name."""
    return {path.name: path.read_bytes() for path in tokenizer_files(folder)}


def write_files(files: Mapping[str, bytes], folder: str | Path) -> None:
    """Writes what `read_files` gave into a folder, which is made; those of another tokenizer that were there go.

    Whenever it is stopped, each file is whole; what is the same already is left alone.
    """
    folder = Path(expand(folder))
    folder.mkdir(parents=True, exist_ok=True)
    for path in tokenizer_files(folder):
        if path.name not in files:
            path.unlink()  # part of another tokenizer would be read with this one
    for name, content in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            part = folder / f".{name}.part"
            part.write_bytes(content)
            os.replace(part, path)


def copy_tokenizer(source: str | Path, destination: str | Path) -> list[Path]:
    """Copies the tokenizer's files byte for byte into a folder, as `write_files` does, and returns the copies."""
    write_files(read_files(source), destination)
    return tokenizer_files(destination)


def read_stop_ids(folder: str | Path, ids: Mapping[str, int]) -> frozenset[int]:
    """Ids that end a generation: the union of what config.json (`text_config` too), generation_config.json and
    tokenizer_config.json name. `ids`: those of special tokens by name.

    Raises ValueError naming the file, the key and what it holds instead.
    """
    found: set[int] = set()
    for name in ("config.json", GENERATION):
        path = Path(folder) / name
        if not path.is_file():
            continue
        config = read_json(path)
        text = config.get("text_config")
        for part in (config, text if isinstance(text, dict) else {}):
            value = part.get("eos_token_id")
            values = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(id) is int and id >= 0 for id in values):
                raise ValueError(f"{path}: eos_token_id: found {json.dumps(value):.60}, must be an id or a list of ids")
            found.update(values)
    path = Path(folder) / CONFIG
    token = read_json(path).get("eos_token") if path.is_file() else None
    if token is not None:
        name = token.get("content") if isinstance(token, dict) else token
        if not isinstance(name, str) or name not in ids:
            raise ValueError(f"{path}: eos_token: found {json.dumps(token):.60}, must be the name of a special token")
        found.add(ids[name])
    return frozenset(found)
