"""Coupled pairs of rows of a projection: their number, angle and norms."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, TypeAlias

from simrf_jax._src import checks
from simrf_jax._src.kernels import GAUSSIAN
from simrf_jax._src.projections import BLOCK_MODES, FIXED_NORMS, BlockMode, Norms
from simrf_jax._src.projections.couplings import COUPLED
from simrf_jax._src.projections.norms import check_norms, squared_norm
from simrf_jax._src.projections.row_blocks import CrossPolytope, RowBlock
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.arguments import ClosedFormCoupling

NormRelation: TypeAlias = Literal["independent", "equal", "antithetic", "stratified"]
Kind: TypeAlias = tuple[float, NormRelation]  # Cosine and norms of a pair.


class Pairs(NamedTuple):
    """Coupled pairs of rows that share one angle and one relation of their norms.

    Attributes:
      weight: Number of ordered pairs divided by the number m of features: the sum of r (r - 1) / m
        over the row blocks of r rows, if all pairs of a row block are of this kind.
      cosine: Cosine of the angle.
      norms: Relation of the two norms a and a', which both have the law F: ``"independent"``,
        ``"equal"``, ``"antithetic"``, F(a) + F(a') = 1, or ``"stratified"``, from two of m strata.
    """

    weight: float
    cosine: float
    norms: NormRelation = "independent"


SAME_ROW = Pairs(1.0, 1.0, "equal")  # Each row, paired with itself.
_ANTIPODES = Pairs(1.0, -1.0, "equal")


class Rows(NamedTuple):
    """Properties of the rows of a projection on which errors depend.

    Attributes:
      num_rows: Number of rows, without a row of zeros.
      dim: Dimension d.
      norms: Law of the norms.
      pairs: Coupled pairs of the rows.
    """

    num_rows: int
    dim: int
    norms: Norms
    pairs: tuple[Pairs, ...]

    @property
    def kinds(self) -> tuple[Pairs, ...]:
        """Pairs of each row with itself, and the coupled pairs."""
        return (SAME_ROW, *self.pairs)

    @property
    def weight(self) -> float:
        """Total weight of the rows; a row of zeros has the remaining weight."""
        is_fixed = self.norms in FIXED_NORMS
        return self.dim / squared_norm(self.norms, self.dim) if is_fixed else 1.0

    def with_antipodes(self) -> Rows:
        """Returns the rows w and -w, whose positive features are the hyperbolic features of w."""
        mirrored = [pair._replace(cosine=-pair.cosine) for pair in self.pairs]
        pairs = (_ANTIPODES, *self.pairs, *mirrored)
        return self._replace(num_rows=2 * self.num_rows, pairs=pairs)


def coupled_rows(
    num_features: int,
    dim: int,
    coupling: ClosedFormCoupling,
    block: BlockMode = "regular",
    norms: Norms = "chi",
    *,
    has_strata: bool = False,
) -> Rows:
    """Returns the rows of a projection after checking the arguments.

    Args:
      num_features: Number of rows m of the projection.
      dim: Dimension d.
      coupling: Coupling of the rows, which needs a closed form; ``"iid"`` has no coupled pairs.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      norms: Law of the norms. Fixed norms count as equal.
      has_strata: True if the caller supports stratified norms.

    Returns:
      ``Rows`` with one entry of ``pairs`` for each angle and relation of norms.

    Example:
      >>> coupled_rows(130, 64, "simplex").pairs
      (Pairs(weight=64.0, cosine=-0.015625, norms='independent'),)
      >>> for pairs in coupled_rows(128, 64, "cross_polytope", norms="pair").pairs:
      ...     print(pairs)
      Pairs(weight=1.0, cosine=-1.0, norms='equal')
      Pairs(weight=126.0, cosine=0.0, norms='independent')
    """
    num_rows = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    arguments.coupling("coupling", coupling, dim)
    checks.one_of("block", block, BLOCK_MODES)
    check_norms(norms, coupling, GAUSSIAN)
    if norms == "stratified" and not has_strata:
        raise ValueError(
            "norms='stratified' has closed forms only for trigonometric features. Estimate other "
            "errors by Monte Carlo."
        )
    if norms == "radau":
        if num_rows < 2:
            raise ValueError(
                "norms='radau' needs num_features of at least 2, for a row of zeros and others, "
                f"got {num_rows}."
            )
        num_rows -= 1
    counts: Counter[Kind] = Counter()
    row_blocks = [] if coupling == "iid" else COUPLED[coupling].blocks(num_rows, dim, block)
    for rows, repeats in row_blocks:
        for kind, count in _kinds(rows, norms).items():
            counts[kind] += repeats * count
    pairs = tuple(Pairs(count / num_rows, *kind) for kind, count in counts.items() if count)
    return Rows(num_rows, dim, norms, pairs)


def _kinds(block: RowBlock | CrossPolytope, norms: Norms) -> dict[Kind, int]:
    """Counts the ordered pairs of a row block."""
    rows = block.num_rows
    pairs = rows * (rows - 1)
    relation: NormRelation = "independent"
    if norms == "shared" or norms in FIXED_NORMS:
        relation = "equal"
    if norms == "stratified":
        relation = "stratified"
    if isinstance(block, RowBlock):
        antithetic = 2 * (rows // 2) if norms == "antithetic" else 0
        cosine = block.cosine
        return {(cosine, relation): pairs - antithetic, (cosine, "antithetic"): antithetic}
    antipodal = 2 * (rows // 2)
    # Rows 4i and 4i + 1 share a norm, and rows 4i + 2 and 4i + 3 share its antithetic one. Three
    # rows at the end are a +- pair and a single row.
    antithetic = 8 * (rows // 4) + (4 if rows % 4 == 3 else 0) if norms == "antithetic" else 0
    return {
        (-1.0, relation if norms in ("chi", "stratified") else "equal"): antipodal,
        (0.0, relation): pairs - antipodal - antithetic,
        (0.0, "antithetic"): antithetic,
    }
