"""Feature maps whose matrices are multiplied into the rows of W once, for many calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.feature_map import FeatureMap, FeatureMapLike, as_feature_map
from simrf_jax._src.features.log_space import SIDES, LogFeatures, Side
from simrf_jax._src.projections import ProjectionLike, as_projection


@dataclasses.dataclass(frozen=True, eq=False)
class Folded(FeatureMap):
    """A feature map merged with its W, so that only products with vectors remain.

    ``Calibrated`` and ``Learned`` features multiply W by matrices. Attention does so in each call
    with more tokens than features. If W stays the same for many calls, as in decoding, fold it
    once. The features are those of the map, up to rounding. The folded map has its own rows, so
    pass ``projection=None`` to attention.

    Attributes:
      query: Form of the features of queries. Its arrays may have a leading axis of key heads K.
      key: Form of the features of keys.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 100, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 128, 64)
      >>> calibration = simrf_jax.calibrate(q, k)
      >>> folded = simrf_jax.feature_maps.Folded.of(calibration, w)
      >>> attend = simrf_jax.random_feature_attention
      >>> error = attend(q, k, v, None, feature_map=folded) - attend(
      ...     q, k, v, w, feature_map=calibration
      ... )
      >>> bool(abs(error).max() < 1e-5)
      True
      >>> decoder = simrf_jax.RandomFeatureMechanism(None, folded)
    """

    is_finite = True
    axes_of_one: ClassVar[Mapping[str, int]] = {"query": 0, "key": 0}  # The forms define their own.
    query: ExponentialForm
    key: ExponentialForm

    @classmethod
    def of(cls, feature_map: FeatureMapLike, projection: ProjectionLike | None) -> Folded:
        """Merges a feature map with its W.

        Args:
          feature_map: A map whose features are exponentials, such as ``Calibrated``, or its name.
          projection: W, as attention takes it, dense or paired; None for ``Learned``.

        Raises:
          TypeError: If it is not a feature map, or its features are not all exponentials.
          ValueError: If the shapes do not match, or W was drawn by a law that the map cannot use.
        """
        feature_map = as_feature_map(feature_map)
        w = None if projection is None else as_projection(projection)
        feature_map.check_norms(w)
        if w is not None and feature_map.head_dim not in (None, w.shape[-1]):
            raise ValueError(
                f"projection must be [..., {feature_map.head_dim}] for a "
                f"{type(feature_map).__name__} of that dim, got shape {w.shape}."
            )
        query, key = (feature_map.exponential_forms(w, side=side) for side in SIDES)
        if query is None or key is None:
            raise TypeError(
                "feature_map must have features that are exponentials, such as Calibrated, got "
                f"{type(feature_map).__name__}."
            )
        if jax.tree.leaves(feature_map.head_axes()) or (w is not None and w.ndim == 3):
            return cls(query, key)
        return cls(*jax.tree.map(lambda x: x[0], (query, key)))

    @property
    def head_dim(self) -> int:
        """Width of a head of the rows."""
        return jnp.shape(self.query.rows)[-1]

    def log_features(
        self, x: Float[Array, "*batch H"], projection: None, *, side: Side
    ) -> LogFeatures:
        """Returns the features of one head's queries or keys.

        Raises:
          ValueError: If there is a projection, or the arrays belong to several heads.
        """
        form = self.exponential_form(projection, side=side)
        if jnp.ndim(form.rows) != 2:
            raise ValueError(
                "The rows of one head must be [rows, dim], got those of several heads, shape "
                f"{jnp.shape(form.rows)}."
            )
        return form.log_features(x)

    def key_scores(self, y: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
        """Raises ``ValueError``: the rows do not show what the map was fitted to."""
        raise ValueError(
            'exact_keys by="score" needs the statistics of queries, which a Folded map lacks; pass '
            "the map that was folded, and its projection."
        )

    def exponential_form(self, projection: None, *, side: Side) -> ExponentialForm:
        """Returns the form of one head.

        Raises:
          ValueError: If there is a projection.
        """
        if projection is not None:
            raise ValueError(
                "A Folded map has its own rows: projection must be None, got shape "
                f"{jnp.shape(projection)}."
            )
        return self.query if side == "query" else self.key
