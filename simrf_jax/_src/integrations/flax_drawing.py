"""Draws of the projections of the adapters, for both Flax APIs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from simrf_jax._src import checks
from simrf_jax._src.features import BipolarProjection, FeatureMapLike, as_feature_map
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.exponential import OptimalPositive, Positive
from simrf_jax._src.integrations.flax_repr import name_of_map
from simrf_jax._src.kernels import GAUSSIAN
from simrf_jax._src.projections import (
    BlockMode,
    Coupling,
    DrawOptions,
    Norms,
    Projection,
    ProjectionLike,
    Rotation,
)

# A bipolar hybrid has about 4 num_features (num_weights + 1) features.
NUM_WEIGHTS = 8
# Feature maps for which the product with W is half the cost.
TAKE_PAIRS = (Positive, OptimalPositive, Calibrated)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The arguments of an adapter that determine how its projections are drawn.

    Attributes:
      coupling: Coupling of the rows; None for the default of the feature map.
      block: Row-block mode.
      rotation: Distribution of the rotations.
      norms: Law of the row norms.
      num_weights: Number of random vectors that estimate the weight of a hybrid; None for 8.
    """

    coupling: Coupling | None
    block: BlockMode
    rotation: Rotation
    norms: Norms
    num_weights: int | None

    def check(self, feature_maps: Sequence[FeatureMapLike]) -> None:
        """Accepts feature maps whose W the adapters can draw."""
        if not isinstance(feature_maps, (tuple, list)) or not feature_maps:
            raise TypeError(f"feature_maps must be a tuple of feature maps, got {feature_maps!r}.")
        kinds = [as_feature_map(feature_map).projection_type for feature_map in feature_maps]
        for feature_map, kind in zip(feature_maps, kinds, strict=True):
            if kind not in (jax.Array, BipolarProjection):
                raise ValueError(
                    f"feature_map={feature_map!r} takes a {kind.__name__}, which the adapters "
                    "cannot draw: a ClusteredProjection takes the centers of clusters of queries "
                    "and keys, for example. Call simrf_jax.random_feature_attention with it."
                )
        if self.num_weights is not None and BipolarProjection not in kinds:
            names = ", ".join(repr(name_of_map(feature_map)) for feature_map in feature_maps)
            raise ValueError(
                "num_weights is for angular_hybrid and gaussian_hybrid, got "
                f"{self.num_weights} for {names}."
            )

    def options(self, feature_map: FeatureMapLike) -> DrawOptions:
        """Returns the draw options for the W of a feature map.

        Args:
          feature_map: Feature map, by name or as an object.

        Raises:
          ValueError: If a name is unknown, the coupling does not have the rows that ``norms``
            couples, or the feature map needs norms that are chi variables.
        """
        feature_map = as_feature_map(feature_map)
        coupling = feature_map.coupling if self.coupling is None else self.coupling
        kernel = feature_map.kernel_of_rows or GAUSSIAN
        options = DrawOptions(coupling, self.block, self.rotation, self.norms, kernel=kernel)
        if feature_map.needs_chi_norms and options.has_fixed_norms:
            raise ValueError(
                f"norms={self.norms!r} fixes the norms of the rows, with which "
                f"{type(feature_map).__name__} estimates another kernel; it needs norms that are "
                "chi variables, such as norms='chi'."
            )
        return options

    def draw(
        self,
        key: jax.Array,
        num_heads: int | None,
        num_features: int | None,
        dim: int,
        feature_map: FeatureMapLike,
    ) -> ProjectionLike | None:
        """Draws the W of a feature map, one for each head.

        Args:
          key: A typed PRNG key.
          num_heads: Number of heads, the leading axis of the result; None draws one W without it.
          num_features: Number of random features; None draws nothing.
          dim: Width of a head.
          feature_map: Feature map, by name or as an object.
        """
        options = self.options(feature_map)
        if num_features is None:
            return None
        dim = checks.positive_int("head_dim", dim)
        num_weights = NUM_WEIGHTS if self.num_weights is None else self.num_weights

        def draw(key: jax.Array) -> ProjectionLike:
            if as_feature_map(feature_map).projection_type is not BipolarProjection:
                return options.draw(key, num_features, dim)
            return BipolarProjection.draw(key, num_features, num_weights, dim, options)

        return draw(key) if num_heads is None else jax.vmap(draw)(jax.random.split(key, num_heads))

    def draw_all(
        self,
        key: jax.Array,
        num_heads: int | None,
        num_features: int | Sequence[int | None] | None,
        dim: int,
        feature_maps: Sequence[FeatureMapLike],
    ) -> tuple[ProjectionLike | None, ...]:
        """Draws the projections of several feature maps.

        Args:
          key: A typed PRNG key.
          num_heads: Number of heads, the leading axis of each W; None draws them without it.
          num_features: Number of random features, or one number for each feature map.
          dim: Width of a head.
          feature_maps: Feature maps, by name or as objects.

        Raises:
          ValueError: If there is not one number of features for each feature map.
        """
        count = len(feature_maps)
        each = num_features if isinstance(num_features, (tuple, list)) else (num_features,) * count
        if len(each) != count:
            raise ValueError(
                "num_features must be one number, or one for each feature map, got "
                f"{len(each)} for {count}."
            )
        return tuple(
            self.draw(one, num_heads, number, dim, feature_map)
            for one, number, feature_map in zip(
                jax.random.split(key, count), each, feature_maps, strict=True
            )
        )


def in_pairs(
    projection: ProjectionLike | None, feature_map: FeatureMapLike, options: DrawOptions | None
) -> ProjectionLike | None:
    """Returns W as pairs, so attention multiplies one row of each, if it was drawn in pairs.

    Args:
      projection: W of all heads or of each.
      feature_map: Feature map; custom maps may expect an array.
      options: Options with which W was drawn; None if unknown.
    """
    if options is None or not options.draws_pairs:
        return projection
    if not isinstance(as_feature_map(feature_map), TAKE_PAIRS):
        return projection
    if not isinstance(projection, jax.Array) or projection.shape[-2] % 2:
        return projection
    return Projection(projection[..., ::2, :], is_paired=True)
