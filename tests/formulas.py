"""Feature maps written out in float64 NumPy: log |phi| and its sign, at any scale of the inputs.

Each is analytic wherever phi is smooth, so that a complex step in x or w gives its derivative.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Sides(NamedTuple):
    """Formulas of a map whose features of queries and of keys differ."""

    query: Callable
    key: Callable


def of_head(formula, head):
    """Returns the formula of a key head."""
    return formula[head] if isinstance(formula, list) else formula


def of_side(formula, side):
    """Returns the formula of queries or keys."""
    return getattr(formula, side) if isinstance(formula, Sides) else formula


def _half_squared_norm(x):
    return np.sum(np.square(x), axis=-1, keepdims=True) / 2


def _log_prefactor(x, kernel, base):
    """Returns ``base * |x|^2 / 2`` for the softmax kernel.

    The Gaussian kernel is exp(-|x|^2/2) exp(x.y) exp(-|y|^2/2), so it has ``base - 1``.
    """
    return (base - (kernel == "gaussian")) * _half_squared_norm(x)


def split(values):
    """Returns the logarithm of the size of features, and their signs."""
    sign = np.sign(values.real)
    with np.errstate(divide="ignore"):
        return np.log(sign * values), sign


def positive(x, w, kernel):
    log = x @ w.T + _log_prefactor(x, kernel, -1) - np.log(len(w)) / 2
    return log, np.ones_like(log)


def hyperbolic(x, w, kernel):
    log = np.concatenate([x @ w.T, -x @ w.T], axis=-1)
    log = log + _log_prefactor(x, kernel, -1) - np.log(2 * len(w)) / 2
    return log, np.ones_like(log)


def log_weights(w):
    """Returns log weights for the rows of W that differ between rows."""
    return w[..., 0] - 0.5 * w[..., -1]


def weighted(x, w, kernel):
    log, sign = positive(x, w, kernel)
    return log + log_weights(w) / 2, sign


def weighted_hyperbolic(x, w, kernel):
    log, sign = hyperbolic(x, w, kernel)
    return log + np.tile(log_weights(w) / 2, 2), sign


def optimal_positive(x, w, kernel, parameter=-0.1):
    log, sign = positive(x, w, kernel)
    log = log + (np.sqrt(1 - 4 * parameter) - 1) * (x @ w.T) + parameter * np.sum(w**2, axis=-1)
    return log + len(w.T) / 4 * np.log(1 - 4 * parameter), sign


def with_parameter(parameter):
    """Returns the formula of optimal positive features with a parameter."""
    return functools.partial(optimal_positive, parameter=parameter)


def calibration(dim, head=0):
    """Returns the arrays of one head's calibrated map for vectors of some dim, in float32."""
    rng = np.random.default_rng((dim, head))
    matrix = np.eye(dim) + 0.2 * dim**-0.5 * rng.normal(size=(dim, dim))
    arrays = {
        "query_mean": 0.2 * rng.normal(size=dim),
        "key_mean": 0.2 * rng.normal(size=dim),
        "query_matrix": matrix,
        "key_matrix": np.linalg.inv(matrix).T,
        "variances": rng.uniform(0.8, 1.8, dim),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _calibrated(x, w, kernel, side, other, head):
    assert kernel == "softmax"
    arrays = {name: np.float64(array) for name, array in calibration(x.shape[-1], head).items()}
    mean = arrays[f"{side}_mean"]
    balanced = (x - mean) @ arrays[f"{side}_matrix"].T
    tilted = w * np.sqrt(arrays["variances"])
    # The log ratio of the densities of N(0, I) and N(0, diag(variances)) at the tilted rows.
    log_ratio = (np.sum(w**2 - tilted**2, axis=-1) + np.sum(np.log(arrays["variances"]))) / 2
    log = balanced @ tilted.T - _half_squared_norm(balanced) + log_ratio / 2 - np.log(len(w)) / 2
    log = log + ((x - mean / 2) @ arrays[f"{other}_mean"])[..., None]
    return log, np.ones_like(log)


# Of two key heads.
calibrated = [
    Sides(
        functools.partial(_calibrated, side="query", other="key", head=head),
        functools.partial(_calibrated, side="key", other="query", head=head),
    )
    for head in range(2)
]


def learning(dim, head=0):
    """Returns the parameters of one head's learned map for vectors of some dim, in float32."""
    rng = np.random.default_rng((dim, head, 1))
    rows = rng.normal(size=(33, dim))
    arrays = {
        "query_rows": rows + 0.1 * rng.normal(size=rows.shape),
        "key_rows": rows + 0.1 * rng.normal(size=rows.shape),
        "query_offsets": 0.3 * rng.normal(size=len(rows)),
        "key_offsets": 0.3 * rng.normal(size=len(rows)),
        "log_weights": rng.normal(size=len(rows)),
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _learned(x, w, kernel, side, other, head):
    del w  # The map has rows of its own.
    arrays = {name: np.float64(array) for name, array in learning(x.shape[-1], head).items()}
    rows, offsets = arrays[f"{side}_rows"], arrays[f"{side}_offsets"]
    log, sign = _calibrated(x, np.concatenate([rows, -rows]), kernel, side, other, head)
    return log + np.concatenate([offsets, -offsets]) + np.tile(arrays["log_weights"] / 2, 2), sign


# Of two key heads.
learned = [
    Sides(
        functools.partial(_learned, side="query", other="key", head=head),
        functools.partial(_learned, side="key", other="query", head=head),
    )
    for head in range(2)
]


def trigonometric(x, w, kernel):
    log, sign = split(np.concatenate([np.sin(x @ w.T), np.cos(x @ w.T)], axis=-1))
    return log + _log_prefactor(x, kernel, 1) - np.log(len(w)) / 2, sign


def phase(x, w, kernel, phases=None):
    if phases is None:
        phases = np.pi * (1 / 4 + np.arange(len(w)) / len(w))
    log, sign = split(np.sqrt(2) * np.cos(x @ w.T + phases))
    return log + _log_prefactor(x, kernel, 1) - np.log(len(w)) / 2, sign


def relu(x, w, kernel):
    del kernel
    y = x @ w.T
    log, sign = split(np.where(y.real > 0, y, 0))
    return log - np.log(len(w)) / 2, sign


def elu(x, w, kernel):
    del kernel
    y = x if w is None else x @ w.T
    log, sign = split(np.where(y.real > 0, 1 + y, np.exp(np.where(y.real > 0, 0, y))))
    return log - (0 if w is None else np.log(len(w)) / 2), sign


def evaluate(formula, x, w, kernel="softmax"):
    log, sign = formula(np.asarray(x, np.float64), np.asarray(w, np.float64), kernel)
    return sign * np.exp(log)
