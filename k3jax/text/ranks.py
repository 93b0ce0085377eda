"""The released tokenizer: a file of byte-pair ranks, the released split rule, 256 markers behind the ranks.

The `tiktoken` library splits and merges; nothing is downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import tiktoken

from k3jax.text.base import TableTokenizer
from k3jax.text.files import CONFIG, RANKS, read_json

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
# What is merged is never longer than a match of this; alternatives in order.
SPLIT = "|".join((
    r"[\p{Han}]+",
    f"{_BEFORE}[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
    f"{_BEFORE}[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip

MARKERS = 256  # ids behind the ranks
# By their distance from the first of them; every other one is <|reserved_token_ID|>.
NAMES = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>",
    18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
    254: "[UNK]", 255: "[PAD]",
}  # fmt: skip

# The released code cuts longer texts and longer runs of white space or of anything else; ids depend on it.
_LONGEST_TEXT, _LONGEST_RUN = 400_000, 25_000  # characters
_RUN, _SPACE = re.compile(r"\s+|\S+"), re.compile(r"\s")


class RankTokenizer(TableTokenizer):
    """Ids of the ranks in `folder`/tiktoken.model, and 256 markers behind them.

    The markers have the names that `added_tokens_decoder` of tokenizer_config.json gives their ids, or, without that,
    the released ones.

    Raises:
        ValueError: naming the file, the line and what is wrong with it.

    Example:
        >>> RankTokenizer("/data/kimi-k3").encode("The quick brown fox")
        array([ 1008,  5072, 16331, 69275], dtype=int32)
    """

    kind = "tiktoken"

    def __init__(self, folder: str | Path):
        path = Path(folder) / RANKS
        content = path.read_bytes()
        ranks = _read_ranks(path, content)
        markers = _markers(Path(folder) / CONFIG, len(ranks))
        try:
            super().__init__([*ranks, *[None] * MARKERS], markers)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self._core = tiktoken.Encoding(
            path.name,
            pat_str=SPLIT,
            mergeable_ranks={token: id for id, token in enumerate(ranks)},
            special_tokens=markers,
        )
        names = json.dumps(sorted(markers.items()))
        self.identity = hashlib.sha256(b"\n".join((self.kind.encode(), content, names.encode()))).hexdigest()

    def _encode_whole(self, text: str) -> list[int]:
        if len(text) <= _LONGEST_RUN:
            return self._core.encode_ordinary(text)
        return [id for part in _cut(text) for id in self._core.encode_ordinary(part)]


def _cut(text: str) -> Iterator[str]:
    """Parts of `text` of at most 400,000 characters whose runs of white space, or without any, have at most 25,000."""
    for first in range(0, len(text), _LONGEST_TEXT):
        part, begin = text[first : first + _LONGEST_TEXT], 0
        for run in _RUN.finditer(part) if _may_have_long_run(part) else ():
            for end in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                yield part[begin:end]
                begin = end
        yield part[begin:]


def _may_have_long_run(text: str) -> bool:
    """A run that is too long fills a whole block of half that length; where none is filled, no run is looked for."""
    half = _LONGEST_RUN // 2
    blocks = (text[first : first + half] for first in range(0, len(text) - half + 1, half))
    return any(block.isspace() or not _SPACE.search(block) for block in blocks)


def _read_ranks(path: Path, content: bytes) -> list[bytes]:
    """Tokens in the order of their ranks, from lines of base64 and rank."""
    ranks: dict[int, bytes] = {}
    seen: set[bytes] = set()
    for number, line in enumerate(content.splitlines(), 1):
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits) if digits.isdigit() else -1
        except ValueError:  # binascii's is one
            rank = -1
        if rank < 0:
            raise ValueError(
                f"{path}:{number}: found {line[:60].decode(errors='replace')!r}, must be a token in base64 and its rank"
            )
        if rank in ranks or token in seen:
            first = f"rank {rank}" if rank in ranks else f"token {token!r:.40}"
            raise ValueError(f"{path}:{number}: {first} was there before, must be another one on every line")
        ranks[rank] = token
        seen.add(token)
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        raise ValueError(
            f"{path}: no token has rank {missing}, but {len(ranks)} tokens have ranks 0 to {len(ranks) - 1}"
        )
    return [ranks[rank] for rank in range(len(ranks))]


def _markers(path: Path, first: int) -> dict[str, int]:
    """Ids of the markers by name."""
    names = {first + place: name for place, name in NAMES.items()}
    added = read_json(path).get("added_tokens_decoder") if path.is_file() else None
    if added is not None:
        try:
            names = {int(id): token["content"] for id, token in added.items()}
            ids = sorted(names)
            strings = all(isinstance(name, str) for name in names.values())
        except (AttributeError, KeyError, TypeError, ValueError):
            strings = False
        if not strings:
            raise ValueError(
                f'{path}: added_tokens_decoder must have entries such as "{first}": {{"content": "[BOS]"}}'
            )
        outside = [id for id in ids if not first <= id < first + MARKERS]
        if outside:
            raise ValueError(
                f"{path}: added_tokens_decoder has id {outside[0]}, must be {first} to {first + MARKERS - 1}, behind "
                f"the {first} ranks of {RANKS}"
            )
    by_name: dict[str, int] = {}
    for id in range(first, first + MARKERS):
        name = names.get(id, f"<|reserved_token_{id}|>")
        if name in by_name:
            raise ValueError(f"{path}: added_tokens_decoder names both {by_name[name]} and {id} {name}")
        by_name[name] = id
    return by_name


def write_ranks(folder: str | Path, tokens: list[bytes]) -> None:
    """Writes tiktoken.model for `tokens` in the order of their ranks, and the released markers' names.

    <|end_of_msg|> ends generation.
    """
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (Path(folder) / RANKS).write_bytes(b"".join(lines))
    added = {str(len(tokens) + place): {"content": name, "special": True} for place, name in NAMES.items()}
    config = {"added_tokens_decoder": added, "eos_token": NAMES[2]}
    (Path(folder) / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
