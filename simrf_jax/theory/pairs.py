"""How many coupled pairs a projection has, and at which angle."""

from __future__ import annotations

from typing import NamedTuple

from simrf_jax.projections.couplings import COUPLED


class Pairs(NamedTuple):
    """Coupled pairs of rows that share an angle.

    Attributes:
      weight: Ordered pairs for each feature, the sum of r (r - 1) / m over the blocks of r rows.
      cosine: Cosine of the angle, 0 or less.
    """

    weight: float
    cosine: float


def coupled_pairs(num_features: int, dim: int, coupling: str, block: str) -> tuple[Pairs, ...]:
    """All coupled pairs of a projection, one entry for each angle; none for iid rows.

    Example:
      >>> coupled_pairs(130, 64, "simplex", "regular")
      (Pairs(weight=64.0, cosine=-0.015625),)
    """
    if coupling == "iid":
        return ()
    weights: dict[float, float] = {}
    for shape, count in COUPLED[coupling].blocks(num_features, dim, block):
        rows = shape.num_rows
        if rows > 1:
            weight = count * rows * (rows - 1) / num_features
            weights[shape.cosine] = weights.get(shape.cosine, 0.0) + weight
    return tuple(Pairs(weight, cosine) for cosine, weight in weights.items())
