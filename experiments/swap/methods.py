"""Attentions to put in the place of softmax: each names a feature map, or how to fit one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import jax
from flax import nnx

from experiments.swap.swapping import Attention, Band, Inputs, uniform
from simrf_jax.features import FeatureMapLike
from simrf_jax.integrations.nnx import RandomFeatureAttention
from simrf_jax.projections import Coupling

# Returns the feature map of a layer, given queries and keys ``[batch, T, N, H]`` to fit it on.
Fit = Callable[[jax.Array, jax.Array], FeatureMapLike]


def unfitted(name: str) -> Fit:
    """Returns a fit that takes a named feature map, whatever the data."""
    return lambda query, key: name


@dataclasses.dataclass(frozen=True)
class Method:
    """Random-feature attention of one kind.

    Attributes:
      label: Name in tables and figures.
      fit: Fit of the feature map of a layer.
      coupling: Coupling of the rows of W.
      features_per_row: Number of features that the map makes of a row of W.
    """

    label: str
    fit: Fit
    coupling: Coupling
    features_per_row: int = 1

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
    ) -> list[Attention]:
        """Returns the attention of each layer, with a W drawn for each head.

        Args:
          prng_key: Typed PRNG key of all W.
          feature_maps: Feature map of each layer.
          num_features: Number of features of each head.
          num_heads: Number of heads of each layer.
          head_dim: Width of a head.
        """
        rngs = nnx.Rngs(features=prng_key)
        return [
            RandomFeatureAttention(
                num_heads,
                head_dim,
                num_features // self.features_per_row,
                feature_map=feature_map,
                coupling=self.coupling,
                rngs=rngs,
            )
            for feature_map in feature_maps
        ]


METHODS = {
    "positive_iid": Method("positive, iid", unfitted("positive"), "iid"),
    "positive_orthogonal": Method("positive, orthogonal", unfitted("positive"), "orthogonal"),
    "positive_simplex": Method("positive, simplex", unfitted("positive"), "simplex"),
    "hyperbolic": Method(
        "hyperbolic, orthogonal", unfitted("hyperbolic"), "orthogonal", features_per_row=2
    ),
}


def baselines(bandwidth: int | None) -> dict[str, Attention]:
    """Returns attentions without features, by name, to compare with.

    They are uniform attention and, unless the bandwidth is None, softmax attention to the keys of
    a band alone.
    """
    if bandwidth is None:
        return {"uniform": uniform}
    return {"uniform": uniform, "band": Band(bandwidth)}
