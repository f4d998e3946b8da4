"""Number, angle and norms of the coupled pairs of rows in a projection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from simrf_jax.projections import FIXED_NORMS, Norms
from simrf_jax.projections.couplings import COUPLED
from simrf_jax.projections.row_blocks import BlockMode, CrossPolytope
from simrf_jax.theory.arguments import ClosedFormCoupling

NormRelation: TypeAlias = Literal["independent", "equal", "antithetic"]
Kind: TypeAlias = tuple[float, NormRelation]  # Cosine and norms of a pair.


class Pairs(NamedTuple):
    """Coupled pairs of rows that share one angle and one relation of their norms.

    Attributes:
      weight: Number of ordered pairs divided by the number m of features: the sum of r (r - 1) / m
        over the row blocks of r rows, if all pairs of a row block are of this kind.
      cosine: Cosine of the angle.
      norms: Relation of the two norms a and a', which both have the chi law F: ``"independent"``,
        ``"equal"``, or ``"antithetic"``, F(a) + F(a') = 1.
    """

    weight: float
    cosine: float
    norms: NormRelation = "independent"


def coupled_pairs(
    num_features: int,
    dim: int,
    coupling: ClosedFormCoupling,
    block: BlockMode,
    norms: Norms = "chi",
) -> tuple[Pairs, ...]:
    """Returns all coupled pairs of a projection, one entry for each angle and relation of norms.

    Args:
      num_features: Number of rows m of the projection.
      dim: Dimension d.
      coupling: Coupling of the rows; ``"iid"`` has no coupled pairs.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      norms: Law of the norms. Fixed norms count as equal.

    Returns:
      One ``Pairs`` for each kind of pair, and an empty tuple for iid rows.

    Example:
      >>> coupled_pairs(130, 64, "simplex", "regular")
      (Pairs(weight=64.0, cosine=-0.015625, norms='independent'),)
      >>> for pairs in coupled_pairs(128, 64, "cross_polytope", "regular", "pair"):
      ...     print(pairs)
      Pairs(weight=1.0, cosine=-1.0, norms='equal')
      Pairs(weight=126.0, cosine=0.0, norms='independent')
    """
    counts: Counter[Kind] = Counter()
    for rows, repeats, cosine in _row_blocks(num_features, dim, coupling, block):
        kinds = _antipodal_kinds(rows, norms) if cosine is None else _kinds(rows, cosine, norms)
        for kind, count in kinds.items():
            counts[kind] += repeats * count
    return tuple(Pairs(count / num_features, *kind) for kind, count in counts.items() if count)


def with_antipodes(pairs: tuple[Pairs, ...]) -> tuple[Pairs, ...]:
    """Returns the coupled pairs of the rows w and -w, which make hyperbolic features.

    Positive features of these 2m rows are the hyperbolic features of the m rows w.

    Args:
      pairs: Coupled pairs of the m rows w.
    """
    mirrored = [pair._replace(cosine=-pair.cosine) for pair in pairs]
    return (Pairs(1.0, -1.0, "equal"), *pairs, *mirrored)


def _row_blocks(
    num_features: int, dim: int, coupling: ClosedFormCoupling, block: BlockMode
) -> Iterator[tuple[int, int, float | None]]:
    """Yields the rows, the repeats and the cosine of equal row blocks; None is a cross-polytope."""
    if coupling == "iid":
        return
    for rows, repeats in COUPLED[coupling].blocks(num_features, dim, block):
        yield rows.num_rows, repeats, None if isinstance(rows, CrossPolytope) else rows.cosine


def _kinds(rows: int, cosine: float, norms: Norms) -> dict[Kind, int]:
    """Counts the ordered pairs of a row block in which all pairs have one angle."""
    pairs = rows * (rows - 1)
    if norms == "shared" or norms in FIXED_NORMS:
        return {(cosine, "equal"): pairs}
    antithetic = 2 * (rows // 2) if norms == "antithetic" else 0
    return {(cosine, "independent"): pairs - antithetic, (cosine, "antithetic"): antithetic}


def _antipodal_kinds(rows: int, norms: Norms) -> dict[Kind, int]:
    """Counts the ordered pairs of a row block of rows s_1, -s_1, s_2, -s_2, ..."""
    antipodal = 2 * (rows // 2)
    orthogonal = rows * (rows - 1) - antipodal
    if norms == "chi":
        return {(-1.0, "independent"): antipodal, (0.0, "independent"): orthogonal}
    if norms == "shared" or norms in FIXED_NORMS:
        return {(-1.0, "equal"): antipodal, (0.0, "equal"): orthogonal}
    # Rows 4i and 4i + 1 have one norm, and rows 4i + 2 and 4i + 3 its antithetic one. Three rows
    # at the end are a +- pair and a single row.
    antithetic = 8 * (rows // 4) + (4 if rows % 4 == 3 else 0) if norms == "antithetic" else 0
    return {
        (-1.0, "equal"): antipodal,
        (0.0, "independent"): orthogonal - antithetic,
        (0.0, "antithetic"): antithetic,
    }
