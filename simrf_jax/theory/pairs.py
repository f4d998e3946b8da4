"""Number and angle of the coupled pairs of rows in a projection."""

from __future__ import annotations

from typing import NamedTuple

from simrf_jax.projections.couplings import COUPLED
from simrf_jax.projections.row_blocks import BlockMode
from simrf_jax.theory.arguments import ClosedFormCoupling


class Pairs(NamedTuple):
    """Coupled pairs of rows that share one angle.

    Attributes:
      weight: Number of ordered pairs divided by the number m of features: the sum of r (r - 1) / m
        over the row blocks of r rows.
      cosine: Cosine of the angle, at most 0.
    """

    weight: float
    cosine: float


def coupled_pairs(
    num_features: int, dim: int, coupling: ClosedFormCoupling, block: BlockMode
) -> tuple[Pairs, ...]:
    """Returns all coupled pairs of a projection, one entry for each angle.

    Args:
      num_features: Number of rows m of the projection.
      dim: Dimension d.
      coupling: Coupling of the rows; ``"iid"`` has no coupled pairs.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.

    Returns:
      One ``Pairs`` for each angle, and an empty tuple for iid rows.

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
