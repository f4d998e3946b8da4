"""Fast rows: W applied in O(d log d) by Hadamard transforms, without forming a matrix."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Key

from simrf_jax._src import one_line
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections.couplings import COUPLED, FixedCoupling
from simrf_jax._src.projections.hadamard import padded_dim, random_signs, rotate
from simrf_jax._src.projections.norms import Norms, draw_norms
from simrf_jax._src.projections.row_blocks import (
    BlockMode,
    CrossPolytope,
    RowBlock,
    simplex_constants,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FastRows:
    """The rows W = D S HD HD HD, stored as their random signs and norms.

    ``draw_fast_projection`` draws them and explains the symbols. They replace an array in
    ``Projection.rows``. Under ``jax.vmap`` over keys the arrays get leading axes, and the record
    represents a stack of matrices, as an array ``[..., num_features, dim]`` does.

    Attributes:
      signs: Diagonals of the three HD factors of each row block.
      row_norms: Norms of the rows before the padding is cut off, without the zero rows.
      dim: Dimension d of the vectors to project.
      coupling: Coupling of the rows, ``"orthogonal"``, ``"simplex"`` or ``"cross_polytope"``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      num_zero_rows: Number of rows of zeros, which come last and belong to no row block.
    """

    signs: Int8[Array, "*stack num_blocks 3 padded_dim"]
    row_norms: Float[Array, "*stack num_directions"]
    dim: int = dataclasses.field(metadata={"static": True})
    coupling: FixedCoupling = dataclasses.field(metadata={"static": True})
    block: BlockMode = dataclasses.field(metadata={"static": True})
    num_zero_rows: int = dataclasses.field(default=0, metadata={"static": True})

    def __repr__(self) -> str:
        if not hasattr(self.row_norms, "shape"):  # JAX puts placeholders in place of arrays.
            return one_line.representation(self)
        sizes = " x ".join(map(str, self.shape))
        block = ", square" if self.block == "square" else ""
        return f"FastRows({sizes}, {self.coupling}{block}, {self.dtype.name})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense matrix, ``[..., num_features, dim]``."""
        *stack, num_directions = self.row_norms.shape
        return (*stack, num_directions + self.num_zero_rows, self.dim)

    @property
    def ndim(self) -> int:
        """Number of axes of the dense matrix."""
        return self.row_norms.ndim + 1

    @property
    def dtype(self) -> jnp.dtype:
        """Floating type of the norms."""
        return self.row_norms.dtype

    def excess(self, dtype: jnp.dtype) -> Float[Array, "*stack num_features"]:
        """Returns the squared norm of each row minus the padded dimension."""
        squares = jnp.square(self.row_norms.astype(dtype)) - self.signs.shape[-1]
        return jnp.pad(squares, (0, self.num_zero_rows), constant_values=-self.signs.shape[-1])

    def scaled(self, factor: Float[Array, ""]) -> FastRows:
        """Returns the rows times a factor, in the dtype of the factor."""
        return dataclasses.replace(self, row_norms=self.row_norms.astype(factor.dtype) * factor)


def draw_fast_rows(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    coupling: FixedCoupling,
    block: BlockMode,
    norms: Norms,
    kernel: ScaleMixture,
    dtype: jnp.dtype,
) -> FastRows:
    """Draws the rows for ``draw_fast_projection``, which has checked the arguments."""
    ambient, compute = padded_dim(dim), np.promote_types(dtype, jnp.float32)
    num_zero_rows = 1 if norms == "radau" else 0
    num_directions = num_features - num_zero_rows
    row_blocks = COUPLED[coupling].blocks(num_directions, ambient, block)
    norm_key, sign_key = jax.random.split(key)
    if norms == "chi" and kernel == GAUSSIAN:
        row_norms = jnp.sqrt(jax.random.chisquare(norm_key, ambient, (num_directions,), compute))
    else:
        row_norms = draw_norms(
            norm_key, norms, kernel, num_directions, row_blocks, ambient, compute
        )
    signs = random_signs(sign_key, sum(each.repeats for each in row_blocks), ambient)
    return FastRows(signs, row_norms.astype(dtype), dim, coupling, block, num_zero_rows)


@jax.jit
def apply_fast(
    x: Float[Array, "*batch {fast.dim}"], fast: FastRows
) -> Float[Array, "*batch {fast.shape[-2]}"]:
    """Projects vectors in the dtype of ``x``."""
    num_directions = fast.row_norms.shape[-1]
    num_blocks, _, ambient = fast.signs.shape
    row_blocks = COUPLED[fast.coupling].blocks(num_directions, ambient, fast.block)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, ambient - fast.dim)]
    padded = jnp.pad(x, padding)[..., None, :]
    rotated = rotate(jnp.repeat(padded, num_blocks, axis=-2), fast.signs)
    rows, start = [], 0
    for block, count in row_blocks:
        y = _directions_product(rotated[..., start : start + count, :], block)
        rows.append(y.reshape(*x.shape[:-1], count * block.num_rows))
        start += count
    y = jnp.concatenate(rows, axis=-1)
    y *= jnp.broadcast_to(fast.row_norms.astype(x.dtype), y.shape)
    return jnp.pad(y, [(0, 0)] * (x.ndim - 1) + [(0, fast.num_zero_rows)])


def _directions_product(
    x: Float[Array, "*batch padded_dim"], block: RowBlock | CrossPolytope
) -> Float[Array, "*batch {block.num_rows}"]:
    r"""Multiplies vectors by ``block.directions()`` in time O(d).

    For a simplex the method is Algorithm 1 of Reid et al., Simplex Random Features (ICML 2023):

    .. math::
        y_r = \tfrac{1}{\sqrt{r-1}} \sum_{i<r} x_i, \qquad
        y_i = \sqrt{\tfrac{r}{r-1}}\, x_i - \tfrac{\sqrt r + 1}{r-1}\, y_r.
    """
    if isinstance(block, CrossPolytope):
        pairs = jnp.stack([x, -x], axis=-1)
        return pairs.reshape(*x.shape[:-1], 2 * x.shape[-1])[..., : block.num_rows]
    if block.num_vertices is None or block.num_vertices == 1:
        return x[..., : block.num_rows]
    n = block.num_vertices - 1
    x = x[..., :n]
    scale, shift = simplex_constants(block.num_vertices)
    last = jnp.sum(x, axis=-1, keepdims=True) * n**-0.5
    return jnp.concatenate([scale * x - shift * last, last], axis=-1)[..., : block.num_rows]
