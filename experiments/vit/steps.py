"""A step of training and one of evaluation, as pure functions of the state and a batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.training import TrainState
from experiments.vit import sharding

# Which draw a key is for, after those of training.
DROPOUT = 2

Metrics = dict[str, jax.Array]


def score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Losses ``[batch]``, and whether the largest logit is that of the label.

    Labels are classes ``[batch]``, or soft, ``[batch, classes]``, as mixup leaves them.
    """
    if labels.ndim == 1:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    else:
        losses = optax.softmax_cross_entropy(logits, labels)
        labels = labels.argmax(-1)
    return losses, logits.argmax(-1) == labels


def train_step(
    state: TrainState,
    batch: dict[str, jax.Array],
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
) -> tuple[TrainState, Metrics]:
    """One step of the optimiser on the mean loss of a batch."""
    key = jax.random.fold_in(jax.random.fold_in(state.key, DROPOUT), state.step)
    keys = jax.random.split(key, num_microbatches) if num_microbatches > 1 else key[None]

    def loss_fn(
        params: nnx.State, batch: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params, state.projections)
        logits = model(batch["image"], rngs=nnx.Rngs(dropout=dropout_key))
        losses, right = score(logits, batch["label"])
        return losses.mean(), right.mean()

    (loss, accuracy), grads = sharding.mean_over_microbatches(
        functools.partial(jax.value_and_grad(loss_fn, has_aux=True), state.params), batch, keys
    )
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
    return state, {"loss": loss, "accuracy": accuracy, "gradient_norm": optax.tree.norm(grads)}


def eval_step(
    params: nnx.State,
    projections: nnx.State,
    batch: dict[str, jax.Array],
    *,
    graphdef: nnx.GraphDef,
) -> Metrics:
    """Sums over a batch of the loss, the right answers and the weights."""
    logits = nnx.merge(graphdef, params, projections)(batch["image"])
    losses, right = score(logits, batch["label"])
    weight = batch["weight"]
    return {
        "loss": jnp.sum(losses * weight),
        "accuracy": jnp.sum(right * weight),
        "weight": jnp.sum(weight),
    }


def test_means(sums: Iterable[Metrics]) -> dict[str, float]:
    """``test_loss`` and ``test_accuracy``, from what ``eval_step`` returns for each batch."""
    batches = list(sums)
    total = {name: sum(float(s[name]) for s in batches) for name in batches[0]}
    return {f"test_{name}": total[name] / total["weight"] for name in ("loss", "accuracy")}
