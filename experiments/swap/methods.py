"""Attentions to put in the place of softmax: each names a feature map, or how to fit one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import simrf_jax
from experiments.swap.swapping import Attention, Band, Inputs, mean_squared_sum, uniform
from simrf_jax import feature_maps, theory
from simrf_jax.features import FeatureMapLike
from simrf_jax.integrations.nnx import RandomFeatureAttention
from simrf_jax.projections import Coupling

# Returns the feature map of a layer, given queries and keys ``[batch, T, N, H]`` to fit it on.
Fit = Callable[[jax.Array, jax.Array], FeatureMapLike]


def unfitted(name: str) -> Fit:
    """Returns a fit that takes a named feature map, whatever the data."""
    return lambda query, key: name


def optimal(query: jax.Array, key: jax.Array) -> FeatureMapLike:
    """Returns optimal positive features with the parameter that suits each head's |x + y|^2."""
    squares = np.asarray(mean_squared_sum(Inputs(query, key, key, is_causal=False)))
    parameter = theory.optimal_parameter(squares, query.shape[-1])
    return feature_maps.OptimalPositive(jnp.asarray(parameter, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Method:
    """Random-feature attention of one kind.

    Attributes:
      label: Name in tables and figures.
      fit: Fit of the feature map of a layer.
      coupling: Coupling of the rows of W.
      features_per_row: Number of features that the map makes of a row of W.
      has_band: True if the keys of a band are attended exactly, under one normaliser.
    """

    label: str
    fit: Fit
    coupling: Coupling
    features_per_row: int = 1
    has_band: bool = False

    def feature_maps(self, layers: Iterable[Inputs]) -> list[FeatureMapLike]:
        """Returns the feature map of each layer, fitted on what enters its attention."""
        return [self.fit(layer.query, layer.key) for layer in layers]

    def attentions(
        self,
        prng_key: jax.Array,
        feature_maps: Iterable[FeatureMapLike],
        num_features: int,
        *,
        num_heads: int,
        head_dim: int,
        bandwidth: int | None = None,
    ) -> list[Attention]:
        """Returns the attention of each layer, with a W drawn for each head.

        Args:
          prng_key: Typed PRNG key of all W.
          feature_maps: Feature map of each layer.
          num_features: Number of features of each head.
          num_heads: Number of heads of each layer.
          head_dim: Width of a head.
          bandwidth: Bandwidth of the exact band, for methods that have one.
        """
        rngs = nnx.Rngs(features=prng_key)
        return [
            RandomFeatureAttention(
                num_heads,
                head_dim,
                num_features // self.features_per_row,
                feature_map=feature_map,
                coupling=self.coupling,
                exact_bandwidth=bandwidth if self.has_band else None,
                rngs=rngs,
            )
            for feature_map in feature_maps
        ]


sderf = functools.partial(simrf_jax.calibrate, center=False, balance=False)
METHODS = {
    "positive_iid": Method("positive, iid", unfitted("positive"), "iid"),
    "positive_orthogonal": Method("positive, orthogonal", unfitted("positive"), "orthogonal"),
    "positive_simplex": Method("positive, simplex", unfitted("positive"), "simplex"),
    "hyperbolic": Method(
        "hyperbolic, orthogonal", unfitted("hyperbolic"), "orthogonal", features_per_row=2
    ),
    "optimal": Method("optimal positive (FAVOR++), simplex", optimal, "simplex"),
    "sderf": Method("SDERF, orthogonal", sderf, "orthogonal"),
    "calibrated_simplex": Method("calibrated, simplex", simrf_jax.calibrate, "simplex"),
    "calibrated": Method("calibrated, cross-polytope", simrf_jax.calibrate, "cross_polytope"),
    "band_positive": Method(
        "exact band and positive, simplex", unfitted("positive"), "simplex", has_band=True
    ),
    "band_calibrated": Method(
        "exact band and calibrated, cross-polytope",
        simrf_jax.calibrate,
        "cross_polytope",
        has_band=True,
    ),
}


def available(methods: Iterable[str], bandwidth: int | None) -> list[str]:
    """Returns those methods that make sense with a bandwidth, or without one."""
    return [name for name in methods if bandwidth is not None or not METHODS[name].has_band]


def baselines(bandwidth: int | None) -> dict[str, Attention]:
    """Returns attentions without features, by name, to compare with.

    They are uniform attention and, unless the bandwidth is None, softmax attention to the keys of
    a band alone.
    """
    if bandwidth is None:
        return {"uniform": uniform}
    return {"uniform": uniform, "band": Band(bandwidth)}
