"""Dense projections: W as one array, whose rows are coupled within each row block."""

from __future__ import annotations

import functools
from typing import overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from simrf_jax import checks
from simrf_jax.projections.couplings import (
    COUPLED,
    COUPLINGS,
    NUM_SWEEPS,
    Coupling,
    has_room,
    minimise_resultant,
)
from simrf_jax.projections.norms import (
    Norms,
    UnweightedNorms,
    check_norms,
    check_num_features,
    draw_norms,
    fixed_norm,
    radau_log_weights,
)
from simrf_jax.projections.rotations import ROTATIONS, Rotation
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode, EqualRowBlocks
from simrf_jax.projections.weighted import WeightedProjection


@overload
def draw_projection(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    *,
    coupling: Coupling = ...,
    block: BlockMode = ...,
    rotation: Rotation = ...,
    norms: UnweightedNorms = ...,
    dtype: DTypeLike = ...,
    num_sweeps: int | None = ...,
) -> Float[Array, "{num_features} {dim}"]: ...


@overload
def draw_projection(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    *,
    coupling: Coupling = ...,
    block: BlockMode = ...,
    rotation: Rotation = ...,
    norms: Norms,
    dtype: DTypeLike = ...,
    num_sweeps: int | None = ...,
) -> Float[Array, "{num_features} {dim}"] | WeightedProjection: ...


def draw_projection(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    *,
    coupling: Coupling = "simplex",
    block: BlockMode = "regular",
    rotation: Rotation = "haar",
    norms: Norms = "chi",
    dtype: DTypeLike = jnp.float32,
    num_sweeps: int | None = None,
) -> Float[Array, "{num_features} {dim}"] | WeightedProjection:
    r"""Draws a random projection W whose rows are marginally standard normal.

    .. math:: W = D S R

    for each row block, where D holds the row norms, S the directions of the coupling, and R is a
    random rotation. Row blocks are independent of each other. If they are drawn from one key, all
    couplings share their row norms, and ``simplex`` and ``simplex_plus`` also share their
    rotations, so that they can be compared as paired draws.

    Args:
      key: A typed PRNG key (``jax.random.key``). ``jax.vmap`` over keys draws many projections.
      num_features: Number of rows m, any positive number.
      dim: Dimension d of the vectors to project; at least 2 for ``simplex`` and ``simplex_plus``.
      coupling: Joint law of the rows of one row block. ``"iid"`` rows are independent.
        ``"orthogonal"`` suits trigonometric and hyperbolic features. ``"simplex"`` gives positive
        features the least variance of all couplings that do not depend on the norms (Theorem 3.4,
        for m = d). ``"simplex_plus"`` arranges the simplex to suit the norms (Eqs. 16 and 17),
        which is better still but takes longer to draw. ``"cross_polytope"`` rows are orthogonal
        vectors and their negatives, in row blocks of up to 2 d rows. Rows 2i and 2i + 1 of a row
        block are a pair w, -w up to their norms. Among couplings that do not depend on the norms
        it gives positive features the least variance for m = 2 d.
      block: Row-block mode, which sets the number of rows in a simplex row block. ``"regular"``
        fills whole regular simplices of up to d + 1 rows. ``"square"`` follows the paper to the
        letter, with row blocks of d rows and a cut-off remainder. Orthogonal row blocks have d rows
        in both modes.
      rotation: Distribution of R. ``"haar"`` is uniform over the orthogonal group. ``"hadamard"``
        is a product of three random-sign Hadamard factors, with which kernel estimates are nearly
        unbiased. ``"givens"`` is a butterfly of Givens rotations, with which they are unbiased for
        ``orthogonal`` and nearly unbiased for the simplices. The last two work in the next power
        of two of ``dim``, and the row blocks and norms are those of that dimension. Any rotation
        leaves ``iid`` rows as they are, because they are isotropic by themselves.
      norms: Law of the row norms. With the first four, each norm has the law :math:`\chi_d` of the
        norm of a Gaussian vector, and kernel estimates are unbiased. ``"chi"`` draws independent
        norms. ``"antithetic"`` draws norms of consecutive rows of a row block with
        :math:`F(a) + F(a') = 1`, where F is the distribution function of :math:`\chi_d`; in a
        cross-polytope the two rows of a pair share one norm, and consecutive pairs are antithetic.
        ``"shared"`` gives one norm to all rows of a row block, which raises the variance of kernel
        estimates and lowers the error of attention, where what all keys have in common cancels.
        ``"pair"`` gives one norm to the two rows of a pair of a cross-polytope.
        ``"sqrt_dim"`` sets all norms to :math:`\sqrt d`, with which estimates are biased.
        ``"radau"`` sets them to :math:`\sqrt{d + 2}` with the total weight d/(d + 2), and the last
        row of W to zero with the weight 2/(d + 2). The relative bias of positive features is only
        :math:`-\tfrac{v^6}{24 (d + 4)} e^{-v^2/2}` to leading order in :math:`v = |x + y|`.
      dtype: Floating type of the result. The draw itself is made in float32 at least.
      num_sweeps: Number of times that ``simplex_plus`` arranges every row, by default 3. No other
        coupling accepts it.

    Returns:
      W, of type ``dtype``; for ``norms="radau"`` a ``WeightedProjection``, which only positive and
      hyperbolic features take.

    Raises:
      TypeError: If the key is not typed, a size is not an integer, or ``dtype`` is not floating.
      ValueError: If a name is unknown, a size is below 1, a simplex has ``dim < 2``,
        ``num_sweeps`` is given to a coupling other than ``simplex_plus``, the coupling does not
        have the rows that ``norms`` couples, or ``norms="radau"`` has less than two rows.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 130, 64)
      >>> w.shape
      (130, 64)
      >>> s = w / jnp.linalg.norm(w, axis=-1, keepdims=True)
      >>> print(f"{s[0] @ s[1]:.6f}, {-1 / 64:.6f}")  # two rows of one 65-point simplex
      -0.015625, -0.015625

    References:
      Reid et al., Simplex Random Features (ICML 2023), Sec. 3, Eqs. 8, 16 and 17, and Theorem 3.4,
      https://arxiv.org/abs/2301.13856
      Yu et al., Orthogonal Random Features (NeurIPS 2016), https://arxiv.org/abs/1610.09072
    """
    checks.typed_key(key)
    num_sweeps = check_options(
        coupling=coupling, block=block, rotation=rotation, norms=norms, num_sweeps=num_sweeps
    )
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    has_room(coupling, dim)
    dtype = checks.floating_dtype("dtype", dtype)
    check_num_features(num_features, norms)
    if norms != "radau":
        return _draw(key, num_features, dim, coupling, block, rotation, norms, dtype, num_sweeps)
    rows = _draw(key, num_features - 1, dim, coupling, block, rotation, norms, dtype, num_sweeps)
    log_weights = radau_log_weights(
        num_features,
        _ambient_dim(dim, coupling, rotation),
        jnp.promote_types(dtype, jnp.float32),
    )
    return WeightedProjection(jnp.pad(rows, ((0, 1), (0, 0))), log_weights)


def _ambient_dim(dim: int, coupling: Coupling, rotation: Rotation) -> int:
    """Returns the dimension in which the rows have their norms, before it is cut off to ``dim``."""
    return dim if coupling == "iid" else ROTATIONS[rotation].ambient_dim(dim)


def check_options(
    *,
    coupling: Coupling,
    block: BlockMode,
    rotation: Rotation,
    norms: Norms,
    num_sweeps: int | None,
) -> int | None:
    """Checks the options of ``draw_projection``, and returns the number of sweeps.

    Args:
      coupling: Joint law of the rows of one row block.
      block: Row-block mode.
      rotation: Distribution of the rotations.
      norms: Law of the row norms.
      num_sweeps: Number of sweeps of ``simplex_plus``, or None for the default.

    Returns:
      The number of sweeps of ``simplex_plus``, and None for the other couplings.

    Raises:
      TypeError: If ``num_sweeps`` is not an integer.
      ValueError: If a name is unknown, or ``num_sweeps`` is below 1 or is given to a coupling other
        than ``simplex_plus``.
    """
    checks.one_of("coupling", coupling, COUPLINGS)
    checks.one_of("block", block, BLOCK_MODES)
    checks.one_of("rotation", rotation, ROTATIONS)
    check_norms(norms, coupling)
    if coupling != "iid" and COUPLED[coupling].weight_dependent:
        return checks.positive_int("num_sweeps", NUM_SWEEPS if num_sweeps is None else num_sweeps)
    if num_sweeps is not None:
        raise ValueError(f"num_sweeps is for coupling='simplex_plus', got {coupling!r}.")
    return None


@functools.partial(jax.jit, static_argnums=range(1, 9))
def _draw(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    coupling: Coupling,
    block: BlockMode,
    rotation: Rotation,
    norms: Norms,
    dtype: jnp.dtype,
    num_sweeps: int | None,
) -> Float[Array, "{num_features} {dim}"]:
    compute = jnp.promote_types(dtype, jnp.float32)
    norm_key, rotation_key = jax.random.split(key)
    if coupling == "iid":
        return _draw_iid(norm_key, num_features, dim, norms, compute).astype(dtype)
    ambient = _ambient_dim(dim, coupling, rotation)
    row_blocks = COUPLED[coupling].blocks(num_features, ambient, block)
    if norms == "chi":
        gaussian = jax.random.normal(norm_key, (num_features, ambient), compute)
        lengths = jnp.linalg.norm(gaussian, axis=-1)
    else:
        lengths = draw_norms(norm_key, norms, row_blocks, ambient, compute)
    directions = _draw_directions(rotation_key, row_blocks, lengths, ambient, rotation, num_sweeps)
    return (directions[:, :dim] * lengths[:, None]).astype(dtype)


def _draw_iid(
    key: Key[Array, ""], num_features: int, dim: int, norms: Norms, dtype: jnp.dtype
) -> Float[Array, "{num_features} {dim}"]:
    """Draws independent rows, of which ``norms`` may fix the norms."""
    gaussian = jax.random.normal(key, (num_features, dim), dtype)
    if norms == "chi":
        return gaussian
    return gaussian * (fixed_norm(norms, dim) / jnp.linalg.norm(gaussian, axis=-1))[:, None]


def _draw_directions(
    key: Key[Array, ""],
    row_blocks: list[EqualRowBlocks],
    lengths: Float[Array, " num_features"],
    dim: int,
    rotation: Rotation,
    num_sweeps: int | None,
) -> Float[Array, "num_features {dim}"]:
    """Draws unit vectors, each row block under a rotation of its own."""

    def draw_block(
        directions: Float[Array, "rows coordinates"],
        lengths: Float[Array, " rows"],
        key: Key[Array, ""],
    ) -> Float[Array, "rows dim"]:
        if num_sweeps is not None:
            directions = minimise_resultant(directions, lengths, num_sweeps=num_sweeps)
        return ROTATIONS[rotation].rotate(key, directions, dim)

    keys = jax.random.split(key, sum(each.repeats for each in row_blocks))
    rows, first_block, first_row = [], 0, 0
    for block, count in row_blocks:
        end_block, end_row = first_block + count, first_row + count * block.num_rows
        directions = jnp.asarray(block.directions(), lengths.dtype)
        drawn = jax.vmap(draw_block, in_axes=(None, 0, 0))(
            directions,
            lengths[first_row:end_row].reshape(count, block.num_rows),
            keys[first_block:end_block],
        )
        rows.append(drawn.reshape(-1, dim))
        first_block, first_row = end_block, end_row
    return jnp.concatenate(rows)
