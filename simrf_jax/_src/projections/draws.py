"""Draws of projections from a key, either dense or applied by fast transforms."""

from __future__ import annotations

from typing import overload

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from simrf_jax._src import checks
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections.couplings import COUPLINGS, FIXED, Coupling, FixedCoupling
from simrf_jax._src.projections.norms import Norms, UnweightedNorms
from simrf_jax._src.projections.record import DrawOptions, Projection
from simrf_jax._src.projections.rotations import Rotation
from simrf_jax._src.projections.row_blocks import BlockMode


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
    kernel: ScaleMixture = ...,
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
    kernel: ScaleMixture = ...,
) -> Float[Array, "{num_features} {dim}"] | Projection: ...


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
    kernel: ScaleMixture = GAUSSIAN,
) -> Float[Array, "{num_features} {dim}"] | Projection:
    r"""Draws a random projection W, whose rows are marginally standard normal by default.

    .. math:: W = D S R

    for each row block, where D holds the row norms, S the directions of the coupling, and R is a
    random rotation. Row blocks are independent of each other. Draws from the same key share their
    row norms across couplings, and ``simplex`` and ``simplex_plus`` also share their rotations, so
    that they can be compared as paired draws.

    Args:
      key: A typed PRNG key (``jax.random.key``). ``jax.vmap`` over keys draws many projections.
        If these are not threefry keys, JAX draws all of them from the first key.
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
        letter: row blocks of d rows and a truncated last one. Orthogonal row blocks have d rows in
        both modes.
      rotation: Distribution of R. ``"haar"`` is uniform over the orthogonal group. ``"hadamard"``
        is a product of three random-sign Hadamard factors, with which kernel estimates are nearly
        unbiased. ``"givens"`` is a butterfly of Givens rotations, with which they are unbiased for
        ``orthogonal`` and nearly unbiased for the simplices. The last two work in the next power of
        two of ``dim``, and the row blocks and norms are those of that dimension. ``iid`` rows are
        not rotated, because they are already isotropic.
      norms: Joint law of the row norms. With the first five, each norm has the law F that the
        kernel requires, :math:`\chi_d` for the Gaussian kernel, and kernel estimates are unbiased.
        ``"chi"`` draws independent norms. ``"antithetic"`` draws norms of consecutive rows of a row
        block with :math:`F(a) + F(a') = 1`; in a cross-polytope the two rows of a pair share one
        norm, and consecutive pairs are antithetic. ``"shared"`` gives one norm to all rows of a row
        block, which raises the variance of kernel estimates but lowers the error of attention,
        where factors common to all keys cancel. ``"pair"`` gives one norm to the two rows of a pair
        of a cross-polytope. ``"stratified"`` draws the norms of all m rows from m equally probable
        strata, one from each, in random order. It lowers the error of trigonometric features with
        any coupling of directions (``experiments/kernel_mse``). ``"sqrt_dim"`` sets all norms to
        :math:`\sqrt d`, which biases the estimates. ``"radau"`` sets them to :math:`\sqrt{d + 2}`
        with the total weight d/(d + 2), and the last row of W to zero with the weight 2/(d + 2).
        The relative bias of positive features is only :math:`-\tfrac{v^6}{24 (d + 4)} e^{-v^2/2}`
        to leading order in :math:`v = |x + y|`.
      dtype: Floating type of the result. The draw itself is at least in float32.
      num_sweeps: Number of times that ``simplex_plus`` turns every row, by default 3. No other
        coupling accepts it.
      kernel: Kernel that the features are to estimate, such as ``simrf_jax.kernels.Matern(1.5)``;
        see ``simrf_jax.kernels``. It determines the law of each norm. W for a kernel other than the
        Gaussian one fits only ``trigonometric_features`` and ``phase_features`` of that kernel.
        Fixed norms are only for the Gaussian kernel.

    Returns:
      W, of type ``dtype``; for ``norms="radau"`` a ``Projection`` with weights, which only positive
      and hyperbolic features accept. An array does not record how it was drawn: ``Projection.draw``
      returns a record that does.

    Raises:
      TypeError: If the key is not typed, a size is not an integer, ``dtype`` is not floating, or
        ``kernel`` is not a ``ScaleMixture``.
      ValueError: If a name is unknown, a size is below 1, a simplex has ``dim < 2``, ``num_sweeps``
        is given to a coupling other than ``simplex_plus``, the coupling does not have the rows that
        ``norms`` couples, ``norms="radau"`` has fewer than two rows, or norms are fixed and the
        kernel is not the Gaussian one.

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
    options = DrawOptions(coupling, block, rotation, norms, num_sweeps, kernel)
    return options.draw(key, num_features, dim, dtype=dtype)


def draw_fast_projection(
    key: Key[Array, ""],
    num_features: int,
    dim: int,
    *,
    coupling: FixedCoupling = "simplex",
    block: BlockMode = "regular",
    norms: Norms = "chi",
    dtype: DTypeLike = jnp.float32,
    kernel: ScaleMixture = GAUSSIAN,
) -> Projection:
    r"""Draws a projection that takes O(d log d) time to apply and O(d) memory.

    .. math:: W = D S \, H D_3 \, H D_2 \, H D_1

    for each row block. H is the Hadamard matrix, applied by fast transforms. The :math:`D_k` hold
    random signs. S holds the directions of the coupling, applied in O(d) by Algorithm 1, and D the
    row norms. No d x d matrix is ever formed. If d is not a power of two, vectors are padded with
    zeros to the next one, and the row blocks and norms are those of the padded dimension.

    The product of Hadamard factors is nearly, not exactly, Haar-distributed, so that kernel
    estimates are nearly unbiased: at :math:`|x + y| = 1` they are off by one percent for d = 4 and
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
      norms: Joint law of the row norms, in the padded dimension; see ``draw_projection``.
      dtype: Floating type of the norms.
      kernel: Kernel that the features are to estimate; see ``draw_projection``.

    Returns:
      A ``Projection``, which ``project``, every feature map and attention accept; with weights for
      ``norms="radau"``. Its ``draw_options`` have ``rotation="hadamard"``, because
      ``draw_projection`` draws rows of the same law with that rotation.

    Raises:
      TypeError: If the key is not typed, a size is not an integer, or ``dtype`` is not floating.
      ValueError: If a name is unknown, a size is below 1, ``simplex`` has ``dim < 2``, the coupling
        has no fast form or lacks the rows that ``norms`` couples, or ``norms="radau"`` has fewer
        than two rows.

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
    if coupling not in COUPLINGS:
        checks.one_of("coupling", coupling, FIXED)
    options = DrawOptions(coupling, block, "hadamard", norms, kernel=kernel)
    return Projection.draw(key, num_features, dim, options=options, dtype=dtype, is_fast=True)
