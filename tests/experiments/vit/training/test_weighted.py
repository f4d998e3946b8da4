"""Weighted projections in the state of a training run: redraws and checkpoints."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.harness import train_state
from experiments.vit.training import checkpoint_contents, checkpoint_manager
from simrf_jax.integrations.nnx import RandomFeatureAttention
from tests.experiments.vit import tiny

FIELDS = {"coupling": "cross_polytope", "norms": "radau"}


def make_model(rngs, *, scan):
    def layer(key):
        return RandomFeatureAttention(2, 4, 9, rngs=nnx.Rngs(key), **FIELDS)

    keys = jax.random.split(rngs.features(), 2)
    return nnx.vmap(layer)(keys) if scan else nnx.List(map(layer, keys))


def make_state(scan):
    make = functools.partial(make_model, scan=scan)
    return train_state.init_state(jax.random.key(0), make, optax.sgd(0.1))


def redrawn(scan):
    redraw = functools.partial(train_state.redraw, interval=0, stacked=scan)
    return jax.tree.leaves(jax.jit(redraw)(make_state(scan)).projections)


@pytest.mark.slow
def test_redraw_of_stacked_weighted_rows_is_that_of_the_layers():
    rows, log_weights = redrawn(scan=True)
    first_rows, first_weights, second_rows, second_weights = redrawn(scan=False)
    np.testing.assert_allclose(rows, [first_rows, second_rows], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_weights, [first_weights, second_weights])
    assert not np.allclose(first_rows, second_rows)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_weighted_rows_are_saved_with_their_digests_and_restored(tmp_path, scan):
    state = {"projections": make_state(scan).projections}
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    progress = checkpoint_contents.Progress([{"step": 1, "train_loss": 0.1}], 2.0, {"step": 1})
    with checkpoint_manager.Checkpoints(tmp_path, tiny.get_config(), keep=1) as checkpoints:
        checkpoints.save(1, state, progress)
        checkpoints.wait()
        restored, _ = checkpoints.restore(target)
    chex.assert_trees_all_equal(restored, state)
