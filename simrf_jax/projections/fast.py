"""Fast projections: W applied in O(d log d) by Hadamard transforms, without forming a matrix."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Key

from simrf_jax import checks, one_line
from simrf_jax.projections.couplings import COUPLED, COUPLINGS, FIXED, FixedCoupling, has_room
from simrf_jax.projections.hadamard import padded_dim, random_signs, rotate
from simrf_jax.projections.norms import (
    Norms,
    check_norms,
    check_num_features,
    draw_norms,
    radau_log_weights,
)
from simrf_jax.projections.row_blocks import (
    BLOCK_MODES,
    BlockMode,
    CrossPolytope,
    RowBlock,
    simplex_constants,
)
from simrf_jax.projections.structured import StructuredProjection
from simrf_jax.projections.weighted import WeightedProjection


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["signs", "row_norms"],
    meta_fields=["dim", "coupling", "block", "num_zero_rows"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class FastProjection(StructuredProjection):
    """Projection W = D S HD HD HD, kept as its random signs and norms.

    ``draw_fast_projection`` draws it and explains the symbols. The projection is a pytree. Under
    ``jax.vmap`` over keys its arrays get leading axes, and it stands for a stack of projections, as
    an array ``[..., num_features, dim]`` does.

    Attributes:
      signs: Diagonals of the three HD factors of each row block.
      row_norms: Norms of the rows before the padding is cut off, without those of zero rows.
      dim: Dimension d of the vectors to project.
      coupling: Coupling of the rows, ``"orthogonal"``, ``"simplex"`` or ``"cross_polytope"``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      num_zero_rows: Number of rows of zeros, which come last and belong to no row block.
    """

    signs: Int8[Array, "*stack num_blocks 3 padded_dim"]
    row_norms: Float[Array, "*stack num_directions"]
    dim: int
    coupling: FixedCoupling
    block: BlockMode
    num_zero_rows: int = 0

    def __repr__(self) -> str:
        if not hasattr(self.row_norms, "shape"):  # JAX puts placeholders in the place of arrays.
            return one_line.representation(self)
        sizes = " x ".join(map(str, self.shape))
        block = ", square" if self.block == "square" else ""
        return f"FastProjection({sizes}, {self.coupling}{block}, {self.dtype.name})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense projection, ``[..., num_features, dim]``."""
        *stack, num_directions = self.row_norms.shape
        return (*stack, num_directions + self.num_zero_rows, self.dim)

    @property
    def dtype(self) -> jnp.dtype:
        """Floating type of the norms."""
        return self.row_norms.dtype


def draw_fast_projection(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    *,
    coupling: FixedCoupling = "simplex",
    block: BlockMode = "regular",
    norms: Norms = "chi",
    dtype: DTypeLike = jnp.float32,
) -> FastProjection | WeightedProjection:
    r"""Draws a projection that is applied in time O(d log d) and kept in O(d) memory.

    .. math:: W = D S \, H D_3 \, H D_2 \, H D_1

    for each row block. H is the Hadamard matrix, applied by fast transforms. The :math:`D_k` hold
    random signs. S holds the directions of the coupling, applied in O(d) by Algorithm 1, and D the
    row norms. No d x d matrix is ever formed. If d is not a power of two, vectors are padded with
    zeros to the next one, and the row blocks and norms are those of the padded dimension.

    The product of Hadamard factors is nearly, not exactly, Haar-distributed, so that kernel
    estimates are nearly unbiased: at :math:`|x + y| = 1` they are off by one per cent for d = 4 and
    by less for larger d (benchmarks/rotation_bias.py).

    Args:
      key: A typed PRNG key. ``jax.vmap`` over keys draws a stack of projections.
      num_features: Number of rows m, any positive number.
      dim: Dimension d of the vectors to project; at least 2 for ``simplex``.
      coupling: Coupling of the rows, ``"orthogonal"``, ``"simplex"`` or ``"cross_polytope"``; see
        ``draw_projection``. ``"iid"`` rows and the directions of ``"simplex_plus"`` have no
        structure that can be applied fast.
      block: Row-block mode, ``"regular"`` or ``"square"``, in the padded dimension; see
        ``draw_projection``.
      norms: Law of the row norms, in the padded dimension; see ``draw_projection``.
      dtype: Floating type of the norms.

    Returns:
      A ``FastProjection``, which ``project``, every feature map and attention accept; for
      ``norms="radau"`` a ``WeightedProjection`` of one.

    Raises:
      TypeError: If the key is not typed, a size is not an integer, or ``dtype`` is not floating.
      ValueError: If a name is unknown, a size is below 1, ``simplex`` has ``dim < 2``, the
        coupling has no fast form or not the rows that ``norms`` couples, or ``norms="radau"`` has
        less than two rows.

    Example:
      >>> import jax, simrf_jax
      >>> w = simrf_jax.draw_fast_projection(jax.random.key(0), 4096, 4096)
      >>> sum(leaf.nbytes for leaf in jax.tree.leaves(w))
      28672
      >>> simrf_jax.project(jax.numpy.ones((2, 4096)), w).shape
      (2, 4096)

    References:
      Reid et al., Simplex Random Features (ICML 2023), Sec. 4.2, App. B.2 and Algorithm 1,
      https://arxiv.org/abs/2301.13856
    """
    checks.typed_key(key)
    if coupling in COUPLINGS and coupling not in FIXED:
        raise ValueError(
            f"coupling={coupling!r} has no fast form because its directions have no structure; "
            "draw_projection draws it as a dense matrix. The couplings with a fast form are "
            f"{', '.join(map(repr, FIXED))}."
        )
    checks.one_of("coupling", coupling, FIXED)
    checks.one_of("block", block, BLOCK_MODES)
    check_norms(norms, coupling)
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    has_room(coupling, dim)
    dtype = checks.floating_dtype("dtype", dtype)
    check_num_features(num_features, norms)
    ambient, compute = padded_dim(dim), jnp.promote_types(dtype, jnp.float32)
    num_zero_rows = 1 if norms == "radau" else 0
    num_directions = num_features - num_zero_rows
    row_blocks = COUPLED[coupling].blocks(num_directions, ambient, block)
    norm_key, sign_key = jax.random.split(key)
    if norms == "chi":
        row_norms = jnp.sqrt(jax.random.chisquare(norm_key, ambient, (num_directions,), compute))
    else:
        row_norms = draw_norms(norm_key, norms, row_blocks, ambient, compute)
    signs = random_signs(sign_key, sum(each.repeats for each in row_blocks), ambient)
    row_norms = row_norms.astype(dtype)
    projection = FastProjection(signs, row_norms, dim, coupling, block, num_zero_rows)
    if norms != "radau":
        return projection
    return WeightedProjection(projection, radau_log_weights(num_features, ambient, compute))


@jax.jit
def apply_fast(
    x: Float[Array, "*batch {projection.dim}"], projection: FastProjection
) -> Float[Array, "*batch {projection.shape[-2]}"]:
    """Projects vectors in the dtype of ``x``."""
    num_directions = projection.row_norms.shape[-1]
    num_blocks, _, ambient = projection.signs.shape
    row_blocks = COUPLED[projection.coupling].blocks(num_directions, ambient, projection.block)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, ambient - projection.dim)]
    padded = jnp.pad(x, padding)[..., None, :]
    rotated = rotate(jnp.repeat(padded, num_blocks, axis=-2), projection.signs)
    rows, start = [], 0
    for block, count in row_blocks:
        y = _directions_product(rotated[..., start : start + count, :], block)
        rows.append(y.reshape(*x.shape[:-1], count * block.num_rows))
        start += count
    y = jnp.concatenate(rows, axis=-1)
    y *= jnp.broadcast_to(projection.row_norms.astype(x.dtype), y.shape)
    return jnp.pad(y, [(0, 0)] * (x.ndim - 1) + [(0, projection.num_zero_rows)])


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
