"""The projection record, and the options with which it was drawn."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Key, Real

from simrf_jax._src import checks
from simrf_jax._src.kernels import GAUSSIAN, ScaleMixture
from simrf_jax._src.projections.couplings import (
    COUPLED,
    COUPLINGS,
    FIXED,
    NUM_SWEEPS,
    Coupling,
    FixedCoupling,
    check_dim,
)
from simrf_jax._src.projections.dense import draw_rows
from simrf_jax._src.projections.fast import FastRows, apply_fast, draw_fast_rows
from simrf_jax._src.projections.norms import (
    FIXED_NORMS,
    Norms,
    check_norms,
    radau_log_weights,
    squared_norm,
)
from simrf_jax._src.projections.rotations import ROTATIONS, Rotation
from simrf_jax._src.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax._src.projections.structured import StructuredProjection, is_structured


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """The options of ``draw_projection`` that fix the law of W.

    A ``Projection`` has them in ``draw_options``, and the adapters keep them next to W.
    ``redraw_projections`` reads them there.

    Attributes:
      coupling: Joint law of the rows of one row block; see ``draw_projection``.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``draw_projection``.
      rotation: Distribution of the rotations, ``"haar"``, ``"hadamard"`` or ``"givens"``; see
        ``draw_projection``.
      norms: Joint law of the row norms; see ``draw_projection``.
      num_sweeps: Number of times that ``simplex_plus`` turns every row, by default 3. It is None
        for the other couplings.
      kernel: Kernel that determines the law of each norm; see ``draw_projection``.

    Raises:
      TypeError: If ``num_sweeps`` is not an integer, or ``kernel`` is not a ``ScaleMixture``.
      ValueError: If a name is unknown, or ``num_sweeps`` is below 1 or is given to a coupling other
        than ``simplex_plus``, or the coupling does not have the rows that ``norms`` couples, or
        the norms are fixed and the kernel is not the Gaussian one.

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
    kernel: ScaleMixture = GAUSSIAN

    def __post_init__(self) -> None:
        """Checks the options, and fills in the default number of sweeps."""
        checks.one_of("coupling", self.coupling, COUPLINGS)
        checks.one_of("block", self.block, BLOCK_MODES)
        checks.one_of("rotation", self.rotation, ROTATIONS)
        check_norms(self.norms, self.coupling, self.kernel)
        if self.coupling != "iid" and COUPLED[self.coupling].weight_dependent:
            num_sweeps = NUM_SWEEPS if self.num_sweeps is None else self.num_sweeps
            num_sweeps = checks.positive_int("num_sweeps", num_sweeps)
            object.__setattr__(self, "num_sweeps", num_sweeps)
        elif self.num_sweeps is not None:
            raise ValueError(f"num_sweeps is for coupling='simplex_plus', got {self.coupling!r}.")

    @property
    def draws_pairs(self) -> bool:
        """True if row 2i + 1 is the negative of row 2i, so one row represents both."""
        return self.coupling == "cross_polytope" and self.norms in ("pair", "shared", "sqrt_dim")

    @property
    def draws_weights(self) -> bool:
        """True if the rows have weights."""
        return self.norms == "radau"

    @property
    def has_fixed_norms(self) -> bool:
        """True if the norms of the rows are not random."""
        return self.norms in FIXED_NORMS

    @property
    def has_chi_norms(self) -> bool:
        """True if each row is marginally standard normal."""
        return not self.has_fixed_norms and self.kernel == GAUSSIAN

    def norm_dim(self, dim: int) -> int:
        """Returns the dimension in which norms are drawn, before rows are truncated to ``dim``."""
        return dim if self.coupling == "iid" else ROTATIONS[self.rotation].ambient_dim(dim)

    def draw(
        self,
        key: Key[Array, ""],
        num_features: int,
        dim: int,
        *,
        dtype: DTypeLike = jnp.float32,
    ) -> Float[Array, "{num_features} {dim}"] | Projection:
        """Draws W as an array, or as a ``Projection`` if it has weights; see ``draw_projection``.

        ``Projection.draw`` always returns a record, which contains these options.

        Args:
          key: A typed PRNG key.
          num_features: Number of rows.
          dim: Dimension of the vectors to project.
          dtype: Floating type of the result.

        Raises:
          TypeError: If the key is not typed, a size is not an integer, or ``dtype`` is not
            floating.
          ValueError: If a size is below 1, a simplex has ``dim < 2``, or ``norms="radau"`` has
            fewer than two rows.
        """
        drawn = Projection.draw(key, num_features, dim, options=self, dtype=dtype)
        rows: Any = drawn.rows
        return drawn if self.draws_weights else rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Projection(StructuredProjection):
    r"""The projection W, with its weights, its structure and the options of its draw.

    Every function that takes W takes an array or a ``Projection``. The record adds

    - a weight for each row, which positive, hyperbolic, optimal positive and calibrated features
      honor by giving half of each log weight to each side:

      .. math::
          \phi(x) \cdot \phi(y) = \frac1m \sum_i e^{l_i}\, e^{w_i \cdot (x + y)}
              e^{-(|x|^2 + |y|^2)/2}

      for the softmax kernel. The estimate is unbiased if :math:`e^{l_i}` is the density of the
      standard normal law at :math:`w_i` over the density of the law from which :math:`w_i` was
      drawn. Other feature maps refuse weights. A log weight of minus infinity excludes its row.
    - the negatives of all rows, for half the cost of projecting. With orthogonal rows this is a
      cross-polytope whose pairs share a norm, like that of ``draw_projection(...,
      coupling="cross_polytope", norms="pair")`` except for the order of the rows. Its positive
      features are ``hyperbolic_features`` of the rows.
    - rows in O(d) memory that are applied in O(d log d); see ``draw_fast_projection``.
    - how it was drawn. A record with this information can be redrawn, and feature maps refuse it if
      its norms do not fit, even inside ``jax.jit``. A plain array carries no such information: its
      norms are assumed to be chi variables.

    It is a pytree of its arrays. Leading axes that all of them share make it a stack, as under
    ``jax.vmap``.

    Attributes:
      rows: W, ``[..., num_features, dim]``, an array or ``FastRows``; if paired, one row of each
        pair, ``[..., num_pairs, dim]``.
      log_weights: Logarithms l of the weights, ``[..., num_features]``; None for equal weights.
      is_paired: True if the negatives of the rows follow the rows.
      draw_options: Options with which the rows were drawn, or None if unknown.

    Example:
      >>> import jax, jax.numpy as jnp, simrf_jax
      >>> w = simrf_jax.draw_projection(jax.random.key(0), 65, 64)
      >>> x = jnp.full(64, 0.05)
      >>> weighted = simrf_jax.Projection(w, jnp.full(65, -1.0))
      >>> plain, less = (simrf_jax.positive_features(x, each) for each in (w, weighted))
      >>> bool(jnp.allclose(less @ less, jnp.exp(-1) * (plain @ plain)))
      True
      >>> pairs = simrf_jax.Projection(w, is_paired=True)
      >>> pairs.shape
      (130, 64)
      >>> u = simrf_jax.project(x, w)
      >>> bool(jnp.all(simrf_jax.project(x, pairs) == jnp.concatenate([u, -u])))
      True
      >>> known = simrf_jax.Projection.draw(jax.random.key(0), 65, 64)
      >>> bool(jnp.all(known.rows == w)), known.draw_options.coupling
      (True, 'simplex')
    """

    expected = "an array [num_features, dim] or a Projection"
    rows: Float[ArrayLike, "*stack num_rows dim"] | FastRows
    log_weights: Float[ArrayLike, "*stack num_features"] | None = None
    is_paired: bool = dataclasses.field(default=False, metadata={"static": True})
    draw_options: DrawOptions | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, projection: Any) -> Projection:
        """Returns a ``Projection`` unchanged, or wraps an array in one without draw options.

        Args:
          projection: W.

        Raises:
          TypeError: If it is neither a floating array nor a ``Projection``.
        """
        if projection is None or is_structured(projection):
            return super().of(projection)
        # The methods that read the rows of an array check its type.
        rows: Any = projection if isinstance(projection, jax.Array) else as_projection(projection)
        return cls(rows)

    @classmethod
    def draw(
        cls,
        key: Key[Array, ""],
        num_features: int,
        dim: int,
        *,
        options: DrawOptions | None = None,
        dtype: DTypeLike = jnp.float32,
        is_fast: bool = False,
    ) -> Projection:
        """Draws a projection that records its draw options; see ``draw_projection``.

        Args:
          key: A typed PRNG key. ``jax.vmap`` over keys draws a stack.
          num_features: Number of rows.
          dim: Dimension of the vectors to project.
          options: Options of the draw, by default ``DrawOptions()``.
          dtype: Floating type of the rows.
          is_fast: True draws ``FastRows``; see ``draw_fast_projection``. The options must have
            ``rotation="hadamard"``.

        Raises:
          TypeError: If the key is not typed, a size is not an integer, or ``dtype`` is not
            floating.
          ValueError: If a size is below 1, a simplex has ``dim < 2``, ``norms="radau"`` has fewer
            than two rows, or the options have no fast form.
        """
        checks.typed_key(key)
        options = DrawOptions() if options is None else options
        coupling, norms = options.coupling, options.norms
        if is_fast and coupling not in FIXED:
            raise ValueError(
                f"coupling={coupling!r} has no fast form because its directions have no structure; "
                "draw_projection draws it as a dense matrix. The couplings with a fast form are "
                f"{', '.join(map(repr, FIXED))}."
            )
        if is_fast and options.rotation != "hadamard":
            raise ValueError(f"Fast rows need rotation='hadamard', got {options.rotation!r}.")
        num_features = checks.positive_int("num_features", num_features)
        dim = checks.positive_int("dim", dim)
        check_dim(coupling, dim)
        dtype = checks.floating_dtype("dtype", dtype)
        if options.draws_weights and num_features < 2:
            raise ValueError(
                "norms='radau' sets the last row to zero and needs num_features of at least 2, got "
                f"{num_features}."
            )
        rows: Any
        if is_fast:
            fixed = cast(FixedCoupling, coupling)
            rows = draw_fast_rows(
                key, num_features, dim, fixed, options.block, norms, options.kernel, dtype
            )
        else:
            rows = draw_rows(
                key,
                num_features - options.draws_weights,
                dim,
                coupling,
                options.block,
                options.rotation,
                norms,
                options.kernel,
                dtype,
                options.num_sweeps,
            )
        if not options.draws_weights:
            return cls(rows, draw_options=options)
        compute = np.promote_types(dtype, jnp.float32)
        log_weights = radau_log_weights(num_features, options.norm_dim(dim), compute)
        rows = rows if is_fast else jnp.pad(rows, ((0, 1), (0, 0)))
        return cls(rows, log_weights, draw_options=options)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W including the negatives, ``[..., num_features, dim]``."""
        rows = np.shape(self.rows)
        shape = (*rows[:-2], 2 * rows[-2], rows[-1]) if self.is_paired and rows[1:] else rows
        weights = None if self.log_weights is None else np.shape(self.log_weights)
        if len(rows) >= 2 and weights in (None, shape[:-1]):
            return shape
        name = "num_pairs" if self.is_paired else "num_features"
        if weights is None:
            raise ValueError(f"rows must be [..., {name}, dim], got shape {rows}.")
        raise ValueError(
            f"rows must be [..., {name}, dim], and log_weights must be [..., num_features] with "
            f"the same leading axes, got {rows} and {weights}."
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Floating type of the rows."""
        return jnp.result_type(self.rows)

    @property
    def is_dense(self) -> bool:
        """True if the rows are an array, and False if they are ``FastRows``."""
        return not isinstance(self.rows, FastRows)

    @property
    def unweighted(self) -> Projection:
        """The same rows with equal weights."""
        _ = self.shape  # Raises if the shapes of the parts do not match.
        return dataclasses.replace(self, log_weights=None)

    def apply(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch num_features"]:
        """Returns the projected vectors; see ``project``.

        Args:
          x: Vectors.

        Raises:
          TypeError: If the rows have weights or are not floating.
          ValueError: If the shapes do not match, or there are no rows.
        """
        if self.log_weights is not None:
            raise TypeError(
                "projection must have rows of equal weight here, got a Projection with log "
                "weights, which only positive, hyperbolic, optimal positive and calibrated "
                "features can honor."
            )
        return self.exponents(x)

    def exponents(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch num_features"]:
        r"""Returns the exponents :math:`w_i \cdot x + l_i / 2` of exponential features.

        Args:
          x: Vectors.

        Raises:
          TypeError: If the rows or the log weights are not floating.
          ValueError: If the shapes do not match, or there are no rows.
        """
        if self.log_weights is not None:
            _ = self.shape  # Raises if the shapes of the parts do not match.
        rows = cast(Any, self.rows)
        is_dense = not isinstance(rows, FastRows)
        if is_dense:
            rows = checks.floating("projection", rows)
        if rows.ndim != 2:
            raise ValueError(
                f"projection must be [num_features, dim], got shape {rows.shape}; "
                "use jax.vmap for a stack of projections."
            )
        if rows.shape[0] == 0:
            raise ValueError(f"projection must have at least one feature, got {rows.shape}.")
        if x.ndim < 1 or x.shape[-1] != rows.shape[-1]:
            raise ValueError(
                f"x must be [..., dim] with the projection's dim={rows.shape[-1]}, "
                f"got shape {x.shape}."
            )
        x = x.astype(functools.reduce(np.promote_types, (jnp.float32, x.dtype, rows.dtype)))
        if is_dense:
            rows = rows.astype(x.dtype)
            y = jnp.einsum("...d,md->...m", x, rows, precision=jax.lax.Precision.HIGHEST)
        else:
            y = apply_fast(x, rows)
        if self.is_paired:
            y = jnp.concatenate([y, -y], axis=-1)
        return y if self.log_weights is None else self.add_half_log_weights(y)

    def add_half_log_weights(
        self, exponent: Float[Array, "*batch num_features"]
    ) -> Float[Array, "*batch num_features"]:
        """Adds half the log weight of each row, the share of each side of a product.

        Args:
          exponent: Logarithms of features, one for each row. Rows of equal weight leave them
            unchanged.

        Raises:
          TypeError: If the log weights are not floating.
        """
        if self.log_weights is None:
            return exponent
        log_weights = checks.floating("log_weights", self.log_weights).astype(exponent.dtype)
        return exponent + jnp.broadcast_to(0.5 * log_weights, exponent.shape)

    def dense(self) -> Float[Array, "*stack num_features dim"]:
        """Returns all rows as an array, at least in float32, without their weights."""
        rows = self.dense_rows()
        return jnp.concatenate([rows, -rows], axis=-2) if self.is_paired else rows

    def dense_rows(self) -> Float[Array, "*stack num_rows dim"]:
        """Returns ``rows`` as an array, at least in float32; if paired, one row of each pair."""
        if not self.is_dense:

            def dense(rows: Any) -> Float[Array, "num_rows dim"]:
                return Projection(rows).apply(jnp.eye(rows.shape[-1])).T

            for _ in self.shape[:-2]:
                dense = jax.vmap(dense)
            return dense(self.rows)
        rows = checks.floating("projection", cast(Any, self.rows))
        return rows.astype(np.promote_types(rows.dtype, jnp.float32))

    def with_negatives(self) -> Projection:
        """Returns the rows and their negatives, with the same weights."""
        log_weights = self.log_weights
        if log_weights is not None:
            log_weights = jnp.concatenate([jnp.asarray(log_weights)] * 2, axis=-1)
        if self.is_paired:
            return Projection(self.dense(), log_weights, is_paired=True)
        return dataclasses.replace(self, log_weights=log_weights, is_paired=True)

    def tilted(self, parameter: Real[ArrayLike, ""]) -> Projection:
        r"""Returns a projection with rows of a different variance, and matching weights.

        The rows :math:`\sqrt{1 - 4A}\, w_i` have the log weights

        .. math:: l_i = 2 A |w_i|^2 + \tfrac d2 \log(1 - 4A),

        the log ratios of the standard normal density to the density of these rows, if the
        :math:`w_i` are marginally standard normal. They are added to the log weights of the
        projection, if any. The projection must not have leading axes. For fast rows, d and the
        norms are those of the padded dimension.

        Args:
          parameter: A, one number below 1/4.

        Returns:
          A projection in at least float32.
        """
        compute = np.promote_types(self.dtype, jnp.float32)
        parameter = jnp.asarray(parameter, compute)
        scale = jnp.sqrt(1 - 4 * parameter)
        # The first two terms of l are large and nearly cancel for long rows, so d is subtracted
        # from |w|^2.
        rows: Any = self.unweighted.rows
        if self.is_dense:
            rows = checks.floating("projection", cast(Any, self.rows)).astype(compute)
            excess, dim = jnp.sum(jnp.square(rows) - 1, axis=-1), rows.shape[-1]
            rows *= scale
        else:
            excess, dim = rows.excess(compute), rows.signs.shape[-1]
            rows = rows.scaled(scale)
        if self.is_paired:
            excess = jnp.concatenate([excess, excess])
        constant = dim * (2 * parameter + 0.5 * jnp.log1p(-4 * parameter))
        log_weights = 2 * parameter * excess + constant
        if self.log_weights is not None:
            log_weights += jnp.asarray(self.log_weights, compute)
        return Projection(rows, log_weights, self.is_paired)

    def check_chi_norms(self) -> None:
        """Raises ``ValueError`` if the norms of the rows are known not to be chi variables.

        The draw options determine this, even inside ``jax.jit``. A projection without draw options
        passes.
        """
        options = self.draw_options
        if options is None or options.has_chi_norms:
            return
        if options.has_fixed_norms:
            norm = squared_norm(options.norms, options.norm_dim(self.shape[-1])) ** 0.5
            drawn = f"norms of {norm:.4g} as norms={options.norms!r} draws them"
        else:
            drawn = f"rows for kernel={options.kernel}"
        raise ValueError(
            f"projection must have rows whose norms are chi variables, got {drawn}, with which "
            "tilted rows estimate another kernel."
        )

    def redraw(self, key: Key[Array, ""], draw_options: DrawOptions | None = None) -> Projection:
        """Draws another projection with the structure, shapes and dtypes of this one.

        This projection must not have leading axes.

        Args:
          key: A typed PRNG key.
          draw_options: Options of the draw, by default those of the projection. If the projection
            has options, these must be equal.

        Returns:
          The same projection with new rows, and with the weights that the options draw.

        Raises:
          TypeError: If the weights are not those of the options, or fast rows have no draw options.
          ValueError: If the projection was drawn with other options than those given, or if neither
            has options.

        Example:
          >>> import jax, jax.numpy as jnp, simrf_jax
          >>> one, two = jax.random.split(jax.random.key(0))
          >>> w = simrf_jax.draw_fast_projection(one, 4096, 4096)
          >>> again = simrf_jax.draw_fast_projection(two, 4096, 4096)
          >>> bool(jnp.all(w.redraw(two).rows.signs == again.rows.signs))
          True
        """
        options = agreed(self.draw_options, draw_options)
        has_weights = self.log_weights is not None
        if has_weights != options.draws_weights or (has_weights and self.is_paired):
            raise self.no_redraw()
        if not self.is_dense and self.draw_options is None:
            raise self.no_redraw()
        num_rows, dim = np.shape(self.rows)
        drawn = Projection.draw(
            key, num_rows, dim, options=options, dtype=self.dtype, is_fast=not self.is_dense
        )
        log_weights = drawn.log_weights
        if log_weights is not None:
            log_weights = jnp.asarray(log_weights, jnp.result_type(self.log_weights))
        return dataclasses.replace(self, rows=drawn.rows, log_weights=log_weights)


def agreed(carried: DrawOptions | None, asked: DrawOptions | None) -> DrawOptions:
    """Returns the options of a redraw, on which the projection and the caller must agree.

    Args:
      carried: Options with which a projection was drawn, or None if unknown.
      asked: Options from the caller, or None.

    Raises:
      ValueError: If they differ, or are both None.
    """
    options = asked if carried is None else carried
    if options is None:
        raise ValueError(
            "A projection does not record how it was drawn; pass the options of its draw, "
            "options=simrf_jax.DrawOptions(...). Of a Flax model, pass only the projections: "
            "nnx.state(model, RandomProjection), or the collection random_features."
        )
    if asked is not None and asked != options:
        raise ValueError(
            f"A redraw repeats the draw: a projection was drawn by {carried}, got options={asked}. "
            "Leave options out, or make the model anew with those."
        )
    return options


def as_projection(
    projection: Float[ArrayLike, "*shape"] | StructuredProjection,
) -> Float[Array, "*shape"] | StructuredProjection:
    """Returns a projection as a floating array, or unchanged if it is structured.

    A number is refused, because it may be meant for that of features.

    Args:
      projection: Floating array-like, or a ``StructuredProjection``.

    Raises:
      TypeError: If the projection is None, a number or not floating.
    """
    w: Any = projection
    if is_structured(w):
        return w
    if isinstance(w, int | float):
        raise TypeError(
            f"projection must be {Projection.expected}, such as draw_projection(jax.random.key(0), "
            f"{projection}, dim), got {projection}."
        )
    return checks.floating("projection", w)
