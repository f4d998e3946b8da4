"""Feature maps by name, as attention asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from simrf_jax import checks
from simrf_jax.features.clustered import clustered_hybrid_features, clustered_log_features
from simrf_jax.features.exponential import (
    hyperbolic_features,
    hyperbolic_log_features,
    positive_features,
    positive_log_features,
)
from simrf_jax.features.generalised import (
    elu_features,
    elu_log_features,
    relu_features,
    relu_log_features,
)
from simrf_jax.features.hybrid import (
    SIDES,
    angular_hybrid_features,
    angular_log_features,
    gaussian_hybrid_features,
    gaussian_log_features,
)
from simrf_jax.features.log_space import LogFeatures
from simrf_jax.features.trigonometric import (
    phase_log_features,
    trigonometric_features,
    trigonometric_log_features,
)

LogFeatureMap: TypeAlias = Callable[[jax.Array, Any], LogFeatures]


class FeaturePair(NamedTuple):
    """Two feature maps, called as ``f(x, projection)``: one for queries and one for keys.

    Attributes:
      query: psi_1, from ``[..., dim]`` to ``[..., num_features]``.
      key: psi_2, likewise.

    Example:
      >>> import jax, functools, simrf_jax
      >>> hybrid = simrf_jax.gaussian_hybrid_features
      >>> pair = simrf_jax.FeaturePair(
      ...     functools.partial(hybrid, side="query", bandwidth=2.0),
      ...     functools.partial(hybrid, side="key", bandwidth=2.0),
      ... )
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 32, 8, 16)
      >>> q, k, v = 0.3 * jax.random.normal(jax.random.key(1), (3, 1, 10, 2, 16))
      >>> simrf_jax.random_feature_attention(q, k, v, p, feature_map=pair).shape
      (1, 10, 2, 16)
    """

    query: Callable[..., Any]
    key: Callable[..., Any]


FeatureMap: TypeAlias = str | Callable[..., Any] | FeaturePair


def _softmax(log_features: Callable[..., LogFeatures]) -> FeaturePair:
    estimator = functools.partial(log_features, kernel="softmax")
    return FeaturePair(estimator, estimator)


def _two_sided(log_features: Callable[..., LogFeatures]) -> FeaturePair:
    return FeaturePair(*(functools.partial(log_features, side=s, kernel="softmax") for s in SIDES))


# name -> maps to log features, of the softmax kernel where the map has a choice
FEATURE_MAPS: dict[str, FeaturePair] = {
    "positive": _softmax(positive_log_features),
    "hyperbolic": _softmax(hyperbolic_log_features),
    "trigonometric": _softmax(trigonometric_log_features),
    "phase": _softmax(phase_log_features),
    "relu": FeaturePair(relu_log_features, relu_log_features),
    "elu": FeaturePair(elu_log_features, elu_log_features),
    "angular_hybrid": _two_sided(angular_log_features),
    "gaussian_hybrid": _two_sided(gaussian_log_features),
    "clustered_hybrid": _two_sided(clustered_log_features),
}
# The library's own functions stand for their names: no one means attention by the Gaussian kernel.
_NAMES: dict[Callable[..., jax.Array], str] = {
    positive_features: "positive",
    hyperbolic_features: "hyperbolic",
    trigonometric_features: "trigonometric",
    relu_features: "relu",
    elu_features: "elu",
    angular_hybrid_features: "angular_hybrid",
    gaussian_hybrid_features: "gaussian_hybrid",
    clustered_hybrid_features: "clustered_hybrid",
}


def log_feature_maps(feature_map: FeatureMap) -> tuple[LogFeatureMap, LogFeatureMap]:
    """Returns the maps of queries and of keys to log features, for a name, a callable or a pair.

    Raises:
      TypeError: If it is none of these.
      ValueError: If the name is unknown.
    """
    if callable(feature_map):
        feature_map = _NAMES.get(feature_map, feature_map)
    if isinstance(feature_map, str):
        checks.one_of("feature_map", feature_map, FEATURE_MAPS)
        return FEATURE_MAPS[feature_map]
    pair = feature_map if isinstance(feature_map, FeaturePair) else (feature_map, feature_map)
    if not all(callable(one) for one in pair):
        raise TypeError(
            f"feature_map must be one of {', '.join(map(repr, FEATURE_MAPS))}, a callable "
            f"(x, projection) -> features, or a FeaturePair of two, got {feature_map!r}."
        )
    query, key = (functools.partial(_from_callable, one) for one in pair)
    return query, key


def _from_callable(feature_map: Callable[..., Any], x: jax.Array, projection: Any) -> LogFeatures:
    phi = feature_map(x, projection)
    if isinstance(phi, LogFeatures):
        return phi
    phi = checks.floating("The features of a feature_map", phi)
    if phi.shape[:-1] != x.shape[:-1] or phi.shape[-1] == 0:
        raise ValueError(
            f"feature_map must map {(*x.shape[:-1], 'dim')} to {(*x.shape[:-1], 'num_features')}, "
            f"got {phi.shape} for x of shape {x.shape}."
        )
    zero = jnp.zeros_like(x[..., :1])
    return LogFeatures(zero, zero, phi.astype(x.dtype))
