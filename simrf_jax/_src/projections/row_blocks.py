"""Row blocks: the rows of W that are drawn together, and their directions before rotation.

A row block is a set of unit vectors that share one random rotation. The set is an orthonormal
basis, the vertices of a regular simplex or of a cross-polytope, or the first few of one of these.
Row blocks are independent of each other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64

BlockMode: TypeAlias = Literal["regular", "square"]
BLOCK_MODES = get_args(BlockMode)


class RowBlock(NamedTuple):
    """Row block of equal angles: the first vectors of a basis or vertices of a regular simplex.

    Attributes:
      num_rows: Number of rows of W in the row block.
      num_vertices: Number of vertices of the simplex from which the rows are taken, or None for an
        orthonormal basis.

    Example:
      >>> RowBlock(3, 4).cosine, RowBlock(3, None).cosine
      (-0.3333333333333333, 0.0)
    """

    num_rows: int
    num_vertices: int | None

    @property
    def cosine(self) -> float:
        """Cosine of the angle between any two rows, and 0 for a single row."""
        if self.num_vertices is None or self.num_rows == 1:
            return 0.0
        return -1 / (self.num_vertices - 1)

    def directions(self) -> Float64[np.ndarray, "{self.num_rows} coordinates"]:
        """Returns the rows before rotation, unit vectors."""
        if self.num_vertices is None:
            return np.eye(self.num_rows)
        return simplex_vertices(self.num_vertices)[: self.num_rows]


def simplex_vertices(num_vertices: int) -> Float64[np.ndarray, "{num_vertices} coordinates"]:
    r"""Returns the unit vectors from the center of a regular simplex to its vertices.

    For r vertices the unit vectors are

    .. math::
        s_i = \sqrt{\tfrac{r}{r-1}}\, e_i - \tfrac{\sqrt r + 1}{(r-1)^{3/2}}\, (1, \dots, 1)
        \quad (i < r), \qquad s_r = \tfrac{1}{\sqrt{r-1}}\, (1, \dots, 1).

    The cosine of the angle between any two of them is :math:`-1/(r-1)`, and they add up to zero.
    The paper has :math:`r = d` and a last coordinate that is always 0.

    Args:
      num_vertices: Number of vertices r, at least 1.

    Returns:
      float64 array ``[r, r - 1]`` (``[1, 1]`` for a single vertex).

    Example:
      >>> import numpy as np
      >>> s = simplex_vertices(4)
      >>> np.round(s @ s.T, 6)
      array([[ 1.      , -0.333333, -0.333333, -0.333333],
             [-0.333333,  1.      , -0.333333, -0.333333],
             [-0.333333, -0.333333,  1.      , -0.333333],
             [-0.333333, -0.333333, -0.333333,  1.      ]])

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 9, https://arxiv.org/abs/2301.13856
      The constant there reads :math:`\sqrt{d+1}` in some text extractions, but only
      :math:`\sqrt d + 1` gives unit vectors.
    """
    if num_vertices == 1:
        return np.ones((1, 1))
    n = num_vertices - 1
    scale, shift = simplex_constants(num_vertices)
    return np.concatenate([scale * np.eye(n) - shift * n**-0.5, np.full((1, n), n**-0.5)])


def simplex_constants(num_vertices: int) -> tuple[float, float]:
    r"""Returns scale and shift in :math:`s_i = \text{scale}\, e_i - \text{shift}\, s_r` for i < r.

    This is Eq. 9 of Reid et al., Simplex Random Features (ICML 2023), in another form; see
    ``simplex_vertices``.
    """
    n = num_vertices - 1
    return (num_vertices / n) ** 0.5, (num_vertices**0.5 + 1) / n


class CrossPolytope(NamedTuple):
    """Row block of the first vertices of a cross-polytope, a basis and its negatives.

    Rows 2i and 2i + 1 are a pair: one vector of the basis, and its negative. If the number of rows
    is odd, the last row has no partner.

    Attributes:
      num_rows: Number of rows of W in the row block.

    Example:
      >>> CrossPolytope(3).directions()
      array([[ 1.,  0.],
             [-1., -0.],
             [ 0.,  1.]])
    """

    num_rows: int

    def directions(self) -> Float64[np.ndarray, "{self.num_rows} coordinates"]:
        """Returns the rows before rotation, unit vectors."""
        basis = np.eye(-(-self.num_rows // 2))
        return np.stack([basis, -basis], axis=1).reshape(-1, len(basis))[: self.num_rows]


class EqualRowBlocks(NamedTuple):
    """Equal row blocks, one after the other.

    Attributes:
      block: The row block that is repeated.
      repeats: Number of these row blocks.
    """

    block: RowBlock | CrossPolytope
    repeats: int


def orthogonal_blocks(num_features: int, dim: int, block: BlockMode) -> list[EqualRowBlocks]:
    """Returns row blocks of ``dim`` orthonormal rows and a remainder, in either row-block mode.

    Args:
      num_features: Number of rows of W.
      dim: Dimension d.
      block: Row-block mode, which is ignored here.
    """
    del block  # A smaller orthonormal set is the same as the first rows of a full one.
    full, remainder = divmod(num_features, dim)
    return _without_empty(
        EqualRowBlocks(RowBlock(dim, None), full), EqualRowBlocks(RowBlock(remainder, None), 1)
    )


def simplex_blocks(num_features: int, dim: int, block: BlockMode) -> list[EqualRowBlocks]:
    """Returns simplex row blocks, either whole simplices or exactly those of the paper.

    The mode ``regular`` makes every row block a whole simplex. Row blocks are as full as the space
    allows, with d + 1 rows, because more pairs in a row block lower the variance at every distance.
    A single row would be coupled to no other, so full row blocks never leave one row over. The mode
    ``square`` puts d rows at the angle arccos(-1/(d-1)) into each row block, and the remainder is
    the first rows of another one.

    Args:
      num_features: Number of rows of W.
      dim: Dimension d, at least 2.
      block: Row-block mode, ``"regular"`` or ``"square"``.

    Example:
      >>> for m in (130, 8, 66):
      ...     [(each.block.num_rows, each.repeats) for each in simplex_blocks(m, 64, "regular")]
      [(65, 2)]
      [(8, 1)]
      [(64, 1), (2, 1)]
    """
    if block == "square":
        full, remainder = divmod(num_features, dim)
        return _without_empty(
            EqualRowBlocks(RowBlock(dim, dim), full), EqualRowBlocks(RowBlock(remainder, dim), 1)
        )
    full, remainder = divmod(num_features, dim + 1)
    if full and remainder == 1:
        return _without_empty(
            (RowBlock(dim + 1, dim + 1), full - 1), (RowBlock(dim, dim), 1), (RowBlock(2, 2), 1)
        )
    return _without_empty((RowBlock(dim + 1, dim + 1), full), (RowBlock(remainder, remainder), 1))


def cross_polytope_blocks(num_features: int, dim: int, block: BlockMode) -> list[EqualRowBlocks]:
    """Returns row blocks of 2 ``dim`` rows and a remainder, in either row-block mode.

    Args:
      num_features: Number of rows of W.
      dim: Dimension d.
      block: Row-block mode, which is ignored here.

    Example:
      >>> for each in cross_polytope_blocks(261, 64, "regular"):
      ...     print(each.block.num_rows, each.repeats)
      128 2
      5 1
    """
    del block  # A smaller cross-polytope is the same as the first rows of a full one.
    full, remainder = divmod(num_features, 2 * dim)
    return _without_empty((CrossPolytope(2 * dim), full), (CrossPolytope(remainder), 1))


def _without_empty(*row_blocks: tuple[RowBlock | CrossPolytope, int]) -> list[EqualRowBlocks]:
    return [
        EqualRowBlocks(block, repeats)
        for block, repeats in row_blocks
        if block.num_rows and repeats
    ]
