"""Classifier by kernel regression, which averages training labels with the kernel's weights."""

from __future__ import annotations

import functools
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

import simrf_jax
from experiments.kernel_regression.uci import Split
from simrf_jax._src.projections import Coupling, FixedCoupling

_FLOATS_AT_A_TIME = 2**22  # Training features of one batch: 16 MB fit into the caches.


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def draw(keys: jax.Array, num_features: int, dim: int, method: str) -> jax.Array:
    """Draws a projection for each key, ``[trials, num_features, dim]``.

    Row blocks have dim rows, as in the paper. Fast projections are formed as matrices, because a
    matrix is applied faster in so few dimensions.
    """

    def one(key: jax.Array) -> jax.Array:
        sizes = (num_features, dim)
        if not method.startswith("fast_"):
            dense = cast(Coupling, method)
            return simrf_jax.draw_projection(key, *sizes, coupling=dense, block="square")
        fast = cast(FixedCoupling, method.removeprefix("fast_"))
        w = simrf_jax.draw_fast_projection(key, *sizes, coupling=fast, block="square")
        return simrf_jax.project(jnp.eye(dim), w).T

    return jax.vmap(one)(keys)


def accuracies(projections: jax.Array, split: Split, sigma: float) -> np.ndarray:
    r"""Returns the accuracy with random features, for each projection.

    .. math:: \hat y(x') = \sum_i \phi(\sigma x') \cdot \phi(\sigma x_i)\, y_i

    Args:
      projections: Projections ``[trials, num_features, dim]``. Data of fewer than dim coordinates
        count as padded with zeros.
      split: Rows and classes.
      sigma: Factor of the rows.

    Returns:
      Shares of the test rows that get their class, ``[trials]``.

    References:
      Reid et al., Simplex Random Features (ICML 2023), Sec. 5.3 and App. B.2,
      https://arxiv.org/abs/2301.13856
    """
    train, test = (jnp.asarray(sigma * x, jnp.float32) for x in (split.train, split.test))
    votes = jax.nn.one_hot(split.train_labels, split.num_classes)
    labels = jnp.asarray(split.test_labels)
    trials, num_features, _ = projections.shape
    batch = min(trials, max(1, _FLOATS_AT_A_TIME // (len(train) * num_features)))
    # Zeros fill the last batch, so that all batches have one shape and share one program.
    w = jnp.pad(projections[..., : train.shape[1]], ((0, -trials % batch), (0, 0), (0, 0)))
    starts = range(0, trials, batch)
    shares = [_accuracies(w[i : i + batch], train, votes, test, labels) for i in starts]
    return np.concatenate([np.asarray(share, np.float64) for share in shares])[:trials]


@jax.jit
def _accuracies(
    w: jax.Array, train: jax.Array, votes: jax.Array, test: jax.Array, labels: jax.Array
) -> jax.Array:
    # This is attention of test rows to training rows. As in attention, each feature is divided by
    # its largest value over the training rows, so that nothing overflows and not everything
    # underflows. The trials are stacked to make one large product.
    rows = w.reshape(-1, w.shape[-1])
    exponents = simrf_jax.project(train, rows) - jnp.sum(train**2, axis=-1, keepdims=True)
    largest = exponents.max(axis=0, keepdims=True)
    sums = (jnp.exp(exponents - largest).T @ votes).reshape(*w.shape[:2], -1)
    exponents = (simrf_jax.project(test, rows) + largest).reshape(len(test), *w.shape[:2])
    phi = jax.nn.softmax(exponents, axis=-1)  # A common factor of a row does not change its class.
    scores = jnp.einsum("tbm,bmc->btc", phi, sums)
    return jnp.mean(scores.argmax(axis=-1) == labels[None], axis=-1)


def exact_accuracies(split: Split, sigmas: np.ndarray) -> np.ndarray:
    """Returns the accuracy with the exact Gaussian kernel, in float64, for each sigma."""
    votes = np.eye(split.num_classes)[split.train_labels]
    squares = [np.square(x).sum(axis=-1) for x in (split.test, split.train)]
    distances = np.add.outer(*squares) - 2 * split.test @ split.train.T
    # A common factor of all classes does not change the largest, so the nearest row gets weight 1.
    nearest = distances - distances.min(axis=1, keepdims=True)
    shares = []
    for sigma in sigmas:
        scores = np.exp(-(sigma**2) / 2 * nearest) @ votes
        shares.append(np.mean(scores.argmax(axis=1) == split.test_labels))
    return np.array(shares)


def mean_distance(split: Split, sigma: float) -> float:
    """Returns the mean of v = sigma |x + y| over test rows x and training rows y, as in Table 2."""
    squares = [np.square(x).sum(axis=-1) for x in (split.test, split.train)]
    squared = np.add.outer(*squares) + 2 * split.test @ split.train.T
    return float(sigma * np.sqrt(squared.clip(0)).mean())
