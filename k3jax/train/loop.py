"""A training run from its configuration: data, steps, log, checkpoints, evaluation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from k3jax import peers, signals
from k3jax.config import ModelConfig, VisionConfig
from k3jax.data.ahead import Ahead
from k3jax.data.corpus import is_corpus
from k3jax.data.encoding import Encoding, open_tokenizer
from k3jax.data.open import open_packed
from k3jax.data.packed import PackedDataset
from k3jax.data.sources import kind_of, regular_files_of
from k3jax.data.tokenize import bar
from k3jax.lock import claimed
from k3jax.nn.model import K3, init_variables
from k3jax.ops import mx
from k3jax.run_config import AUTO, DataConfig, RunConfig
from k3jax.sharding import make_mesh
from k3jax.text import ByteTokenizer, load_tokenizer, read_files, write_files
from k3jax.train import folder, resume
from k3jax.train import step as training
from k3jax.train.checkpoint import Checkpoints, open_model, resolve
from k3jax.train.data import ByteDataset, RowDataset, bigram_nats, find_text, split_files
from k3jax.train.evaluate import Evaluation, Score, program, total
from k3jax.train.images import reader
from k3jax.train.log import RunLog, read_numbers
from k3jax.train.pairs import PairDataset, find_pairs, split_pairs
from k3jax.vision.batch import UNIT, patch_unit


class Diverged(ValueError):
    """A loss or gradient norm that is NaN or infinite; names the step and the last good checkpoint."""


@dataclass(frozen=True)
class Result:
    """What a run ended with: losses in nats per token, over `eval_bytes` held-out tokens; of text as bytes, a bigram's too.

    `held_out_byte_loss`: in nats per byte of the text that those tokens stand for.
    """

    step: int
    train_loss: float
    held_out_loss: float
    held_out_byte_loss: float
    bigram_loss: float | None
    eval_bytes: int
    seconds: float
    checkpoint: Path
    plot: Path

    def write(self, path: Path) -> None:
        """Writes the fields as a JSON object."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n")
        os.replace(temporary, path)


def open_data(config: RunConfig) -> tuple[RowDataset | PackedDataset, RowDataset | PackedDataset]:
    """Train and held-out data of a run. Raises `ValueError` where nothing could be learnt, or nothing evaluated."""
    training_data, held_out = _open_data(config)
    key = "data.pairs" if config.data.pairs else "data.paths"
    if not _teaches(training_data):
        raise ValueError(f"{key}: no token to learn; every document for training is too short to have a second one")
    if not _teaches(held_out, config.train.eval_windows):
        raise ValueError(
            f"{key}: no held-out token has a predecessor in its document, in the rows that "
            f"train.eval_windows={config.train.eval_windows} takes; give longer documents, or another data.held_out"
        )
    return training_data, held_out


def _teaches(data: RowDataset | PackedDataset, limit: int | None = None) -> bool:
    return any(batch["weights"].any() for batch in data.windows(limit, images=False))


def _open_data(config: RunConfig) -> tuple[RowDataset | PackedDataset, RowDataset | PackedDataset]:
    data, vision = config.data, config.model.vision
    unit = patch_unit(vision, config.mesh.context * config.mesh.tensor) if vision else UNIT  # the devices that share a row
    if not data.pairs and not _is_byte_stream(data):
        images = reader(vision, open_tokenizer(data.tokenizer, config.model.vocab_size), unit)
        options = {name: getattr(data, name) for name in ("batch_size", "seed", "weights", "held_out", "held_out_paths")}
        rows = encoding(data, vision)
        with bar() as report:
            options |= {"workers": os.cpu_count() or 1, "report": report, "images": images}
            return open_packed(data.paths, data.tokenizer, rows, **options)
    if config.model.vocab_size < ByteDataset.vocab_size:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size}: must be at least {ByteDataset.vocab_size}, one token a byte"
        )
    if data.pairs:
        parts = split_pairs(find_pairs(data.pairs), data.held_out)
        return tuple(PairDataset(part, vision, data.seq_len, data.batch_size, data.seed, unit) for part in parts)
    files = split_files(find_text(data.paths), data.held_out)
    return tuple(ByteDataset.from_files(part, data.seq_len, data.batch_size, data.seed) for part in files)


def encoding(data: DataConfig, vision: VisionConfig | None = None) -> Encoding:
    """How the documents of a run become rows."""
    cells = {"patch": vision.patch_size, "merge": vision.merge_kernel_size} if vision else {}
    return Encoding(data.seq_len, data.learn, data.thinking, data.long, **cells)


def _is_byte_stream(data: DataConfig) -> bool:
    """Whether it is plain text, of several files, whose tokens are bytes: one stream, cut into windows."""
    if data.tokenizer or data.weights or data.held_out_paths or any(map(is_corpus, data.paths)):
        return False
    files = [file for path in data.paths for file in regular_files_of(path)]
    return not files or len(files) > 1 and all(kind_of(file) == "text" for file in files)


def train(config: RunConfig) -> Result:
    """Runs `config` to its last step, from the beginning or from `config.resume`.

    Writes below `config.out`: `checkpoints/<step>`, `metrics.jsonl`, `training.png`, `result.json`. The state after a step
    depends on the configuration and the step alone, so a resumed run ends with the bits of an uninterrupted one.

    Several processes (`runtime.setup`) each read their own rows of the batch and write their own part of the checkpoints;
    `config.out` must be one folder that all of them see. Process 0 writes the rest.

    Raises:
        ValueError: a configuration that does not fit, no data, a checkpoint of another model.
        Diverged: NaN or infinite loss or gradients; nothing is saved from that step on.
    """
    config.validate()
    with claimed(config.out, lambda: _prepare(config)) as prepared:
        return _train(*prepared)


def _prepare(config: RunConfig):
    """What `_train` takes, and of it what all processes must have found."""
    if auto := config.resume == AUTO:
        newest = folder.newest(config.out)
        config = dataclasses.replace(config, resume=newest, start=None if newest else config.start)
    training_data, held_out = open_data(config)
    mesh = make_mesh(**dataclasses.asdict(config.mesh))
    if jax.process_count() > 1 and mesh.size < jax.device_count():
        raise ValueError(f"mesh: found {mesh.size} devices; several processes must use all their {jax.device_count()}")
    resumed = None if config.resume is None else resolve(config.resume)
    for key, path in (("resume", config.resume), ("start", config.start)):
        if path is not None:
            _check_tokenizer(config, key, path)
    if jax.process_index() == 0:
        folder.check(config.out, config.resume, resumed, anew=auto)
    meta = describe(config) | {"identity": resume.identity(config, training_data, held_out)}
    said = resume.go_on(config, resumed, meta, training_data)
    found = {"rows of data": len(training_data), "held-out rows": len(held_out), "resumed step": resumed and resumed[1]}
    return (config, auto, meta, training_data, held_out, mesh, resumed, said), found | meta["identity"]


def _check_tokenizer(config: RunConfig, key: str, path: str) -> None:
    """Complains where a checkpoint's tokens mean something else than the run's; of one that came without, nothing is known."""
    checkpoints, _, _, meta = open_model(path)
    source, of_bytes = checkpoints.folder.parent, folder.was_of_bytes(meta)
    found, right = ByteTokenizer() if of_bytes else load_tokenizer(source), open_tokenizer(config.data.tokenizer)
    known = of_bytes or found.kind != "bytes"
    if known and found.identity != right.identity:
        what = "bytes" if of_bytes else f"another tokenizer ({found.kind}, {found.vocab_size} ids), which lies in {source}"
        raise ValueError(f"data.tokenizer={config.data.tokenizer}: {key}={path} has {what}")


def _train(config: RunConfig, auto: bool, meta, training_data: RowDataset, held_out: RowDataset, mesh, resumed, said: str) -> Result:
    out, last = Path(config.out), config.train.steps
    speaks = jax.process_index() == 0
    rows = training.process_rows(config.data.batch_size, mesh)
    # Kept from the beginning: the folder that they come from may be gone when the first checkpoint is saved.
    tokenizer_files = read_files(config.data.tokenizer) if config.data.tokenizer else {}
    started = time.monotonic()
    with jax.set_mesh(mesh):
        state, shardings = _first_state(config, mesh, resumed)
        evaluation = Evaluation(training.make_model(config), mesh, open_tokenizer(config.data.tokenizer))
        first = int(state.step)
        if first > last or first == last and not auto:  # which has only to evaluate what a killed run had trained
            raise ValueError(f"train.steps={last}: the checkpoint is already at step {first}")
        step_fn = training.make_train_step(config, shardings)
        with Checkpoints(out / "checkpoints", config.train.keep_checkpoints) as checkpoints:
            if speaks and said:
                print(said, file=sys.stderr)
            if speaks and (later := [number for number in checkpoints.steps() if number > first]):
                steps = ", ".join(map(str, later))
                print(f"out={out}: goes back to step {first}; the later checkpoints ({steps}) are discarded", file=sys.stderr)
            checkpoints.discard_after(first)

            def save(number: int, state) -> None:
                if speaks and tokenizer_files:
                    write_files(tokenizer_files, out)
                samples = training_data.offset + number * config.data.batch_size
                checkpoints.save(number, state, meta | {"samples": samples})

            with contextlib.ExitStack() as held:
                log = held.enter_context(RunLog(out, last, first)) if speaks else None
                batches = held.enter_context(Ahead(lambda step: training_data.batch(step, rows), first, last))
                watch = _Watch(log, checkpoints, batches)
                for number, batch in signals.stop.steps(batches, first, last):
                    batch = training.shard_batch(batch, mesh, config.data.batch_size)
                    if number == first + 1:
                        watch.compiles()
                        step_fn = program(step_fn, state, batch)
                        watch.begins()
                        signals.stop.starts(number)
                    state, metrics = step_fn(state, batch)
                    watch.add(number, metrics)
                    saves, evaluates = (
                        number == last or every and number % every == 0
                        for every in (config.train.checkpoint_every, config.train.eval_every)
                    )
                    if saves or evaluates or number % config.train.log_every == 0 or number == first + 1:
                        watch.check()
                    if saves:
                        save(number, state)
                    if evaluates:
                        peers.note("waits", f"evaluates step {number}")
                        watch.scores = evaluation(state.params, state.router, held_out, config.train.eval_windows)
                    watch.tell()
                if first == last:
                    watch.loss = _last_loss(log.path) if speaks else float("nan")
                    watch.scores = evaluation(state.params, state.router, held_out, config.train.eval_windows)
                elif number < last:  # a signal has ended it
                    if watch.pending:
                        watch.check()
                        watch.tell()
                    if not saves:
                        save(number, state)
                    checkpoints.wait()
                    raise signals.stop.stopped(number, last)
        bigram = None
        if isinstance(training_data, RowDataset):
            bigram = bigram_nats(training_data, held_out, config.train.eval_windows)
    plot, checkpoint = out / "training.png", out / "checkpoints" / str(last)
    seconds = time.monotonic() - started
    score = total(watch.scores)
    result = Result(last, watch.loss, score.loss, score.byte_loss, bigram, score.tokens, seconds, checkpoint, plot)
    if speaks:
        log.plot(plot, title=f"{config.model.num_parameters / 1e6:.1f} M parameters", bigram_loss=bigram)
        result.write(out / "result.json")
    return result


def _last_loss(metrics: Path) -> float:
    return next((line["loss"] for line in reversed(read_numbers(metrics))), float("nan"))


class _Watch:
    """Collects the steps' metrics on the device and reads them in one go, so that steps run ahead of the log.

    All processes watch, so that all stop at the same step; only the one with a `log` tells.
    """

    def __init__(self, log: RunLog | None, checkpoints: Checkpoints, batches: Ahead):
        self.log, self.checkpoints, self.batches = log, checkpoints, batches
        self.pending: list[tuple[int, dict]] = []
        self.since, self.waited = time.monotonic(), batches.waited
        self.loss = float("nan")
        self.numbers: dict | None = None  # of the newest step, when it has been checked
        self.scores: dict[str, Score] = {}  # of the newest evaluation, by source
        self.warned = False

    def compiles(self) -> None:
        if self.log is not None:
            self.log.say("compiling")

    def begins(self) -> None:
        """The first step starts now: what came before is no part of its time."""
        self.since, self.waited = time.monotonic(), self.batches.waited
        if self.log is not None:
            self.log.begin()

    def add(self, number: int, metrics: dict) -> None:
        self.pending.append((number, metrics))

    def check(self) -> None:
        """Checks every step since the last time, and keeps the numbers of the newest for `tell`."""
        self.scores = {}
        steps = jax.device_get(self.pending)
        self.pending = []
        for number, metrics in steps:
            for name in ("loss", "grad_norm"):
                if not np.isfinite(metrics[name]):
                    self.checkpoints.wait()
                    good = self.checkpoints.latest()
                    kept = "there is no checkpoint" if good is None else f"the last good checkpoint is {good}"
                    raise Diverged(f"step {number}: {name} is {metrics[name]}; training stopped, {kept}")
        now = time.monotonic()
        tokens = sum(int(metrics["tokens"]) for _, metrics in steps)
        number, metrics = steps[-1]
        learnt = [metrics["loss"] for _, metrics in steps if metrics["tokens"]]
        self.loss = float(np.mean(learnt)) if learnt else 0.0
        more = {"dropped": sum(int(metrics["dropped"]) for _, metrics in steps)} if "dropped" in metrics else {}
        if skipped := len(steps) - len(learnt):
            more["skipped"] = skipped
            self._warn(next(number for number, metrics in steps if not metrics["tokens"]))
        self.numbers = {
            "step": number,
            "loss": self.loss,
            "tokens_per_second": tokens / (now - self.since),
            "gradient_norm": float(metrics["grad_norm"]),
            "expert_load": float(np.mean([metrics["expert_load"] for _, metrics in steps])),
            "waited": (self.batches.waited - self.waited) / (now - self.since),
            **more,
        }

    def tell(self) -> None:
        """Logs what `check` has kept, with the scores of an evaluation that came since; its time is no part of the steps'."""
        if self.numbers is None:
            return
        if self.scores:
            named = {"": total(self.scores)}
            if len(self.scores) > 1:
                named |= {f" of {name}": score for name, score in self.scores.items()}
            for of, score in named.items():
                self.numbers |= {f"held_out_loss{of}": score.loss, f"held_out_byte_loss{of}": score.byte_loss}
        if self.log is not None:
            self.log.write(**self.numbers)
        self.numbers = None
        self.since, self.waited = time.monotonic(), self.batches.waited

    def _warn(self, number: int) -> None:
        """Once a run."""
        if self.log is not None and not self.warned:
            self.log.say(f"step {number}: its batch has no token to learn, so it changes nothing; `skipped` counts such steps")
        self.warned = True


def _first_state(config: RunConfig, mesh, resumed: tuple[Path, int] | None):
    """A new state, or that of the checkpoint (folder, step)."""
    if resumed is None and config.start is None:
        return training.init_state(config, mesh)
    key, path = ("start", config.start) if resumed is None else ("resume", config.resume)
    at, number = resumed or resolve(path)
    checkpoints = Checkpoints(at)
    cfg, meta = checkpoints.read_model(number)
    if cfg != config.model:
        raise ValueError(f"{key}={path}: holds another model than this configuration's `model`")
    abstract, shardings = training.abstract_state(config, mesh)
    if meta["kind"] == "run" and key == "resume":
        return checkpoints.restore(number, abstract)[0], shardings
    # Weights alone, of a run or in the types they are stored in, as `convert import` writes them: the optimizer starts anew.
    weights = _imported(checkpoints, number, {"params": abstract.params, "router": abstract.router}, meta.get("experts", "dequantized"))
    fresh, _ = training.init_state(config, mesh)
    return fresh.replace(**weights), shardings


def _imported(checkpoints: Checkpoints, number: int, abstract: dict, experts: str) -> dict[str, Any]:
    """Weights of an import in the types and places of `abstract`; packed experts are dequantised where they lie."""
    wanted = flatten_dict(abstract)
    packed = {path: leaf for path, leaf in wanted.items() if "experts" in path} if experts == "packed" else {}
    stored = {path: leaf for path, leaf in wanted.items() if path not in packed}
    for (*above, name), leaf in packed.items():
        for suffix, values in (("_packed", 2), ("_scale", mx.BLOCK)):
            shape = (*leaf.shape[:-1], leaf.shape[-1] // values)  # this axis is never split
            stored[*above, name + suffix] = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=leaf.sharding)
    found = flatten_dict(checkpoints.restore(number, unflatten_dict(stored), partial=True, widen=True)[0])
    for (*above, name), leaf in packed.items():
        codes, scale = (found.pop((*above, name + suffix)) for suffix in ("_packed", "_scale"))
        values = jax.jit(lambda p, s, dtype=leaf.dtype: mx.dequantize(mx.unpack(p), s, dtype), out_shardings=leaf.sharding)
        found[*above, name] = values(codes, scale)
    return unflatten_dict(found)


def describe(config: RunConfig, kind: str = "run") -> dict[str, Any]:
    """What is written beside the arrays: the model, and for a run everything else that made it."""
    meta = {"kind": kind, "model": config.model.to_hf(), "jax": jax.__version__}
    for part in ("data", "train", "mesh"):
        meta[part] = dataclasses.asdict(getattr(config, part))
    return meta


def restore_weights(checkpoint: str | Path, param_dtype=jnp.float32) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
    """(model config, variables on one device, meta) of a run's checkpoint, without the optimizer's state."""
    checkpoints, number, cfg, meta = open_model(checkpoint)
    model = K3(cfg, param_dtype=param_dtype, experts=meta.get("experts", "dequantized"))
    abstract = jax.eval_shape(lambda: nn.unbox(init_variables(model, jax.random.key(0))))
    return cfg, checkpoints.restore(number, abstract, partial=True, widen=True)[0], meta
