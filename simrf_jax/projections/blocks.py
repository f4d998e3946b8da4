"""Blocks: which rows of W are drawn together, and where they point before rotation.

A block is a set of unit vectors, every two of which have the same angle, turned by one random
rotation: an orthonormal basis, or the vertices of a regular simplex, or the first few of either.
Blocks are independent of each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BLOCK_MODES = ("regular", "square")


class Block(NamedTuple):
    """The first ``num_rows`` vertices of a regular simplex, or of an orthonormal basis.

    Attributes:
      num_rows: Rows of W in the block.
      num_vertices: Vertices of the simplex they are cut from; None for an orthonormal basis.

    Example:
      >>> Block(3, 4).cosine, Block(3, None).cosine
      (-0.3333333333333333, 0.0)
    """

    num_rows: int
    num_vertices: int | None

    @property
    def cosine(self) -> float:
        """The cosine of the angle between any two rows."""
        if self.num_vertices is None or self.num_rows == 1:
            return 0.0
        return -1 / (self.num_vertices - 1)

    def directions(self) -> np.ndarray:
        """The rows before rotation, float64 unit vectors ``[num_rows, coordinates]``."""
        if self.num_vertices is None:
            return np.eye(self.num_rows)
        return simplex_vertices(self.num_vertices)[: self.num_rows]


def simplex_vertices(num_vertices: int) -> np.ndarray:
    r"""Unit vectors from the centre of a regular simplex to its vertices.

    For :math:`r` vertices (the paper has :math:`r = d`, and a last coordinate that is always 0),

    .. math::
        s_i = \sqrt{\tfrac{r}{r-1}}\, e_i - \tfrac{\sqrt r + 1}{(r-1)^{3/2}}\, (1, \dots, 1)
        \quad (i < r), \qquad s_r = \tfrac{1}{\sqrt{r-1}}\, (1, \dots, 1).

    All pairs subtend :math:`\cos\theta = -1/(r-1)`, and the rows add up to zero.

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
      Reid et al., Simplex Random Features (ICML 2023), Eq. 9. The constant there reads
      :math:`\sqrt{d+1}` in some extractions; :math:`\sqrt d + 1` is what makes the rows unit.
    """
    if num_vertices == 1:
        return np.ones((1, 1))
    n = num_vertices - 1
    scale, shift = simplex_constants(num_vertices)
    return np.concatenate([scale * np.eye(n) - shift * n**-0.5, np.full((1, n), n**-0.5)])


def simplex_constants(num_vertices: int) -> tuple[float, float]:
    r"""The constants of Eq. 9: :math:`s_i = \text{scale}\, e_i - \text{shift}\, s_r` for i < r."""
    n = num_vertices - 1
    return (num_vertices / n) ** 0.5, (num_vertices**0.5 + 1) / n


class Run(NamedTuple):
    """Equal blocks, one after the other.

    Attributes:
      block: What each of them is.
      repeats: How many there are.
    """

    block: Block
    repeats: int


def orthogonal_blocks(num_features: int, dim: int, block: str) -> list[Run]:
    """Orthonormal rows, ``dim`` a block and a remainder, in either block mode."""
    del block  # A smaller orthonormal set is the same as the first rows of a full one.
    full, remainder = divmod(num_features, dim)
    return _runs((Block(dim, None), full), (Block(remainder, None), 1))


def simplex_blocks(num_features: int, dim: int, block: str) -> list[Run]:
    """Simplex rows, in blocks that are whole simplices or the paper's to the letter.

    ``regular`` makes every block a whole simplex of its own size, as full as the space allows,
    d + 1 rows, because more pairs in a block lower the variance at every distance. A row alone is
    coupled to nothing, so it is never left over. ``square`` has d rows at arccos(-1/(d-1)) a block,
    and as a remainder the first rows of one more.

    Example:
      >>> for m in (130, 8, 66):
      ...     [(run.block.num_rows, run.repeats) for run in simplex_blocks(m, 64, "regular")]
      [(65, 2)]
      [(8, 1)]
      [(64, 1), (2, 1)]
    """
    if block == "square":
        full, remainder = divmod(num_features, dim)
        return _runs((Block(dim, dim), full), (Block(remainder, dim), 1))
    full, remainder = divmod(num_features, dim + 1)
    if full and remainder == 1:
        return _runs((Block(dim + 1, dim + 1), full - 1), (Block(dim, dim), 1), (Block(2, 2), 1))
    return _runs((Block(dim + 1, dim + 1), full), (Block(remainder, remainder), 1))


def _runs(*runs: tuple[Block, int]) -> list[Run]:
    return [Run(block, repeats) for block, repeats in runs if block.num_rows and repeats]
