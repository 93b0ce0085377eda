"""What a checkpoint holds, from its headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from k3jax.config import MX_BLOCK, ModelConfig
from k3jax.hf.files import INDEX, SINGLE, Header, beside, check, describe, open_checkpoint
from k3jax.hf.names import table
from k3jax.paths import expand
from k3jax.text import has_tokenizer, load_tokenizer

STRANGE = "not of this model"


class Report(NamedTuple):
    """What a checkpoint holds in words, whose last line tells the problems; and these, by the name of what they are with."""

    text: str
    problems: dict[str, str]

    def __str__(self) -> str:
        return self.text


class Tensor(NamedTuple):
    """One tensor or array of a checkpoint; `part` of the model, and the model parameters that it holds."""

    name: str
    header: Header
    part: str
    parameters: int


@dataclass
class _Part:
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    types: set[str] = field(default_factory=set)

    def add(self, tensor: Tensor) -> None:
        self.tensors += 1
        self.parameters += tensor.parameters
        self.bytes += tensor.header.bytes
        self.types.add(tensor.header.dtype)

    def __str__(self) -> str:
        types = ", ".join(sorted(self.types))
        return f"{self.tensors:>9,}{self.parameters:>20,}{self.bytes:>20,}  {types}".rstrip()


def report(path: str | Path) -> Report:
    """A text table of a released checkpoint: family, layers, parameters and bytes by part, problems.

    Reads headers only, so it takes seconds at any size; of a `config.json` itself it says what a checkpoint would hold.
    Raises `ValueError` if the folder has no readable config or index; anything else that is wrong becomes the last line.

    Example:
        >>> print(report("checkpoint"))
        >>> report("checkpoint").problems
        {}
    """
    path = Path(expand(path))
    cfg = ModelConfig.from_hf(path)
    leaf_of = {name: leaf for leaf in table(cfg) for r in range(leaf.repeats) for name in leaf.names(r)}
    notes, problems, found = [], {}, {}
    if path.is_file():
        found = {name: Header(leaf.dtype, leaf.stored) for name, leaf in leaf_of.items()}
        title = f"config      {path}: what its checkpoint holds"
    elif not ((path / INDEX).exists() or (path / SINGLE).exists()):
        title, problems = f"checkpoint  {path}: 0 shards", {str(path): f"found neither {INDEX} nor {SINGLE}"}
    else:
        checkpoint = open_checkpoint(path)
        problems = check(cfg, checkpoint)
        found = checkpoint.headers
        title = f"checkpoint  {path}: {len(checkpoint.shards)} shards"
        total = sum(header.bytes for header in found.values())
        claimed = checkpoint.index.get("metadata", {}).get("total_size", total)
        if claimed != total:
            notes.append(f"index       says total_size {claimed:,}, the shards hold {total:,}")
        if ignored := checkpoint.ignored | beside(checkpoint):
            notes.append(f"ignored     {describe(ignored, what='thing')}")
    tensors = (
        Tensor(name, header, leaf.part, leaf.tensor_parameters)
        if (leaf := leaf_of.get(name))
        else Tensor(name, header, STRANGE, 0)
        for name, header in found.items()
    )
    stored = f"MXFP4, one scale for {MX_BLOCK} values" if cfg.quantized_experts else "not quantised"
    return layout(cfg, title, stored, tensors, notes, problems, path)


def layout(
    cfg: ModelConfig,
    title: str,
    stored: str,
    tensors: Iterable[Tensor],
    notes: Sequence[str],
    problems: dict[str, str],
    folder: Path,
) -> Report:
    """The report; `stored`: how the routed experts are, `title` and `notes`: lines of their own, `folder`: a tokenizer's."""
    tensors, problems = list(tensors), dict(problems)
    parts = {leaf.part: _Part() for leaf in table(cfg)}
    whole = _Part()
    for tensor in tensors:
        parts.setdefault(tensor.part, _Part()).add(tensor)
        whole.add(tensor)
    whole.types = set()
    size = f"{cfg.num_parameters:,} text parameters, {cfg.num_active_parameters:,} active a token"
    moe = f"{cfg.num_experts_per_token} of {cfg.num_experts} routed, {cfg.num_shared_experts} shared"
    largest = sorted(tensors, key=lambda tensor: (-tensor.header.bytes, tensor.name))[:5]
    lines = [
        title,
        f"family      {cfg.model_type}, {size}",
        f"layers      {cfg.num_hidden_layers}: {_schedule(cfg)}",
        f"experts     {moe}; {stored}" if cfg.has_experts else "experts     none",
        *_tokenizer(folder, cfg.vocab_size, problems),
        "",
        f"{'part':<18}{'tensors':>9}{'parameters':>20}{'bytes':>20}  types",
        *(f"{name:<18}{part}" for name, part in (parts | {"all": whole}).items()),
        "",
        "largest tensors",
        *(f"{tensor.header.bytes:>18,}  {tensor.name} {list(tensor.header.shape)}" for tensor in largest),
        "",
        *notes,
        f"problems    {describe(problems) if problems else 'none'}",
    ]
    return Report("\n".join(lines), problems)


def _tokenizer(folder: Path, vocab_size: int, problems: dict[str, str]) -> list[str]:
    """A line on the tokenizer where the folder has one; what is wrong with it is one of the `problems`."""
    if not has_tokenizer(folder):
        return []
    try:
        found = load_tokenizer(folder, vocab_size)
    except ValueError as error:
        problems["tokenizer"] = str(error)
        return []
    ends = ", ".join(map(found.describe, sorted(found.stop_ids))) or "nothing"
    return [f"tokenizer   {found.kind}, {found.vocab_size:,} ids, {found.identity[:8]}; ended by {ends}"]


def _schedule(cfg: ModelConfig) -> str:
    """Such as `(KDA dense, 2 KDA, MLA) + 22 x (3 KDA, MLA) + (MLA)`: layers are MoE unless called dense."""
    segments = []
    for unit, repeats in cfg.segments:
        runs = []
        for kind, layers in groupby(unit):
            count = len(list(layers))
            name = kind.mixer.upper() + (" dense" if kind.ffn == "dense" else "")
            runs.append(f"{count} {name}" if count > 1 else name)
        segments.append((f"{repeats} x " if repeats > 1 else "") + f"({', '.join(runs)})")
    return " + ".join(segments)
