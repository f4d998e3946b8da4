"""The interface between feature maps and attention."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax
from jaxtyping import Array, ArrayLike, Float

from simrf_jax import checks
from simrf_jax.features.log_space import SIDES, LogFeatures, Side
from simrf_jax.projections import Coupling, as_projection


class FeatureMap(abc.ABC):
    """A feature map phi: log features of queries and of keys.

    A feature map is a small pytree. Its arrays, such as phases or a bandwidth, are leaves: they go
    through ``jit`` and ``grad``. All else, such as the kernel, is part of its structure, and two
    maps of equal structure share their compiled programs. A map of one's own is a subclass that is
    registered as a pytree (``jax.tree_util.register_dataclass``), or a function in
    ``feature_maps.Custom``.

    Attributes:
      projection_type: Type of W: an array, or a structure of several parts.
      is_finite: True if every finite vector has finite features, the zero vector too. Otherwise
        attention looks at the features, and replaces hidden tokens by copies of others before it
        calls the map.
      coupling: Coupling of the rows of W that suits the map best, the default of the adapters.
    """

    projection_type: ClassVar[type] = jax.Array
    is_finite: ClassVar[bool] = False
    coupling: ClassVar[Coupling] = "simplex"

    @abc.abstractmethod
    def log_features(self, x: Any, projection: Any, *, side: Side) -> LogFeatures:
        """Returns the features of vectors in log space.

        Args:
          x: Vectors ``[..., dim]``, scaled, in float32 at least.
          projection: W, ``[num_features, dim]``, or whatever takes its place.
          side: ``"query"`` if the vectors are queries, ``"key"`` if they are keys.

        Returns:
          Features with the leading shape of x.
        """

    def features(
        self, x: Float[ArrayLike, "*batch dim"], projection: Any, *, side: Side = "key"
    ) -> Float[Array, "*batch features"]:
        """Returns the features phi(x) themselves.

        Args:
          x: Vectors.
          projection: W, ``[num_features, dim]``, or whatever takes its place.
          side: ``"query"`` if the vectors are queries, ``"key"`` if they are keys.

        Returns:
          The features in the type of x. Those of long vectors overflow or underflow.

        Raises:
          TypeError: If an argument is not floating.
          ValueError: If the side is unknown or the shapes do not match.
        """
        checks.one_of("side", side, SIDES)
        x, projection = checks.vectors("x", x), as_projection(projection)
        return self.log_features(x, projection, side=side).evaluate(x.dtype)
