"""Draw options: how a projection is drawn, kept beside it so that a redraw repeats it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from simrf_jax.projections.couplings import Coupling
from simrf_jax.projections.dense import check_options, draw_projection
from simrf_jax.projections.norms import Norms
from simrf_jax.projections.rotations import Rotation
from simrf_jax.projections.row_blocks import BlockMode
from simrf_jax.projections.weighted import WeightedProjection


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """The options of ``draw_projection`` that fix the law of W.

    The adapters keep them beside W, and ``redraw_projections`` reads them there.

    Attributes:
      coupling: Joint law of the rows of one row block; see ``draw_projection``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      rotation: Distribution of the rotations, ``"haar"``, ``"hadamard"`` or ``"givens"``; see
        ``draw_projection``.
      norms: Law of the row norms; see ``draw_projection``.
      num_sweeps: Number of times that ``simplex_plus`` arranges every row, 3 if it is not given.
        It is None for the other couplings.

    Raises:
      TypeError: If ``num_sweeps`` is not an integer.
      ValueError: If a name is unknown, or ``num_sweeps`` is below 1 or is given to a coupling other
        than ``simplex_plus``, or the coupling does not have the rows that ``norms`` couples.

    Example:
      >>> import jax, simrf_jax
      >>> options = simrf_jax.DrawOptions(coupling="orthogonal")
      >>> options.draw(jax.random.key(0), 130, 64).shape
      (130, 64)
    """

    coupling: Coupling = "simplex"
    block: BlockMode = "regular"
    rotation: Rotation = "haar"
    norms: Norms = "chi"
    num_sweeps: int | None = None

    def __post_init__(self) -> None:
        """Checks the options, and puts in the number of sweeps that is used."""
        num_sweeps = check_options(
            coupling=self.coupling,
            block=self.block,
            rotation=self.rotation,
            norms=self.norms,
            num_sweeps=self.num_sweeps,
        )
        object.__setattr__(self, "num_sweeps", num_sweeps)

    @property
    def draws_pairs(self) -> bool:
        """True if row 2i + 1 is the negative of row 2i, so that ``PairedProjection`` holds both."""
        return self.coupling == "cross_polytope" and self.norms in ("pair", "shared", "sqrt_dim")

    def draw(
        self,
        key: Key[Array, ""],
        num_features: int,
        dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> Float[Array, "{num_features} {dim}"] | WeightedProjection:
        """Draws a projection; see ``draw_projection``.

        Args:
          key: A typed PRNG key.
          num_features: Number of rows.
          dim: Dimension of the vectors to project.
          dtype: Floating type of the result.

        Raises:
          TypeError: If the key is not typed, a size is not an integer, or ``dtype`` is not
            floating.
          ValueError: If a size is below 1, a simplex has ``dim < 2``, or ``norms="radau"`` has less
            than two rows.
        """
        return draw_projection(
            key,
            num_features,
            dim,
            coupling=self.coupling,
            block=self.block,
            rotation=self.rotation,
            norms=self.norms,
            dtype=dtype,
            num_sweeps=self.num_sweeps,
        )
