"""Feature maps by name, as attention asks for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from simrf_jax import checks
from simrf_jax.features import bipolar, clustered, exponential, generalised, trigonometric
from simrf_jax.features.log_space import LogFeatures


@dataclasses.dataclass(frozen=True)
class LibraryMap:
    """A map of this library to log features; equal ones are equal by value, so JAX compiles once.

    Attributes:
      function: Returns the log features of x and a projection.
      keywords: Its keyword arguments, ordered by name.
    """

    function: Callable[..., LogFeatures]
    keywords: tuple[tuple[str, Any], ...] = ()

    def __call__(self, x: Any, projection: Any) -> LogFeatures:
        """Returns the log features of what the function takes, ``[..., dim]``."""
        return self.function(x, projection, **dict(self.keywords))


@dataclasses.dataclass(frozen=True, eq=False)
class CustomMap:
    """A user's function from (x, projection) to features, which may depend on what it closes over.

    Two of them are never equal, so nothing that was traced from one is used for another.

    Attributes:
      function: Returns the features, or their ``LogFeatures``.
    """

    function: Callable[..., Any]

    def __call__(self, x: Any, projection: Any) -> LogFeatures:
        """Returns log features of ``[..., dim]``; NaN exponents mark vectors without finite ones.

        The values there are zeros, so that nothing reaches the gradients of other vectors.

        Raises:
          TypeError: If the features are not floating.
          ValueError: If the features have the wrong shape.
        """
        phi = self.function(x, projection)
        if not isinstance(phi, LogFeatures):
            phi = _as_log_features(phi, x)
        finite = _is_finite(phi)
        values = None if phi.values is None else jnp.where(finite, phi.values, 0)
        return LogFeatures(
            jnp.where(finite, phi.exponent, jnp.nan), jnp.where(finite, phi.log_scale, 0), values
        )


LogFeatureMap: TypeAlias = LibraryMap | CustomMap


class FeaturePair(NamedTuple):
    """Two feature maps, called as ``f(x, projection)``: one for queries and one for keys.

    Attributes:
      query: psi_1, from ``[..., dim]`` to ``[..., num_features]``.
      key: psi_2, likewise.

    Example:
      >>> import jax, functools, simrf_jax
      >>> hybrid = simrf_jax.gaussian_hybrid_features
      >>> pair = simrf_jax.FeaturePair(
      ...     query=functools.partial(hybrid, side="query", bandwidth=2.0),
      ...     key=functools.partial(hybrid, side="key", bandwidth=2.0),
      ... )
      >>> p = simrf_jax.draw_bipolar_projection(jax.random.key(0), 32, 8, 16)
      >>> q, k, v = 0.3 * jax.random.normal(jax.random.key(1), (3, 1, 10, 2, 16))
      >>> simrf_jax.random_feature_attention(q, k, v, p, feature_map=pair).shape
      (1, 10, 2, 16)
    """

    query: Callable[..., Any]
    key: Callable[..., Any]


FeatureMap: TypeAlias = str | Callable[..., Any] | FeaturePair


class NamedMap(NamedTuple):
    """What attention knows about one of the library's feature maps.

    Attributes:
      features: The public function.
      log_features: The same with its scale apart.
      options: Keywords that attention has a say in: the kernel, which is softmax unless it is told
        otherwise, and the side, query or key.
      projection: The type of W: an array, or a structure of several parts.
    """

    features: Callable[..., jax.Array]
    log_features: Callable[..., LogFeatures]
    options: tuple[str, ...] = ("kernel",)
    projection: type = jax.Array


_BOTH = ("kernel", "side")
FEATURE_MAPS = {
    "positive": NamedMap(exponential.positive_features, exponential.positive_log_features),
    "hyperbolic": NamedMap(exponential.hyperbolic_features, exponential.hyperbolic_log_features),
    "trigonometric": NamedMap(
        trigonometric.trigonometric_features, trigonometric.trigonometric_log_features
    ),
    "phase": NamedMap(trigonometric.phase_features, trigonometric.phase_log_features),
    "relu": NamedMap(generalised.relu_features, generalised.relu_log_features, ()),
    "elu": NamedMap(generalised.elu_features, generalised.elu_log_features, ()),
    "angular_hybrid": NamedMap(
        bipolar.angular_hybrid_features,
        bipolar.angular_log_features,
        _BOTH,
        bipolar.BipolarProjection,
    ),
    "gaussian_hybrid": NamedMap(
        bipolar.gaussian_hybrid_features,
        bipolar.gaussian_log_features,
        _BOTH,
        bipolar.BipolarProjection,
    ),
    "clustered_hybrid": NamedMap(
        clustered.clustered_hybrid_features,
        clustered.clustered_log_features,
        _BOTH,
        clustered.ClusteredProjection,
    ),
}


def log_feature_maps(feature_map: FeatureMap) -> tuple[LogFeatureMap, LogFeatureMap]:
    """Returns the maps of queries and of keys to log features, for a name, a callable or a pair.

    Raises:
      TypeError: If it is none of these.
      ValueError: If the name is unknown.
    """
    query, key = _pair(feature_map)
    return _log_features(query, "query"), _log_features(key, "key")


def projection_type(feature_map: FeatureMap) -> type:
    """The type of W that a name, a callable or a pair takes; an array, but for the hybrids."""
    named = [_named(one)[0] for one in _pair(feature_map)]
    types = [jax.Array if one is None else one.projection for one in named]
    return next((one for one in types if one is not jax.Array), jax.Array)


def _pair(feature_map: FeatureMap) -> FeaturePair:
    if isinstance(feature_map, str):
        checks.one_of("feature_map", feature_map, FEATURE_MAPS)
        feature_map = FEATURE_MAPS[feature_map].features
    pair = feature_map if isinstance(feature_map, FeaturePair) else (feature_map, feature_map)
    if not all(callable(one) for one in pair):
        raise TypeError(
            f"feature_map must be one of {', '.join(map(repr, FEATURE_MAPS))}, a callable "
            f"(x, projection) -> features, or a FeaturePair of two, got {feature_map!r}."
        )
    return FeaturePair(*pair)


def _named(function: Callable[..., Any]) -> tuple[NamedMap | None, dict[str, Any]]:
    """The library's map that a function is, bare or in a functools.partial with keywords."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        keywords = function.keywords | keywords
        function = function.func
    for named in FEATURE_MAPS.values():
        if function is named.features:
            return named, keywords
    return None, {}


def _log_features(function: Callable[..., Any], side: str) -> LogFeatureMap:
    named, keywords = _named(function)
    if named is None:
        return CustomMap(function)
    defaults = {"kernel": "softmax", "side": side}
    keywords = {name: defaults[name] for name in named.options} | keywords
    library_map = LibraryMap(named.log_features, tuple(sorted(keywords.items())))
    if all(isinstance(value, (str, int, float)) for value in keywords.values()):
        return library_map
    return CustomMap(library_map)  # Arrays cannot be compared by value while JAX traces them.


def _as_log_features(phi: Any, x: jax.Array) -> LogFeatures:
    """Checks the features of ``x`` and returns them in units of the largest of each vector.

    Products with values of any size, and their sums, stay finite in these units.
    """
    phi = checks.floating("The features of a feature_map", phi)
    if phi.shape[:-1] != x.shape[:-1] or phi.shape[-1] == 0:
        raise ValueError(
            f"feature_map must map {(*x.shape[:-1], 'dim')} to {(*x.shape[:-1], 'num_features')}, "
            f"got {phi.shape} for x of shape {x.shape}."
        )
    phi = phi.astype(x.dtype)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(phi), axis=-1, keepdims=True))
    largest = jnp.where(largest > 0, largest, 1)
    return LogFeatures(jnp.zeros_like(largest), jnp.log(largest), phi / largest)


def _is_finite(phi: LogFeatures) -> jax.Array:
    """Returns ``[..., 1]``, True where all features of a vector are finite; some may be zero."""
    finite = (phi.exponent < jnp.inf) & jnp.isfinite(phi.log_scale)  # NaN is not below infinity.
    finite = jnp.all(finite, axis=-1, keepdims=True)
    if phi.values is None:
        return finite
    return finite & jnp.all(jnp.isfinite(phi.values), axis=-1, keepdims=True)
