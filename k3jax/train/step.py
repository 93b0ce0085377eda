"""One training step: loss, gradients, optimizer, and the router's balancing, as one jitted function."""

from __future__ import annotations

from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding

from k3jax.nn.model import K3, init_variables
from k3jax.nn.moe import RouterStats
from k3jax.ops.loss import cross_entropy
from k3jax.ops.router import quantile_bias_from_histogram
from k3jax.run_config import RunConfig
from k3jax.runtime import compiler_options
from k3jax.sharding import constrain, spec, tree_shardings
from k3jax.train.optim import make_optimizer


VISION = ("vision_tower", "mm_projector")  # the parameters that only images use


@flax.struct.dataclass
class TrainState:
    """Everything a step changes: `step` int32, `params`, `router` (biases), `opt_state`."""

    step: Array
    params: Any
    router: Any
    opt_state: Any

    @property
    def variables(self) -> dict[str, Any]:
        """What `K3.apply` takes."""
        return {"params": self.params, "router": self.router}


def make_model(config: RunConfig) -> K3:
    """The model as it is trained: with QAT, experts fake-quantised to MXFP4 and their inputs to MXFP8."""
    return K3(
        config.model,
        dtype=jnp.dtype(config.train.dtype),
        experts="qat" if config.train.qat else "dequantized",
        mxfp8_inputs=config.train.qat,
        capacity_drop=config.train.capacity_drop,
        remat=config.train.remat,
    )


def init_state(config: RunConfig, mesh) -> tuple[TrainState, TrainState]:
    """A new state, created in its place on the mesh, and its shardings. Optimizer state lies as its parameter does.

    Call within `jax.set_mesh(mesh)`.
    """
    _, shardings = abstract_state(config, mesh)
    # It runs once: on CPU, optimising its hundreds of random number generators costs minutes (JAX 0.12) and gains nothing.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    make = jax.jit(lambda: nn.unbox(_boxed_state(config)), out_shardings=shardings, compiler_options=options)
    return make(), shardings


def abstract_state(config: RunConfig, mesh) -> tuple[TrainState, TrainState]:
    """Shapes (with shardings) and shardings of the state, without making it."""
    boxed = jax.eval_shape(lambda: _boxed_state(config))
    shardings = tree_shardings(boxed, mesh)
    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), nn.unbox(boxed), shardings
    )
    return abstract, shardings


def _boxed_state(config: RunConfig) -> TrainState:
    variables = init_variables(make_model(config), jax.random.key(config.train.seed))
    opt_state = make_optimizer(config.train).init(variables["params"])
    return TrainState(jnp.zeros((), jnp.int32), variables["params"], variables.get("router", {}), opt_state)


def batch_loss(model: K3, params, router, batch: dict[str, Array], total_weight: Array) -> tuple[Array, Any]:
    """sum_t weight_t loss_t / total_weight in nats, and the router's statistics.

    `batch`: tokens, targets, segment_ids [B,T] int32, weights [B,T] (0 where a position is not learnt), and `Images` as
    "images" where there are any.
    """
    variables = {"params": params, "router": router}
    out = model.apply(
        variables, batch["tokens"], segment_ids=batch["segment_ids"], pixel_values=batch.get("images")
    )
    hidden, head = model.apply(variables, out.hidden, method="head_inputs")
    loss = cross_entropy(hidden, head, batch["targets"], batch["weights"])
    return loss / total_weight.astype(loss.dtype), out.router


def make_train_step(config: RunConfig, shardings: TrainState):
    """The jitted step: (state, batch) -> (state, metrics), the state donated.

    The batch is split into `grad_accum` micro-batches one after the other; the loss is the mean over all learnt tokens of
    the whole batch and Quantile Balancing sees them all, so the result does not depend on the split but for rounding.
    A batch without a learnt token has loss 0 and changes nothing but the count of steps: no moment decays, no weight either,
    and schedule and router biases stay where they were.
    Metrics: loss (nats a token), grad_norm (before clipping), expert_load (largest load of an expert over the mean, in
    the worst layer), tokens (learnt); with `capacity_drop` also dropped (pairs of token and expert, over all layers).
    """
    model, optimizer, accum = make_model(config), make_optimizer(config.train), config.train.grad_accum

    def step(state: TrainState, batch: dict[str, Array]):
        total = jnp.sum(batch["weights"])
        learns = total > 0
        total = jnp.where(learns, total, 1)
        grad = jax.value_and_grad(
            lambda params, part: batch_loss(model, params, state.router, part, total), has_aux=True
        )
        if accum == 1:
            (loss, stats), gradients = grad(state.params, batch)
        else:
            micro = micro_batches(batch, accum)
            first = jax.tree.map(lambda x: x[0], micro)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(grad, state.params, first))

            def add(sums, part):
                return jax.tree.map(jnp.add, sums, grad(state.params, part)), None

            ((loss, stats), gradients), _ = lax.scan(add, zeros, micro)

        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and raises floats to them
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        if "images" not in batch:  # what no image passed through keeps its bits: weight decay alone would wear it down
            unused = {name: jax.tree.map(jnp.zeros_like, updates[name]) for name in VISION if name in updates}
            updates = {**updates, **unused}
        params = optax.apply_updates(state.params, updates)
        router = state.router
        if config.train.quantile_balancing:
            router = balanced(state.router, stats, config.model.num_experts_per_token)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradients),
            "expert_load": worst_load(stats),
            "tokens": jnp.sum(batch["weights"] > 0, dtype=jnp.int32),
        }
        if config.train.capacity_drop:
            metrics["dropped"] = sum(jnp.sum(s.dropped) for s in router_stats(stats))
        kept = state.replace(step=state.step + 1)
        new = TrainState(kept.step, params, router, opt_state)
        return jax.tree.map(lambda new, kept: jnp.where(learns, new, kept), new, kept), metrics

    options = compiler_options()
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)


def micro_batches(batch, parts: int):
    """Leaves [B,...] -> [parts,B/parts,...]: part p is every `parts`-th row from row p on.

    So every device's rows are spread over all parts, and none moves to another device.
    """

    def split(x):
        x = jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)
        return constrain(x, None, "batch", *[None] * (x.ndim - 2))

    return jax.tree.map(split, batch)


def balanced(router, stats, k: int):
    """Next router biases from this step's statistics (Quantile Balancing); they take effect in the next step."""
    update = jax.vmap(lambda histogram, bias: quantile_bias_from_histogram(histogram, bias, k))
    return jax.tree.map(
        lambda s, layer: {"e_score_correction_bias": update(s.histogram, layer["e_score_correction_bias"])},
        stats,
        router,
        is_leaf=_is_stats,
    )


def _is_stats(x) -> bool:
    return isinstance(x, RouterStats)


def router_stats(stats) -> list[RouterStats]:
    """Of all MoE layers, each of stacked ones."""
    return jax.tree.leaves(stats, is_leaf=_is_stats)


def worst_load(stats) -> Array:
    """max over MoE layers of (largest expert load / mean expert load); 1 for a model without any."""
    loads = [s.load.astype(jnp.float32) for s in router_stats(stats)]
    ratios = [jnp.max(jnp.max(x, axis=-1) / jnp.maximum(jnp.mean(x, axis=-1), 1e-9)) for x in loads]
    return jnp.max(jnp.stack(ratios)) if ratios else jnp.ones(())


def process_rows(count: int, mesh) -> np.ndarray:
    """Which of the `count` rows of a batch this process' devices hold, ascending: what it has to read."""
    places = NamedSharding(mesh, spec(("batch",), (count,), mesh)).addressable_devices_indices_map((count,))
    return np.unique(np.concatenate([np.arange(count)[rows] for (rows,) in places.values()]))


def shard_batch(batch: dict, mesh, count: int | None = None) -> dict[str, Any]:
    """Host arrays to the mesh, rows over the batch axes: whole [B,...], or with `count` = B those of `process_rows`."""
    total = len(batch["tokens"]) if count is None else count
    rows = np.arange(total) if count is None else process_rows(total, mesh)

    def place(x):
        shape = (total, *x.shape[1:])
        sharding = NamedSharding(mesh, spec(("batch", *[None] * (x.ndim - 1)), shape, mesh))
        part = lambda index: x[np.searchsorted(rows, np.arange(total)[index[0]])]  # noqa: E731
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place, batch)
