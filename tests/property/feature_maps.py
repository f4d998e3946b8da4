"""Feature maps as a user passes them, with their formulas in float64."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from simrf_jax import FeatureMap
from simrf_jax.feature_maps import Calibrated, Custom, Learned, OptimalPositive
from tests import formulas


class Map(NamedTuple):
    """A feature map and its formulas.

    Attributes:
      argument: The library's argument ``feature_map``.
      of_queries: Function ``f(x, w, kernel)`` that returns log features and signs of queries.
      of_keys: The same function of keys.
      projected: True if the map takes a projection.
      signed: True if features may be negative, so that a denominator may come near zero.
      smooth_at_zero: True if the zero vector has features with a gradient.
      weighted: True if the map takes a log weight with each row of the projection.
    """

    argument: Any
    of_queries: Callable
    of_keys: Callable
    projected: bool = True
    signed: bool = False
    smooth_at_zero: bool = True
    weighted: bool = False


def named(name: str, **options: Any) -> Map:
    """Returns one of the library's feature maps."""
    formula = getattr(formulas, name)
    return Map(name, formula, formula, **options)


def polynomial(x, w):
    return jnp.square(x @ w.T) + 0.1


def polynomial_formula(x, w, kernel):
    del kernel
    return formulas.split(np.square(x @ w.T) + 0.1)


def direction(x, w):
    """Returns features that are NaN at the zero vector."""
    return jnp.exp((x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ w.T)


def direction_formula(x, w, kernel):
    del kernel
    log = (x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True))) @ w.T
    return log, np.ones_like(log)


def inverse(x, w):
    """Returns features that are infinite at the zero vector."""
    return jnp.exp(jnp.cos(x @ w.T)) / jnp.linalg.norm(x, axis=-1, keepdims=True)


def inverse_formula(x, w, kernel):
    del kernel
    log = np.cos(x @ w.T) - np.log(np.sum(np.square(x), axis=-1, keepdims=True)) / 2
    return log, np.ones_like(log)


@dataclasses.dataclass(frozen=True)
class CalibratedForAnyDim(FeatureMap):
    """The map of ``formulas.calibrated``, whatever the dim of the vectors."""

    is_finite = True

    def log_features(self, x, projection, *, side):
        arrays = formulas.calibration(x.shape[-1])
        own = Calibrated(**{name: jnp.asarray(array) for name, array in arrays.items()})
        return own.log_features(x, projection, side=side)


@dataclasses.dataclass(frozen=True)
class LearnedForAnyDim(FeatureMap):
    """The map of ``formulas.learned``, whatever the dim of the vectors."""

    is_finite = True

    def log_features(self, x, projection, *, side):
        dim = x.shape[-1]
        own = Learned(Calibrated(**formulas.calibration(dim)), **formulas.learning(dim))
        return own.log_features(x, projection, side=side)


MAPS = {
    "positive": named("positive"),
    "hyperbolic": named("hyperbolic"),
    "weighted positive": named("positive", weighted=True),
    "optimal positive": Map(
        OptimalPositive(-0.1), formulas.optimal_positive, formulas.optimal_positive
    ),
    "calibrated": Map(CalibratedForAnyDim(), *formulas.calibrated[0]),
    "weighted calibrated": Map(CalibratedForAnyDim(), *formulas.calibrated[0], weighted=True),
    "learned": Map(LearnedForAnyDim(), *formulas.learned[0], projected=False),
    "trigonometric": named("trigonometric", signed=True),
    "phase": named("phase", signed=True),
    "relu": named("relu"),
    "elu": named("elu", projected=False),
    "elu of a projection": named("elu"),
    "polynomial": Map(polynomial, polynomial_formula, polynomial_formula),
    "direction": Map(direction, direction_formula, direction_formula, smooth_at_zero=False),
    "pair": Map(
        Custom(direction, inverse), direction_formula, inverse_formula, smooth_at_zero=False
    ),
}
