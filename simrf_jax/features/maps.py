"""Feature maps as attention takes them, by name or as objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from simrf_jax import checks
from simrf_jax.features.bipolar import (
    AngularHybrid,
    GaussianHybrid,
    angular_hybrid_features,
    gaussian_hybrid_features,
)
from simrf_jax.features.clustered import ClusteredHybrid, clustered_hybrid_features
from simrf_jax.features.exponential import (
    Hyperbolic,
    Positive,
    hyperbolic_features,
    positive_features,
)
from simrf_jax.features.feature_map import FeatureMap
from simrf_jax.features.generalised import Elu, Relu, elu_features, relu_features
from simrf_jax.features.log_space import LogFeatures, Side
from simrf_jax.features.trigonometric import (
    Phase,
    Trigonometric,
    phase_features,
    trigonometric_features,
)

# A feature map as users give it: a name, an object, or a function (x, projection).
FeatureMapLike: TypeAlias = str | FeatureMap | Callable[..., jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["query", "key"])
@dataclasses.dataclass(frozen=True)
class Custom(FeatureMap):
    """A feature map of one's own: a function from (x, projection) to features.

    It returns features ``[..., num_features]`` of vectors ``[..., dim]`` that are already scaled.
    It is exact as far as the range of its numbers allows, and need not have a value at zero: hidden
    keys and padding come to it as copies of other tokens. If its features of a visible token are
    not finite, the gradients of that token, of W, of the scale and of arrays that the function
    holds are NaN, even those of outputs that do not see the token, for 0 times infinity is NaN in
    the function's own derivative: clip what you exponentiate. Outside ``jit``, causal and packed
    attention call it on the whole length at once.

    Attributes:
      query: Function of queries.
      key: Function of keys; None for that of queries.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> def squares(x, w):
      ...     return jnp.square(simrf_jax.project(x, w))
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 32, 16)
      >>> q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 10, 2, 16))
      >>> custom = simrf_jax.feature_maps.Custom(squares)
      >>> simrf_jax.random_feature_attention(q, k, v, w, feature_map=custom).shape
      (1, 10, 2, 16)
    """

    query: Callable[..., jax.Array]
    key: Callable[..., jax.Array] | None = None

    def log_features(self, x: jax.Array, projection: Any, *, side: Side) -> LogFeatures:
        """Returns features in units of the largest of each vector.

        Products with values of any size, and their sums, stay finite in these units.

        Raises:
          TypeError: If the features are not floating.
          ValueError: If the features have the wrong shape.
        """
        function = self.query if side == "query" or self.key is None else self.key
        phi = checks.floating("The features of a feature_map", function(x, projection))
        if phi.shape[:-1] != x.shape[:-1] or phi.shape[-1] == 0:
            raise ValueError(
                f"feature_map must map {(*x.shape[:-1], 'dim')} to "
                f"{(*x.shape[:-1], 'num_features')}, got {phi.shape} for x of shape {x.shape}."
            )
        phi = phi.astype(x.dtype)
        largest = jax.lax.stop_gradient(jnp.max(jnp.abs(phi), axis=-1, keepdims=True))
        largest = jnp.where(largest > 0, largest, 1)
        return LogFeatures(jnp.zeros_like(largest), jnp.log(largest), phi / largest)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "positive": Positive(),
    "hyperbolic": Hyperbolic(),
    "trigonometric": Trigonometric(),
    "phase": Phase(),
    "relu": Relu(),
    "elu": Elu(),
    "angular_hybrid": AngularHybrid(),
    "gaussian_hybrid": GaussianHybrid(),
    "clustered_hybrid": ClusteredHybrid(),
}
_FUNCTIONS = {
    positive_features: "Positive",
    hyperbolic_features: "Hyperbolic",
    trigonometric_features: "Trigonometric",
    phase_features: "Phase",
    relu_features: "Relu",
    elu_features: "Elu",
    angular_hybrid_features: "AngularHybrid",
    gaussian_hybrid_features: "GaussianHybrid",
    clustered_hybrid_features: "ClusteredHybrid",
}


def as_feature_map(feature_map: FeatureMapLike) -> FeatureMap:
    """Returns a feature map, given by name, as an object or as a function (x, projection).

    Raises:
      TypeError: If it is none of these, or one of the library's functions, whose kernel is another
        by default and whose features overflow: its feature map is meant.
      ValueError: If the name is unknown.
    """
    if isinstance(feature_map, str):
        checks.one_of("feature_map", feature_map, FEATURE_MAPS)
        return FEATURE_MAPS[feature_map]
    if isinstance(feature_map, FeatureMap):
        return _registered(feature_map)
    if not callable(feature_map):
        raise TypeError(
            f"feature_map must be one of {', '.join(map(repr, FEATURE_MAPS))}, a FeatureMap, or a "
            f"function (x, projection) -> features, got {feature_map!r}."
        )
    inner: Any = feature_map
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inner in _FUNCTIONS:
        raise TypeError(
            f"feature_map must be simrf_jax.feature_maps.{_FUNCTIONS[inner]}(...) or its name, got "
            f"the function {inner.__name__}, whose features overflow where those of the map do not."
        )
    return Custom(feature_map)


def _registered(feature_map: FeatureMap) -> FeatureMap:
    if jax.tree.leaves(feature_map) == [feature_map]:
        raise TypeError(
            f"{type(feature_map).__name__} is no pytree: register the feature map by "
            "jax.tree_util.register_dataclass."
        )
    return feature_map
