"""Dense projections: W as one array, its rows coupled block by block."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from simrf_jax import checks
from simrf_jax.projections.blocks import BLOCK_MODES, Run
from simrf_jax.projections.couplings import (
    COUPLED,
    COUPLINGS,
    NUM_SWEEPS,
    has_room,
    minimise_resultant,
)
from simrf_jax.projections.rotations import ROTATIONS

NORMS = ("chi", "sqrt_dim")


def draw_projection(
    key: jax.Array,
    num_features: int,
    dim: int,
    *,
    coupling: str = "simplex",
    block: str = "regular",
    rotation: str = "haar",
    norms: str = "chi",
    dtype: DTypeLike = jnp.float32,
    num_sweeps: int | None = None,
) -> jax.Array:
    r"""Draws a random projection W whose rows are marginally standard normal.

    .. math:: W = D S R

    block by block, with :math:`D` the row norms, :math:`S` the directions of the coupling and
    :math:`R` a random rotation. Drawn from one key, all couplings share their row norms, and both
    simplices their rotations, so that they can be compared as paired draws.

    Args:
      key: A typed PRNG key (``jax.random.key``). ``jax.vmap`` over keys draws many projections.
      num_features: Number of rows m, any positive number.
      dim: Dimension d of the vectors to project; at least 2 for ``simplex`` and ``simplex_plus``.
      coupling: ``"iid"``, independent rows; ``"orthogonal"``, for trigonometric and hyperbolic
        features; ``"simplex"``, which of all couplings that do not look at the norms gives
        positive features the least variance (Theorem 3.4, for m = d); or ``"simplex_plus"``, a
        simplex arranged to suit the norms (Eqs. 16 and 17), better still and dearer to draw.
      block: How many rows a simplex block has. ``"regular"`` fills whole regular simplices of up
        to d + 1 rows; ``"square"`` is the paper to the letter, d rows and a cut-off remainder.
        Orthogonal blocks have d rows in both modes.
      rotation: ``"haar"``, uniform over the orthogonal group; ``"hadamard"``, three random-sign
        Hadamard factors, nearly unbiased; or ``"givens"``, a butterfly of Givens rotations,
        unbiased for ``orthogonal``, nearly so for the simplices. The last two work in the next
        power of two of dim, whose blocks and norms they have. ``iid`` rows are isotropic by
        themselves: any rotation leaves them as they are.
      norms: ``"chi"`` (:math:`\chi_d`, the norm of a Gaussian vector: kernel estimates are
        unbiased) or ``"sqrt_dim"`` (all norms :math:`\sqrt d`: biased).
      dtype: Floating type of the result. The draw itself is made in float32 at least.
      num_sweeps: How often ``simplex_plus`` arranges every row, by default 3; for no other
        coupling.

    Returns:
      Array ``[num_features, dim]``.

    Raises:
      TypeError: If the key is not a typed one, a size is no integer or dtype is not floating.
      ValueError: If a name is unknown, a size is below 1, a simplex has ``dim < 2``, or num_sweeps
        is given to another coupling than ``simplex_plus``.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 130, 64)
      >>> w.shape
      (130, 64)
      >>> s = w / jnp.linalg.norm(w, axis=-1, keepdims=True)
      >>> print(f"{s[0] @ s[1]:.6f}, {-1 / 64:.6f}")  # two rows of one 65-point simplex
      -0.015625, -0.015625

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 8, Sec. 3 and Eqs. 16 and 17. Yu et
      al., Orthogonal Random Features (NeurIPS 2016).
    """
    checks.typed_key(key)
    checks.one_of("coupling", coupling, COUPLINGS)
    checks.one_of("block", block, BLOCK_MODES)
    checks.one_of("rotation", rotation, ROTATIONS)
    checks.one_of("norms", norms, NORMS)
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    has_room(coupling, dim)
    dtype = checks.floating_dtype("dtype", dtype)
    if num_sweeps is None:
        num_sweeps = NUM_SWEEPS
    elif coupling == "iid" or not COUPLED[coupling].weight_dependent:
        raise ValueError(f"num_sweeps is for coupling='simplex_plus', got {coupling!r}.")
    num_sweeps = checks.positive_int("num_sweeps", num_sweeps)
    return _draw(key, num_features, dim, coupling, block, rotation, norms, dtype, num_sweeps)


@functools.partial(jax.jit, static_argnums=range(1, 9))
def _draw(
    key: jax.Array,
    num_features: int,
    dim: int,
    coupling: str,
    block: str,
    rotation: str,
    norms: str,
    dtype: jnp.dtype,
    num_sweeps: int,
) -> jax.Array:
    compute = jnp.promote_types(dtype, jnp.float32)
    ambient = dim if coupling == "iid" else ROTATIONS[rotation].ambient_dim(dim)
    norm_key, rotation_key = jax.random.split(key)
    gaussian = jax.random.normal(norm_key, (num_features, ambient), compute)
    chi = jnp.linalg.norm(gaussian, axis=-1)
    lengths = chi if norms == "chi" else jnp.full_like(chi, ambient**0.5)
    if coupling == "iid":
        w = gaussian if norms == "chi" else gaussian * (lengths / chi)[:, None]
    else:
        runs = COUPLED[coupling].blocks(num_features, ambient, block)
        sweeps = num_sweeps if COUPLED[coupling].weight_dependent else 0
        directions = _draw_directions(rotation_key, runs, lengths, ambient, rotation, sweeps)
        w = directions[:, :dim] * lengths[:, None]
    return w.astype(dtype)


def _draw_directions(
    key: jax.Array, runs: list[Run], lengths: jax.Array, dim: int, rotation: str, sweeps: int
) -> jax.Array:
    """Unit vectors ``[num_features, dim]``: each block under a random rotation of its own."""

    def draw_block(directions: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
        if sweeps:
            directions = minimise_resultant(directions, lengths, num_sweeps=sweeps)
        return ROTATIONS[rotation].rotate(key, directions, dim)

    keys = jax.random.split(key, sum(run.repeats for run in runs))
    rows, first_block, first_row = [], 0, 0
    for block, count in runs:  # Equal blocks are drawn together.
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
