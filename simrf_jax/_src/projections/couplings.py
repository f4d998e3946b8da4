"""Couplings: the joint laws of the rows of one row block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from simrf_jax._src.projections.row_blocks import (
    BlockMode,
    EqualRowBlocks,
    cross_polytope_blocks,
    orthogonal_blocks,
    simplex_blocks,
)

Coupling: TypeAlias = Literal["iid", "orthogonal", "simplex", "cross_polytope", "simplex_plus"]
COUPLINGS = get_args(Coupling)
# Only couplings whose directions do not depend on the norms have closed forms and fast transforms.
FixedCoupling: TypeAlias = Literal["orthogonal", "simplex", "cross_polytope"]
FIXED = get_args(FixedCoupling)
NUM_SWEEPS = 3


class CouplingRule(NamedTuple):
    """Rule for the directions of the rows before a random rotation turns them.

    Attributes:
      blocks: Function of (num_features, dim, row-block mode) that returns the row blocks as a list
        of ``EqualRowBlocks``. Their directions are fixed.
      least_dim: Least dimension in which the coupling exists.
      weight_dependent: True if ``minimize_resultant`` then arranges the directions to suit the
        norms of the rows.
    """

    blocks: Callable[[int, int, BlockMode], list[EqualRowBlocks]]
    least_dim: int
    weight_dependent: bool = False


# "iid" is not among them because it has no row blocks.
COUPLED: dict[Coupling, CouplingRule] = {
    "orthogonal": CouplingRule(orthogonal_blocks, least_dim=1),
    "simplex": CouplingRule(simplex_blocks, least_dim=2),
    "cross_polytope": CouplingRule(cross_polytope_blocks, least_dim=1),
    "simplex_plus": CouplingRule(simplex_blocks, least_dim=2, weight_dependent=True),
}


def check_dim(coupling: Coupling, dim: int, name: str = "coupling") -> None:
    """Raises ``ValueError`` if the dimension is too small for the coupling.

    Args:
      coupling: One of ``COUPLINGS``.
      dim: Dimension d.
      name: Name of the argument that holds the coupling, for the error message.
    """
    least_dim = 1 if coupling == "iid" else COUPLED[coupling].least_dim
    if dim < least_dim:
        raise ValueError(f"{name}={coupling!r} needs dim of at least {least_dim}, got dim={dim}.")


def minimize_resultant(
    directions: Float[Array, "rows coordinates"],
    norms: Float[Array, " rows"],
    *,
    num_sweeps: int | Int[Array, ""] = NUM_SWEEPS,
) -> Float[Array, "rows coordinates"]:
    r"""Turns each row of a row block against the sum of the other rows (SimRF+).

    .. math:: s_i \leftarrow -\frac{\sum_{j \ne i} a_j s_j}{|\sum_{j \ne i} a_j s_j|}

    for all i in turn, ``num_sweeps`` times. Each step lowers the resultant
    :math:`|\sum_i a_i s_i|`, and with it :math:`\sum_{i \ne j} |w_i + w_j|^2`, the leading term of
    the variance of positive features. Two or three sweeps make the resultant zero unless one norm
    exceeds the sum of the others. In that case the other rows end up antialigned with that row.

    Args:
      directions: Unit vectors s. Each step takes time O(coordinates).
      norms: Norms a of the rows.
      num_sweeps: Number of sweeps, which may be traced; each turns every row once.

    Returns:
      Unit vectors.

    Example:
      >>> import jax.numpy as jnp
      >>> triangle = jnp.array([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
      >>> norms = jnp.array([3.0, 4.0, 5.0])
      >>> s = minimize_resultant(triangle, norms)
      >>> bool(jnp.linalg.norm(norms @ triangle) > 1), bool(jnp.linalg.norm(norms @ s) < 1e-5)
      (True, True)

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 16 and 17,
      https://arxiv.org/abs/2301.13856
      The norms a are the diagonal of D in Eq. 8.
    """

    def turn(
        resultant: Float[Array, " coordinates"],
        row: tuple[Float[Array, " coordinates"], Float[Array, ""]],
    ) -> tuple[Float[Array, " coordinates"], Float[Array, " coordinates"]]:
        s, norm = row
        rest = resultant - norm * s
        length = jnp.linalg.norm(rest)
        # If the other rows cancel, all directions are equally good, and the row stays unchanged.
        turned = jnp.where(length > 0, -rest / jnp.where(length > 0, length, 1), s)
        return rest + norm * turned, turned

    def sweep(
        _: Int[Array, ""], s: Float[Array, "rows coordinates"]
    ) -> Float[Array, "rows coordinates"]:
        # The steps of a sweep update the resultant. A new sum for each sweep drops their rounding
        # errors.
        resultant = jnp.sum(norms[:, None] * s, axis=0)
        # In a fori_loop with s.at[i].set, XLA on a CPU would copy s at every step, in time O(d^3).
        return jax.lax.scan(turn, resultant, (s, norms))[1]

    return jax.lax.fori_loop(0, num_sweeps, sweep, directions)
