"""How many coupled pairs a projection has, and at which angle."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from simrf_jax.projections.blocks import regular_sizes


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
    weights: dict[float, float] = {}
    for (rows, cosine), count in _blocks(num_features, dim, coupling, block).items():
        weight = count * rows * (rows - 1) / num_features
        weights[cosine] = weights.get(cosine, 0.0) + weight
    return tuple(Pairs(weight, cosine) for cosine, weight in weights.items())


def _blocks(num_features: int, dim: int, coupling: str, block: str) -> Counter[tuple[int, float]]:
    """Counts of the blocks of at least two rows, by rows and cosine."""
    if coupling == "iid":
        sizes: Counter[int] = Counter()
    elif coupling == "simplex" and block == "regular":
        sizes = _regular_counts(num_features, dim)
    else:
        full, remainder = divmod(num_features, dim)
        sizes = Counter({dim: full}) + Counter({remainder: 1})
    blocks: Counter[tuple[int, float]] = Counter()
    for rows, count in sizes.items():
        if rows > 1:
            simplex_rows = rows if block == "regular" else dim
            cosine = -1 / (simplex_rows - 1) if coupling == "simplex" else 0.0
            blocks[rows, cosine] += count
    return blocks


def _regular_counts(num_features: int, dim: int) -> Counter[int]:
    # Only the last two blocks depend on the remainder; the others are not worth a list.
    others = max(0, num_features // (dim + 1) - 1)
    return Counter(regular_sizes(num_features - others * (dim + 1), dim)) + Counter(
        {dim + 1: others}
    )
