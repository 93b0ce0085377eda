"""The optimizer: AdamW with decoupled weight decay on matrices, global-norm clipping, warm-up and cosine decay."""

from __future__ import annotations

import jax
import optax

from k3jax.run_config import TrainConfig

# Parameters that are not matrices of a linear map (vectors, gates, short convolutions) are not decayed.
_NOT_DECAYED = ("norm", "A_log", "dt_bias", "conv1d", "res_proj", "pos_emb")


def schedule(train: TrainConfig) -> optax.Schedule:
    """Linear warm-up over `warmup_fraction` of the steps, then a cosine to `final_learning_rate` of the peak."""
    warmup = max(1, round(train.warmup_fraction * train.steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=train.learning_rate / warmup,
        peak_value=train.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(train.steps - 1, warmup + 1),  # the first step is number 0
        end_value=train.learning_rate * train.final_learning_rate,
    )


def make_optimizer(train: TrainConfig) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW.

    Example:
        >>> optimizer = make_optimizer(config.train)
        >>> updates, opt_state = optimizer.update(gradients, optimizer.init(params), params)
    """
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(
            schedule(train), b1=train.beta1, b2=train.beta2, weight_decay=train.weight_decay, mask=decayed
        ),
    )


def decayed(params):
    """True for each parameter that weight decay applies to."""

    def one(path, _):
        name = jax.tree_util.keystr(path)
        return not any(part in name for part in _NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(one, params)
