"""A training step and an evaluation step, of a model of one line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.harness.train_state import TrainState
from experiments.vit.training.train_step import eval_step, train_step

pytestmark = pytest.mark.fast
CLASSES = 3


class Noisy(nnx.Module):
    """Logits that are the images, times noise where there are dropout keys."""

    def __init__(self):
        self.factor = nnx.Param(jnp.ones(()))

    def __call__(self, images, rngs=None):
        noise = 1 if rngs is None else jax.random.normal(rngs.dropout(), images.shape)
        return self.factor[...] * images * noise


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    return {
        "image": rng.normal(size=(5, CLASSES)).astype(np.float32),
        "label": np.array([0, 2, 1, 1, 0]),
        "weight": np.array([1, 1, 0, 1, 0], np.float32),
    }


def test_an_evaluation_counts_images_by_their_weights(batch):
    graphdef, state = nnx.split(Noisy())
    sums = eval_step((state,), batch, graphdef=graphdef)
    logits = np.float64(batch["image"])
    log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    losses = -log_shares[np.arange(5), batch["label"]]
    right = logits.argmax(axis=1) == batch["label"]
    np.testing.assert_allclose(sums["loss"], losses[[0, 1, 3]].sum(), rtol=1e-6)
    assert sums["accuracy"] == right[[0, 1, 3]].sum()
    assert sums["weight"] == 3


def test_each_step_has_dropout_of_its_own(batch):
    graphdef, params, rest = nnx.split(Noisy(), nnx.Param, ...)
    optimizer = optax.sgd(0.0)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        projections=rest,
        calibrations=rest,
        key=jax.random.key(0),
    )
    losses = []
    for _ in range(3):
        state, metrics = train_step(
            state, batch, graphdef=graphdef, optimizer=optimizer, num_microbatches=1
        )
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3
