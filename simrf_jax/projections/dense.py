"""Dense projections: W as one array, its rows coupled block by block."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.projections.blocks import BLOCK_MODES, orthogonal_blocks, simplex_blocks
from simrf_jax.projections.rotations import ROTATIONS

BLOCKS = {"orthogonal": orthogonal_blocks, "simplex": simplex_blocks}
COUPLINGS = ("iid", *BLOCKS)
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
) -> jax.Array:
    r"""Draws a random projection W whose rows are marginally standard normal.

    .. math:: W = D S R

    block by block, with :math:`D` the row norms, :math:`S` the directions of the coupling and
    :math:`R` a random rotation. Drawn from one key, all couplings share their row norms, so that
    they can be compared as paired draws.

    Args:
      key: A typed PRNG key (``jax.random.key``). ``jax.vmap`` over keys draws many projections.
      num_features: Number of rows m, any positive number.
      dim: Dimension d of the vectors to project; at least 2 for ``simplex``.
      coupling: ``"iid"``; ``"orthogonal"``; or ``"simplex"``, which of all couplings that do not
        look at the norms gives positive features the least variance (Theorem 3.4, for m = d).
      block: How many rows a simplex block has. ``"regular"`` fills whole regular simplices of up
        to d + 1 rows; ``"square"`` is the paper to the letter, d rows and a cut-off remainder.
        Orthogonal blocks have d rows in both modes.
      rotation: ``"haar"``, uniform over the orthogonal group.
      norms: ``"chi"`` (:math:`\chi_d`, the norm of a Gaussian vector: kernel estimates are
        unbiased) or ``"sqrt_dim"`` (all norms :math:`\sqrt d`: biased).
      dtype: Floating type of the result. The draw itself is made in float32 at least.

    Returns:
      Array ``[num_features, dim]``.

    Raises:
      TypeError: If the key is not a typed one, a size is no integer or dtype is not floating.
      ValueError: If a name is unknown, a size is below 1, or simplex has ``dim < 2``.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 130, 64)
      >>> w.shape
      (130, 64)
      >>> s = w / jnp.linalg.norm(w, axis=-1, keepdims=True)
      >>> print(f"{s[0] @ s[1]:.6f}, {-1 / 64:.6f}")  # two rows of one 65-point simplex
      -0.015625, -0.015625

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 8 and Sec. 3.1. Yu et al., Orthogonal
      Random Features (NeurIPS 2016).
    """
    checks.typed_key(key)
    checks.one_of("coupling", coupling, COUPLINGS)
    checks.one_of("block", block, BLOCK_MODES)
    checks.one_of("rotation", rotation, ROTATIONS)
    checks.one_of("norms", norms, NORMS)
    num_features = checks.positive_int("num_features", num_features)
    dim = checks.positive_int("dim", dim)
    if coupling == "simplex" and dim < 2:
        raise ValueError(f"coupling='simplex' needs dim of at least 2, got dim={dim}.")
    dtype = checks.floating_dtype("dtype", dtype)
    return _draw(key, num_features, dim, coupling, block, rotation, norms, dtype)


@functools.partial(jax.jit, static_argnums=range(1, 8))
def _draw(
    key: jax.Array,
    num_features: int,
    dim: int,
    coupling: str,
    block: str,
    rotation: str,
    norms: str,
    dtype: jnp.dtype,
) -> jax.Array:
    compute = jnp.promote_types(dtype, jnp.float32)
    norm_key, rotation_key = jax.random.split(key)
    gaussian = jax.random.normal(norm_key, (num_features, dim), compute)
    chi = jnp.linalg.norm(gaussian, axis=-1, keepdims=True)
    if coupling == "iid":
        w = gaussian if norms == "chi" else gaussian * (dim**0.5 / chi)
    else:
        blocks = BLOCKS[coupling](num_features, dim, block)
        directions = _draw_directions(rotation_key, blocks, dim, rotation, compute)
        w = directions * (chi if norms == "chi" else dim**0.5)
    return w.astype(dtype)


def _draw_directions(
    key: jax.Array, blocks: list[np.ndarray], dim: int, rotation: str, dtype: jnp.dtype
) -> jax.Array:
    """Unit vectors ``[num_features, dim]``: each block in the span of a random frame of its own."""

    def draw_block(vertices: jax.Array, key: jax.Array) -> jax.Array:
        frame = ROTATIONS[rotation](key, dim, vertices.shape[1], dtype)
        return jnp.matmul(vertices, frame, precision=jax.lax.Precision.HIGHEST)

    keys = jax.random.split(key, len(blocks))
    directions, start = [], 0
    for _, group in itertools.groupby(blocks, key=id):  # Equal blocks are drawn together.
        equal = list(group)
        end = start + len(equal)
        vertices = jnp.asarray(equal[0], dtype)
        rows = jax.vmap(draw_block, in_axes=(None, 0))(vertices, keys[start:end])
        directions.append(rows.reshape(-1, dim))
        start = end
    return jnp.concatenate(directions)


def draw_stack(keys: jax.Array, num_features: int, dim: int, **draw_options: Any) -> jax.Array:
    """Draws one projection for each key of ``[n]``; ``[n, num_features, dim]``."""

    def draw(key: jax.Array) -> jax.Array:
        return draw_projection(key, num_features, dim, **draw_options)

    return jax.vmap(draw)(keys)


def project(x: ArrayLike, projection: ArrayLike) -> jax.Array:
    r"""Projects vectors onto the rows of a projection, :math:`y_i = w_i \cdot x`.

    Args:
      x: Vectors ``[..., dim]``.
      projection: W, ``[num_features, dim]``.

    Returns:
      Array ``[..., num_features]``, in float32 at least: the logits of every feature map, which
      bfloat16 would round to a few per cent.

    Raises:
      TypeError: If either is not floating.
      ValueError: If the shapes do not match.

    Example:
      >>> import jax.numpy as jnp, simrf_jax
      >>> simrf_jax.project(jnp.array([1.0, 2.0]), jnp.array([[3.0, 0.0], [0.0, 5.0], [1.0, 1.0]]))
      Array([ 3., 10.,  3.], dtype=float32)
    """
    x, projection = checks.floating("x", x), checks.floating("projection", projection)
    if projection.ndim != 2:
        raise ValueError(
            f"projection must be [num_features, dim], got shape {projection.shape}; "
            "use jax.vmap for a stack of them."
        )
    if x.ndim < 1 or x.shape[-1] != projection.shape[-1]:
        raise ValueError(
            f"x must be [..., dim] with the projection's dim={projection.shape[-1]}, "
            f"got shape {x.shape}."
        )
    compute = functools.reduce(jnp.promote_types, (x.dtype, projection.dtype, jnp.float32))
    return jnp.einsum(
        "...d,md->...m",
        x.astype(compute),
        projection.astype(compute),
        precision=jax.lax.Precision.HIGHEST,
    )
