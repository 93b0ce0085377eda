"""Configuration of one training run: its settings, and what fits together.

`k3jax.settings` reads it from a Python file that defines `config`, and changes it by `key=value`. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from k3jax.checks import LARGEST, shown
from k3jax.config import MX_BLOCK, ModelConfig
from k3jax.values import AnyText, PathText, Seed, expand_paths, hints, unfit

MOST_DEVICES = 4096  # simulated on one machine
AUTO = "auto"  # in place of a checkpoint to resume from


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices. An axis of -1 takes the rest."""

    data: int = 1
    """Replicas of the parameters, each with its own part of the batch."""
    fsdp: int = 1
    """Shards of the dense weights, each with its own part of the batch."""
    expert: int = 1
    """Groups of routed experts, each with its own part of the batch."""
    context: int = 1
    """Parts of each sequence, one after the other."""
    tensor: int = 1
    """Shards of heads, feed-forward widths and vocabulary."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(dataclasses.astuple(self))

    def on(self, devices: int) -> MeshConfig:
        """The mesh of so many devices: an axis of -1 gets what the other axes leave of them.

        Raises `ValueError`, one line, if they do not divide the devices, or leave them to two axes.

        Example:
            >>> MeshConfig(expert=-1, tensor=2).on(8)
            MeshConfig(data=1, fsdp=1, expert=4, context=1, tensor=2)
        """
        rest = [f"mesh.{axis}" for axis, size in vars(self).items() if size == -1]
        if not rest:
            return self
        if len(rest) > 1:
            raise ValueError(f"{'=-1, '.join(rest)}=-1: only one axis can take what the others leave")
        if devices % self.size:
            factors = "*".join(f"mesh.{axis}" for axis, size in vars(self).items() if size > 1)
            raise ValueError(f"{devices} devices: must be a multiple of {factors}={-self.size}, for {rest[0]}=-1")
        return dataclasses.replace(self, **{rest[0].removeprefix("mesh."): devices // -self.size})


@dataclass(frozen=True)
class DataConfig:
    """What to train on. Without a tokenizer one byte is one token. With images, their tokens count too."""

    paths: tuple[PathText, ...] = ()
    """Sources, separated by commas: tokenised corpora; files, folders or globs of text, *.jsonl and *.parquet. None: the
    running Python's standard library."""
    weights: tuple[float, ...] = ()
    """For each source a positive number: its share of the rows. None: each row once an epoch."""
    held_out_paths: tuple[PathText, ...] = ()
    """Sources to evaluate on, in place of a part of `paths`."""
    tokenizer: PathText | None = None
    """Folder with the tokenizer's files. None: a token is a byte."""
    learn: Literal["assistant", "last", "all"] = "assistant"
    """Of conversations, what is learnt: what the assistant has to produce, its last turn alone, or all."""
    thinking: bool = True
    """Whether the reasoning in conversations is part of them."""
    long: Literal["cut", "skip"] = "cut"
    """What becomes of documents longer than a row: texts are cut, of conversations the last messages are kept; or nothing."""
    pairs: tuple[PathText, ...] = ()
    """In place of `paths`, JSONL files of {"image": path or list of paths, "text": ...}, for a model with `vision`."""
    seq_len: int = 512
    """Tokens per sequence."""
    batch_size: int = 16
    """Sequences per step, over all devices."""
    held_out: float = 0.05
    """Fraction of the documents (of plain text as bytes: of the files) kept for evaluation."""
    seed: Seed = 0
    """Seed of the order of the data."""

    def __post_init__(self):
        expand_paths(self)


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation: AdamW under a cosine schedule with linear warm-up."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    final_learning_rate: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    warmup_fraction: float = 0.01
    """Part of the steps over which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients."""
    grad_accum: int = 1
    """Parts the batch is computed in, one after the other."""
    qat: bool = True
    """Quantisation-aware training: MXFP4 expert weights, MXFP8 expert inputs."""
    capacity_drop: bool = False
    """Drop what exceeds a balanced load's room in the experts' exchange; `dropped` in the metrics counts it."""
    quantile_balancing: bool = True
    """Update the router bias by Quantile Balancing."""
    remat: bool = True
    """Recompute activations in the backward pass instead of keeping them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products; parameters and optimizer state stay float32."""
    seed: Seed = 0
    """Seed of the initial parameters."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    eval_windows: int = 64
    """Held-out sequences of an evaluation."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end, where there is always one."""
    log_every: int = 10
    """Steps between logged numbers."""


@dataclass(frozen=True)
class ProcessesConfig:
    """Processes that run one training together, one a host as a rule. Each has the same settings but for `index`."""

    count: int = 1
    """Processes in all."""
    index: int = 0
    """This one's number, from 0; process 0 writes the log."""
    coordinator: AnyText = ""
    """host:port that process 0 listens on. `auto`: SLURM, GKE or Cloud TPU tell it, count and index. Empty: one process."""
    timeout: int = 600
    """Seconds that the processes wait for one that starts late, or does not go on while the others wait for it."""

    def validate(self) -> None:
        """Raises `ValueError`, one line, naming the key, the value found and what would be right."""
        count, index, coordinator, timeout = dataclasses.astuple(self)
        _refuse([("processes.timeout", timeout, timeout >= 1, "at least 1")])
        if coordinator == "auto":
            left = "left to processes.coordinator=auto"
            _refuse([("processes.count", count, count == 1, left), ("processes.index", index, index == 0, left)])
            return
        host, _, port = coordinator.rpartition(":")
        address = "host:port of process 0 (such as localhost:1234), or auto"
        named = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        ranges = (
            ("processes.count", count, count >= 1, "at least 1"),
            ("processes.index", index, 0 <= index < count, f"0 or more and below processes.count={count}"),
            ("processes.coordinator", coordinator, named or (count == 1 and not coordinator), address),
        )
        _refuse(ranges)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        model: The model, in the names of its released config.json.
        data: Text to train on.
        train: Optimisation.
        mesh: Devices along each mesh axis.
        out: Folder of the run: checkpoints, metrics and plot.
        resume: Checkpoint to continue from: its step folder, or a run folder for its newest one. `auto`: the newest of `out`,
            or from the beginning where there is none.
        resume_with: What may be another than the checkpoint was made with: data, schedule, step (how weights change).
        start: Checkpoint whose weights a new run begins with, at step 0 and with a new optimizer: fine-tuning.
        cpu_devices: Simulated CPU devices to run on, over all processes; 0 runs on the machine's own devices.
        processes: Processes that run it together.

    Example:
        >>> config = load_config("configs/quickstart.py")
        >>> config = apply_overrides(config, ["train.steps=50", "mesh.expert=4"])
        >>> config.validate()
    """

    model: ModelConfig
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    out: PathText = "runs/k3"
    resume: PathText | None = None
    resume_with: tuple[Literal["data", "schedule", "step"], ...] = ()
    start: PathText | None = None
    cpu_devices: int = 0
    processes: ProcessesConfig = ProcessesConfig()

    def __post_init__(self):
        expand_paths(self)

    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key, but for what is each process' own."""
        return {key: get(self, key) for key in keys(self) if key != "processes.index"}

    def on(self, devices: int) -> RunConfig:
        """This run on so many devices, as `MeshConfig.on`."""
        return dataclasses.replace(self, mesh=self.mesh.on(devices))

    def validate(self) -> None:
        """Checks each setting and that model, batch and mesh fit together.

        Raises `ValueError`, one line, naming the key, the value found and what would be right.
        """
        _check_values(self)
        left = "at least 1, or -1 for what the other axes leave of the devices"
        model, data, train, mesh = self.model, self.data, self.train, self.mesh
        eligible, k = model.num_eligible_experts, model.num_experts_per_token
        comparable = eligible > k or not model.has_experts
        one_more = f"False: a token has {eligible} experts to choose model.num_experts_per_token={k} of, it takes one more"
        final_rate, room = train.final_learning_rate, model.max_position_embeddings
        most_rows = f"such that a step has at most {LARGEST} tokens, with data.seq_len={data.seq_len}"
        sources = {name: getattr(data, name) for name in ("paths", "weights", "held_out_paths", "tokenizer")}
        sources = {name: ",".join(map(str, v)) if isinstance(v, tuple) else v for name, v in sources.items()}
        simulated = f"0 (the machine's own devices) to {MOST_DEVICES}"
        ranges = (
            *((f"mesh.{axis}", size, size >= 1 or size == -1, left) for axis, size in vars(mesh).items()),
            ("data.seq_len", data.seq_len, data.seq_len >= 1, "at least 1"),
            ("data.seq_len", data.seq_len, data.seq_len <= room, f"at most model.max_position_embeddings={room}"),
            ("data.batch_size", data.batch_size, data.batch_size >= 1, "at least 1"),
            ("data.batch_size", data.batch_size, data.batch_size * data.seq_len <= LARGEST, most_rows),
            *((f"data.{name}", value, not (data.pairs and value), "empty beside data.pairs") for name, value in sources.items()),
            ("data.weights", sources["weights"], all(weight > 0 for weight in data.weights), "positive numbers"),
            ("data.pairs", ",".join(data.pairs), model.vision or not data.pairs, "empty: the model has no vision"),
            ("data.held_out", data.held_out, 0 < data.held_out < 1, "between 0 and 1"),
            ("train.steps", train.steps, train.steps >= 1, "at least 1"),
            ("train.learning_rate", train.learning_rate, train.learning_rate > 0, "positive"),
            ("train.final_learning_rate", final_rate, 0 <= final_rate <= 1, "from 0 to 1"),
            ("train.warmup_fraction", train.warmup_fraction, 0 <= train.warmup_fraction <= 1, "from 0 to 1"),
            ("train.weight_decay", train.weight_decay, train.weight_decay >= 0, "0 or more"),
            ("train.beta1", train.beta1, 0 <= train.beta1 < 1, "at least 0 and below 1"),
            ("train.beta2", train.beta2, 0 <= train.beta2 < 1, "at least 0 and below 1"),
            ("train.clip_norm", train.clip_norm, train.clip_norm > 0, "positive"),
            ("train.grad_accum", train.grad_accum, train.grad_accum >= 1, "at least 1"),
            ("train.quantile_balancing", True, comparable or not train.quantile_balancing, one_more),
            ("train.checkpoint_every", train.checkpoint_every, train.checkpoint_every >= 1, "at least 1"),
            ("train.keep_checkpoints", train.keep_checkpoints, train.keep_checkpoints >= 1, "at least 1"),
            ("train.eval_windows", train.eval_windows, train.eval_windows >= 1, "at least 1"),
            ("train.eval_every", train.eval_every, train.eval_every >= 0, "0 or more"),
            ("train.log_every", train.log_every, train.log_every >= 1, "at least 1"),
            ("start", self.start, not self.start or self.resume in (None, AUTO), "None beside resume, which has weights"),
            ("resume_with", ",".join(self.resume_with), self.resume or not self.resume_with, "empty without resume"),
            ("cpu_devices", self.cpu_devices, 0 <= self.cpu_devices <= MOST_DEVICES, simulated),
        )
        _refuse(ranges)
        self.processes.validate()
        count, auto = self.processes.count, self.processes.coordinator == "auto"
        right = "0 with processes.coordinator=auto" if auto else f"a multiple of processes.count={count}"
        shared = not self.cpu_devices if auto else self.cpu_devices % count == 0
        _refuse([("cpu_devices", self.cpu_devices, shared, right)])
        if -1 in vars(mesh).values():
            # Where the devices are not known yet, at least the rest can be checked.
            return self.on(self.cpu_devices or abs(mesh.size)).validate()

        latent = "routed_expert_hidden_size" if model.routed_expert_hidden_size else "hidden_size"
        batch = ("mesh.data", "mesh.fsdp", "mesh.expert", "train.grad_accum")
        multiples = [
            ("data.batch_size", data.batch_size, batch),
            ("data.seq_len", data.seq_len, ("mesh.context", "mesh.tensor")),
            ("model.num_attention_heads", model.num_attention_heads, ("mesh.tensor",)),
            ("model.kda_num_heads", model.kda_num_heads, ("mesh.tensor",)),
            ("model.vocab_size", model.vocab_size, ("mesh.tensor",)),
            ("model.intermediate_size", model.intermediate_size, ("mesh.tensor",)),
            ("model's shared_intermediate_size", model.shared_intermediate_size, ("mesh.tensor",)),
            ("model.num_experts", model.num_experts, ("mesh.expert", "mesh.tensor")),
            ("model.hidden_size", model.hidden_size, ("mesh.fsdp",)),
            (f"model.{latent}", model.latent_size, ("mesh.fsdp",)),
            ("model.moe_intermediate_size", model.moe_intermediate_size, ("mesh.fsdp",)),
        ]
        if model.vision is not None:
            multiples.append(("model.vision.vt_hidden_size", model.vision.vt_hidden_size, ("mesh.fsdp",)))
        for key, value, factors in multiples:
            product = math.prod(get(self, factor) for factor in factors)
            if value % product:
                raise ValueError(f"{key}={value}: must be a multiple of {'*'.join(factors)}={product}")
        least = mesh.context * (model.short_conv_kernel_size - 1)
        if mesh.context > 1 and data.seq_len < least:
            halo = f"{model.short_conv_kernel_size - 1} * mesh.context"
            raise ValueError(f"data.seq_len={data.seq_len}: must be at least {least} = {halo}, for the convolutions")
        if train.qat:
            widths = {latent: model.latent_size, "moe_intermediate_size": model.moe_intermediate_size}
            for key, value in widths.items():
                if value % MX_BLOCK:
                    raise ValueError(
                        f"model.{key}={value}: must be a multiple of {MX_BLOCK}, a block of train.qat"
                    )
        if self.cpu_devices and self.cpu_devices != mesh.size:
            axes = "*".join(f"mesh.{axis}" for axis in vars(mesh))
            raise ValueError(f"cpu_devices={self.cpu_devices}: must be {axes}={mesh.size}, or 0")


def _refuse(ranges) -> None:
    """Complains of the first (key, value, whether it fits, what fits) that does not."""
    for key, value, fits, right in ranges:
        if not fits:
            raise ValueError(f"{key}={shown(value)}: must be {right}")


def get(config: Any, key: str) -> Any:
    """The setting of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def field_names(config: Any) -> list[str]:
    """Names of a dataclass' fields."""
    return [field.name for field in dataclasses.fields(config)]


def keys(config: Any, prefix: str = "") -> list[str]:
    """Dotted keys of every setting under `prefix`."""
    node = get(config, prefix) if prefix else config
    if not dataclasses.is_dataclass(node):
        return [prefix]
    return [key for name in field_names(node) for key in keys(config, f"{prefix}.{name}".lstrip("."))]


def _check_values(config: Any, prefix: str = "") -> None:
    """A configuration file may hold any value; refuses those that are not of the declared type, or beyond its range."""
    for name, hint in hints(type(config)).items():
        value = getattr(config, name)
        if right := unfit(hint, value):
            found = repr(value) if isinstance(value, str) else shown(value)
            raise ValueError(f"{prefix}{name}={found}: must be {right}")
        if dataclasses.is_dataclass(value):
            _check_values(value, f"{prefix}{name}.")
