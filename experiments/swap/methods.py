"""Attentions to put in the place of softmax: each names a feature map, or how to fit one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import simrf_jax
from experiments.char_lm.model import near_field
from experiments.swap.learning import Schedule, learn
from experiments.swap.swapping import Attention, Inputs, mean_squared_sum, uniform
from simrf_jax import feature_maps, theory
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.projections import Coupling, DrawOptions, Norms
from simrf_jax.calibration import Mixture, fit_mixture
from simrf_jax.integrations.nnx import RandomFeatureAttention, RandomProjection


class Learnable(NamedTuple):
    """Coordinates of a layer in which features are learned; see ``feature_maps.Learned``."""

    calibration: feature_maps.Calibrated


# What is fitted to a layer: a feature map, one with the centers of the rows of W, or the
# coordinates of one whose rows are drawn and then learned.
Fitted: TypeAlias = FeatureMapLike | Mixture | Learnable
# Returns the fit of a layer, given what enters its attention, and the bandwidth of its exact band.
Fit = Callable[[Inputs, int | None], Fitted]
NUM_CENTERS = 16


def unfitted(name: str) -> Fit:
    """Returns a fit that takes a named feature map, whatever the data."""
    return lambda layer, bandwidth: name


def optimal(layer: Inputs, bandwidth: int | None) -> FeatureMapLike:
    """Returns optimal positive features with the parameter that suits each head's |x + y|^2."""
    del bandwidth
    squares = np.asarray(mean_squared_sum(layer._replace(is_causal=False)))
    parameter = theory.optimal_parameter(squares, layer.query.shape[-1])
    return feature_maps.OptimalPositive(jnp.asarray(parameter, jnp.float32))


def calibrated(layer: Inputs, bandwidth: int | None) -> feature_maps.Calibrated:
    """Returns calibrated features."""
    del bandwidth
    return simrf_jax.calibrate(layer.query, layer.key)


def sderf(layer: Inputs, bandwidth: int | None) -> feature_maps.Calibrated:
    """Returns features that are tilted, but neither centered nor balanced."""
    del bandwidth
    return simrf_jax.calibrate(layer.query, layer.key, center=False, balance=False)


def learned(layer: Inputs, bandwidth: int | None) -> Learnable:
    """Returns the coordinates of calibrated features, which learning starts at."""
    return Learnable(calibrated(layer, bandwidth))


def learned_from_random(layer: Inputs, bandwidth: int | None) -> Learnable:
    """Returns the coordinates of queries and keys themselves: learning starts at a random W."""
    del bandwidth
    num_heads, dim = layer.key.shape[-2:]
    return Learnable(feature_maps.Calibrated.identity(num_heads, dim))


def calibrated_mixture(layer: Inputs, bandwidth: int | None) -> Mixture:
    """Returns a calibrated map with ``NUM_CENTERS`` centers for the rows of W."""
    # The fit is a function of the data alone, as that of all other maps.
    return fit_mixture(
        jax.random.key(0),
        layer.query,
        layer.key,
        NUM_CENTERS,
        calibration=calibrated(layer, bandwidth),
        is_causal=layer.is_causal,
        exact_bandwidth=bandwidth,
    )


@dataclasses.dataclass(frozen=True)
class Method:
    """Random-feature attention of one kind.

    Attributes:
      label: Name in tables and figures.
      fit: Fit of the feature map of a layer.
      coupling: Coupling of the rows of W.
      norms: Law of their norms.
      features_per_row: Number of features that the map makes of a row of W.
      has_band: True if the keys of a band are attended exactly, under one normalizer.
      has_keys: True if a few keys are attended exactly by all queries, in the place of features:
        those of the largest mass, or in causal attention, of the largest scores.
    """

    label: str
    fit: Fit
    coupling: Coupling
    norms: Norms = "chi"
    features_per_row: int = 1
    has_band: bool = False
    has_keys: bool = False

    def attentions(
        self,
        prng_key: jax.Array,
        layers: Iterable[Inputs],
        num_features: int,
        *,
        schedule: Schedule,
        bandwidth: int | None = None,
        exact_keys: int | None = None,
    ) -> list[Attention]:
        """Returns the attention of each layer, fitted to what enters it.

        Args:
          prng_key: Typed PRNG key of all W, which are drawn for each head.
          layers: Inputs of the attention of each layer, to fit and to learn from.
          num_features: Number of features of each head, and of exact keys, together.
          schedule: Steps of learning, for methods that learn.
          bandwidth: Bandwidth of the exact band, for methods that have one.
          exact_keys: Number of exact keys, for methods that have some.
        """
        exact_bandwidth = bandwidth if self.has_band else None
        exact_keys = exact_keys if self.has_keys else None
        rngs = nnx.Rngs(features=prng_key)
        num_rows = (num_features - (exact_keys or 0)) // self.features_per_row
        adapters = functools.partial(
            RandomFeatureAttention, exact_bandwidth=exact_bandwidth, rngs=rngs
        )

        def attention(layer: Inputs) -> Attention:
            heads, dim = layer.key.shape[-2:]
            keys: int | simrf_jax.ExactKeys | None = exact_keys
            if exact_keys is not None and layer.is_causal:
                keys = simrf_jax.ExactKeys(exact_keys, by="score")
            adapter = functools.partial(adapters, heads, dim, exact_keys=keys)
            fitted = self.fit(layer, exact_bandwidth)
            if isinstance(fitted, Learnable):
                rows = draw_heads(rngs.features(), heads, num_rows, dim, self.coupling)
                start = feature_maps.Learned.start(rows, fitted.calibration)
                learned = learn(
                    rngs.features(),
                    start,
                    layer.query,
                    layer.key,
                    is_causal=layer.is_causal,
                    schedule=schedule,
                    exact_bandwidth=exact_bandwidth,
                    exact_keys=keys,
                )
                return adapter(None, feature_map=learned)
            if isinstance(fitted, Mixture):
                mixed = adapter(num_rows, feature_map=fitted.feature_map, coupling=self.coupling)
                w = _draw_around(rngs.features(), fitted.centers, num_rows, self.coupling)
                mixed.projection = RandomProjection(w)
                return mixed
            return adapter(num_rows, feature_map=fitted, coupling=self.coupling, norms=self.norms)

        return [attention(layer) for layer in layers]


def draw_heads(
    prng_key: jax.Array, num_heads: int, num_features: int, dim: int, coupling: Coupling
) -> jax.Array:
    """Returns a W for each head, ``[heads, num_features, dim]``."""

    def draw(prng_key: jax.Array) -> Any:
        return simrf_jax.draw_projection(prng_key, num_features, dim, coupling=coupling)

    return jax.vmap(draw)(jax.random.split(prng_key, num_heads))


def _draw_around(
    prng_key: jax.Array, centers: jax.Array, num_features: int, coupling: Coupling
) -> simrf_jax.Projection:
    """Returns a W for each head, of rows around as many of its centers as there are rows for."""
    draw = functools.partial(
        simrf_jax.calibration.draw_mixture_projection,
        num_features=num_features,
        options=DrawOptions(coupling=coupling),
    )
    keys = jax.random.split(prng_key, len(centers))
    return jax.vmap(draw)(keys, centers[:, :num_features])


METHODS = {
    "positive_iid": Method("positive, iid", unfitted("positive"), "iid"),
    "positive_orthogonal": Method("positive, orthogonal", unfitted("positive"), "orthogonal"),
    "positive_simplex": Method("positive, simplex", unfitted("positive"), "simplex"),
    "hyperbolic": Method(
        "hyperbolic, orthogonal", unfitted("hyperbolic"), "orthogonal", features_per_row=2
    ),
    "optimal": Method("optimal positive (FAVOR++), simplex", optimal, "simplex"),
    "sderf": Method("SDERF, orthogonal", sderf, "orthogonal"),
    "calibrated_iid": Method("calibrated, iid", calibrated, "iid"),
    "calibrated_simplex": Method("calibrated, simplex", calibrated, "simplex"),
    "calibrated": Method("calibrated, cross-polytope", calibrated, "cross_polytope"),
    "calibrated_pairs": Method("calibrated, pairs", calibrated, "cross_polytope", "pair"),
    "mixture": Method(
        f"calibrated mixture of {NUM_CENTERS}, cross-polytope", calibrated_mixture, "cross_polytope"
    ),
    "learned_from_random": Method(
        "learned from a random W", learned_from_random, "orthogonal", features_per_row=2
    ),
    "learned": Method("learned from calibrated", learned, "orthogonal", features_per_row=2),
}
METHODS |= {
    f"band_{name}": dataclasses.replace(
        METHODS[of], label=f"exact band and {METHODS[of].label}", has_band=True
    )
    for name, of in {
        "positive": "positive_simplex",
        **{name: name for name in ("mixture", "calibrated", "calibrated_pairs", "learned")},
    }.items()
}
METHODS |= {
    f"keys_{name}": dataclasses.replace(
        METHODS[name], label=f"exact keys and {name}", has_keys=True
    )
    for name in ("calibrated", "learned")
}
METHODS |= {
    f"band_keys_{name}": dataclasses.replace(
        METHODS[f"band_{name}"],
        label=f"exact band and keys, {name}",
        has_keys=True,
    )
    for name in ("positive", "calibrated", "learned")
}


def available(
    methods: Iterable[str], bandwidth: int | None, exact_keys: int | None = None
) -> list[str]:
    """Returns those methods that make sense with a bandwidth and exact keys, or without them."""
    has_band, has_keys = bandwidth is not None, exact_keys is not None
    return [
        name
        for name in methods
        if METHODS[name].has_band <= has_band and METHODS[name].has_keys <= has_keys
    ]


def baselines(bandwidth: int | None) -> dict[str, Attention]:
    """Returns attentions without features, by name, to compare with.

    They are uniform attention and, unless the bandwidth is None, softmax attention to the keys of
    a band alone. A band that is as wide as the sequence would be softmax attention.
    """
    return {"uniform": uniform} | (
        {} if bandwidth is None else {"band": functools.partial(near_field, bandwidth=bandwidth)}
    )


def attentions(
    name: str,
    num_features: int | None,
    prng_key: jax.Array,
    layers: list[Inputs],
    config: ConfigDict,
) -> list[Attention]:
    """Returns the attention of each layer: of a method, fitted and drawn, or of a baseline.

    Args:
      name: Name of ``METHODS`` or, where ``num_features`` is None, of ``baselines``.
      num_features: Number of features of each head, or None.
      prng_key: Typed PRNG key of the draws.
      layers: Inputs of the attention of each layer, to fit on.
      config: Section of the config with ``learned`` and, if there are such, ``bandwidth`` of the
        band and the number of ``exact_keys``.
    """
    bandwidth, exact_keys = config.get("bandwidth"), config.get("exact_keys")
    if num_features is None:
        return [baselines(bandwidth)[name] for _ in layers]
    schedule = Schedule(**config.learned)
    return METHODS[name].attentions(
        prng_key,
        layers,
        num_features,
        schedule=schedule,
        bandwidth=bandwidth,
        exact_keys=exact_keys,
    )
