"""Attentions to put in the place of softmax: each names a feature map, or how to fit one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import simrf_jax
from experiments.swap.swapping import Attention, Band, Inputs, mean_squared_sum, uniform
from simrf_jax import feature_maps, theory
from simrf_jax.calibration import Mixture, fit_mixture
from simrf_jax.features import FeatureMapLike
from simrf_jax.integrations.nnx import RandomFeatureAttention, RandomProjection
from simrf_jax.projections import Coupling, DrawOptions

# What is fitted to a layer: a feature map, or one with the centers of the rows of W.
Fitted: TypeAlias = FeatureMapLike | Mixture
# Returns the fit of a layer, given queries and keys ``[batch, T, N, H]``.
Fit = Callable[[jax.Array, jax.Array], Fitted]
NUM_CENTERS = 16


def unfitted(name: str) -> Fit:
    """Returns a fit that takes a named feature map, whatever the data."""
    return lambda query, key: name


def optimal(query: jax.Array, key: jax.Array) -> FeatureMapLike:
    """Returns optimal positive features with the parameter that suits each head's |x + y|^2."""
    squares = np.asarray(mean_squared_sum(Inputs(query, key, key, is_causal=False)))
    parameter = theory.optimal_parameter(squares, query.shape[-1])
    return feature_maps.OptimalPositive(jnp.asarray(parameter, jnp.float32))


def calibrated_mixture(query: jax.Array, key: jax.Array) -> Mixture:
    """Returns a calibrated map with ``NUM_CENTERS`` centers for the rows of W."""
    calibration = simrf_jax.calibrate(query, key)
    # The fit is a function of the data alone, as that of all other maps.
    return fit_mixture(jax.random.key(0), query, key, NUM_CENTERS, calibration=calibration)


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

    def feature_maps(self, layers: Iterable[Inputs]) -> list[Fitted]:
        """Returns the fit of each layer to what enters its attention."""
        return [self.fit(layer.query, layer.key) for layer in layers]

    def attentions(
        self,
        prng_key: jax.Array,
        feature_maps: Iterable[Fitted],
        num_features: int,
        *,
        num_heads: int,
        head_dim: int,
        bandwidth: int | None = None,
    ) -> list[Attention]:
        """Returns the attention of each layer, with a W drawn for each head.

        Args:
          prng_key: Typed PRNG key of all W.
          feature_maps: Fit of each layer.
          num_features: Number of features of each head.
          num_heads: Number of heads of each layer.
          head_dim: Width of a head.
          bandwidth: Bandwidth of the exact band, for methods that have one.
        """
        rngs = nnx.Rngs(features=prng_key)

        def attention(fitted: Fitted) -> Attention:
            adapter = RandomFeatureAttention(
                num_heads,
                head_dim,
                num_features // self.features_per_row,
                feature_map=fitted.feature_map if isinstance(fitted, Mixture) else fitted,
                coupling=self.coupling,
                exact_bandwidth=bandwidth if self.has_band else None,
                rngs=rngs,
            )
            if isinstance(fitted, Mixture):
                w = _draw_around(rngs.features(), fitted.centers, num_features, self.coupling)
                adapter.projection = RandomProjection(w)
            return adapter

        return [attention(fitted) for fitted in feature_maps]


def _draw_around(
    prng_key: jax.Array, centers: jax.Array, num_features: int, coupling: Coupling
) -> simrf_jax.WeightedProjection:
    """Returns a W for each head, of rows around as many of its centers as there are rows for."""
    draw = functools.partial(
        simrf_jax.draw_mixture_projection,
        num_features=num_features,
        options=DrawOptions(coupling=coupling),
    )
    keys = jax.random.split(prng_key, len(centers))
    return jax.vmap(draw)(keys, centers[:, :num_features])


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
    "mixture": Method(
        f"calibrated mixture of {NUM_CENTERS}, cross-polytope", calibrated_mixture, "cross_polytope"
    ),
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
