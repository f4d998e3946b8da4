"""Couplings: how the rows of a block depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax.projections.blocks import Run, orthogonal_blocks, simplex_blocks

NUM_SWEEPS = 3


class Coupling(NamedTuple):
    """How the directions of the rows come about, before a random rotation turns them.

    Attributes:
      blocks: From (num_features, dim, block mode) to the runs of equal blocks, whose directions are
        fixed.
      least_dim: The least dimension that has room for it.
      weight_dependent: Whether the directions are then arranged to suit the norms of the rows, by
        ``minimise_resultant``.
    """

    blocks: Callable[[int, int, str], list[Run]]
    least_dim: int
    weight_dependent: bool = False


# Beside these there is "iid", which has no blocks.
COUPLED = {
    "orthogonal": Coupling(orthogonal_blocks, least_dim=1),
    "simplex": Coupling(simplex_blocks, least_dim=2),
    "simplex_plus": Coupling(simplex_blocks, least_dim=2, weight_dependent=True),
}
COUPLINGS = ("iid", *COUPLED)
# Those whose directions do not look at the norms: only they have closed forms and fast transforms.
FIXED = tuple(name for name, coupling in COUPLED.items() if not coupling.weight_dependent)


def has_room(coupling: str, dim: int, name: str = "coupling") -> None:
    """Accepts a dimension that has room for the coupling."""
    least_dim = 1 if coupling == "iid" else COUPLED[coupling].least_dim
    if dim < least_dim:
        raise ValueError(f"{name}={coupling!r} needs dim of at least {least_dim}, got dim={dim}.")


def minimise_resultant(
    directions: jax.Array, norms: jax.Array, *, num_sweeps: int = NUM_SWEEPS
) -> jax.Array:
    r"""Turns the rows of a block, one after the other, against the sum of the others (SimRF+).

    .. math:: s_i \leftarrow -\frac{\sum_{j \ne i} a_j s_j}{|\sum_{j \ne i} a_j s_j|}

    for all i in turn, ``num_sweeps`` times over. Each step lowers the resultant :math:`|\sum_i a_i
    s_i|`, and with it :math:`\sum_{i \ne j} |w_i + w_j|^2`: the leading term of the variance of
    positive features. Two or three sweeps close the loop (resultant zero) unless one norm exceeds
    the sum of the others: then the others end up antialigned with it.

    Args:
      directions: Unit vectors s, ``[rows, coordinates]``; a step takes time O(coordinates).
      norms: Their lengths a, ``[rows]``.
      num_sweeps: How often every row is turned.

    Returns:
      Unit vectors ``[rows, coordinates]``.

    Example:
      >>> import jax.numpy as jnp
      >>> triangle = jnp.array([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]])
      >>> norms = jnp.array([3.0, 4.0, 5.0])
      >>> s = minimise_resultant(triangle, norms)
      >>> bool(jnp.linalg.norm(norms @ triangle) > 1), bool(jnp.linalg.norm(norms @ s) < 1e-5)
      (True, True)

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eqs. 16 and 17; a :math:`= \sqrt{\ }` of
      the diagonal of D there.
    """

    def turn(resultant: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        s, norm = row
        rest = resultant - norm * s
        length = jnp.linalg.norm(rest)
        # With nothing to turn against, all directions are as good.
        turned = jnp.where(length > 0, -rest / jnp.where(length > 0, length, 1), s)
        return rest + norm * turned, turned

    def sweep(_: jax.Array, s: jax.Array) -> jax.Array:
        # The resultant runs along within a sweep and starts each one free of its rounding errors.
        resultant = jnp.sum(norms[:, None] * s, axis=0)
        # Not s.at[i].set in a fori_loop, for which XLA on a CPU copies s at every step: O(d^3).
        return jax.lax.scan(turn, resultant, (s, norms))[1]

    return jax.lax.fori_loop(0, num_sweeps, sweep, directions)
