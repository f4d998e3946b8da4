"""Pairs of exponentials with trainable rows, which start as calibrated features."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.feature_map import FeatureMap
from simrf_jax._src.features.log_space import LogFeatures, Side, widened
from simrf_jax._src.projections import Projection, ProjectionLike


@dataclasses.dataclass(frozen=True, eq=False)
class Learned(FeatureMap):
    r"""Pairs of exponentials with learned rows, offsets and weights, as in Hedgehog.

    With :math:`\tilde x`, :math:`\Sigma` and :math:`\ell` of ``Calibrated``, and c(x) the factor
    that all its features of a vector share, the 2 m features of a query x are

    .. math::
        \log \phi(x)_{\pm i} = \pm (\Sigma^{1/2} w_i \cdot \tilde x + b_i)
            + \tfrac12 \ell(\Sigma^{1/2} w_i) + \tfrac12 a_i + \log c(x) - \tfrac12 \log(2 m),

    and those of a key have their own rows w and offsets b. Where the rows of both sides are those
    of W, and b and a are zeros, these are exactly the ``Calibrated`` features of W and -W; without
    a calibration they are ``Hyperbolic`` features of W. Learned features trade unbiasedness for a
    better fit to the attention weights of some data: see ``distillation_loss``.

    Hedgehog has :math:`e^{\pm(w_i \cdot x + b_i)}`. For queries this is the same family, because
    factors that all features share cancel in attention. For keys the factor c(y) does not cancel.
    It is kept, and has no parameters: without it the start would not be exact, and with it no key
    that is longer than those of the data outweighs all others, because :math:`\log \phi(y)_{\pm i}`
    falls with the square of its length.

    Rows are in the coordinates of the calibration, in which queries and keys have equal
    covariances. So a new calibration moves the features along with the data. The map has its own
    rows, so pass ``projection=None`` to attention. Arrays may have a leading axis of key heads K.

    Attributes:
      calibration: Means, matrices and tilt of the coordinates, a ``Calibrated`` without gradients.
      query_rows: w of queries, ``[K, m, H]``.
      key_rows: w of keys, ``[K, m, H]``.
      query_offsets: b of queries, ``[K, m]``.
      key_offsets: b of keys, ``[K, m]``.
      log_weights: a, ``[K, m]``; each side gets half.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 16))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 16, 16, coupling="orthogonal")
      >>> calibration = simrf_jax.calibrate(q, k)
      >>> learned = simrf_jax.feature_maps.Learned.start(w, calibration)
      >>> grads = jax.grad(
      ...     lambda learned: simrf_jax.distillation_loss(q, k, None, feature_map=learned)
      ... )(learned)
      >>> grads.query_rows.shape
      (4, 16, 16)
      >>> simrf_jax.random_feature_attention(q, k, v, None, feature_map=learned).shape
      (2, 100, 4, 16)

    References:
      Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry
      (ICLR 2024), https://arxiv.org/abs/2402.04347
    """

    is_finite = True
    multiplies_rows = True
    needs_chi_norms = True
    coupling = "orthogonal"
    axes_of_one: ClassVar[Mapping[str, int]] = {
        "query_rows": 2,
        "key_rows": 2,
        "query_offsets": 1,
        "key_offsets": 1,
        "log_weights": 1,
    }
    calibration: Calibrated
    query_rows: Float[Array, "*K m H"]
    key_rows: Float[Array, "*K m H"]
    query_offsets: Float[Array, "*K m"]
    key_offsets: Float[Array, "*K m"]
    log_weights: Float[Array, "*K m"]

    @classmethod
    def start(cls, rows: ProjectionLike, calibration: Calibrated) -> Learned:
        """Returns the map before any training, with calibrated features.

        Args:
          rows: W, ``[m, H]`` for all heads or ``[K, m, H]``, with Gaussian rows, such as those of
            ``norms="chi"``: an array, or a ``Projection`` of one without weights or pairs.
            ``coupling="orthogonal"`` suits the pairs best.
          calibration: The map that ``calibrate`` returns, or ``Calibrated.identity``.

        Raises:
          TypeError: If the rows are a ``Projection`` of anything but a plain array.
          ValueError: If the shape of the rows does not fit the heads of the calibration, or they
            are a ``Projection`` that was drawn with fixed norms.
        """
        w = Projection.of(rows)
        w.check_chi_norms()
        if w.log_weights is not None or w.is_paired or not w.is_dense:
            raise TypeError(f"rows must be an array, or a Projection of one, got {rows!r}.")
        rows = jnp.asarray(w.rows)
        *heads, dim = calibration.query_mean.shape
        if rows.ndim < 2 or rows.shape[-1] != dim or rows.shape[:-2] not in ((), (*heads,)):
            raise ValueError(
                f"rows must be [m, {dim}], or have the leading axes {(*heads,)} of the "
                f"calibration, got shape {rows.shape}."
            )
        rows = jnp.broadcast_to(rows, (*heads, *rows.shape[-2:]))
        # Separate arrays, because a training step may donate each of them.
        query_rows, key_rows = jnp.array(rows), jnp.array(rows)
        vectors = (jnp.zeros(rows.shape[:-1], rows.dtype) for _ in range(3))
        return cls(calibration, query_rows, key_rows, *vectors)

    @property
    def head_dim(self) -> int:
        """Width of a head of the rows."""
        return jnp.shape(self.query_rows)[-1]

    def log_features(
        self, x: Float[Array, "*batch H"], projection: ProjectionLike | None, *, side: Side
    ) -> LogFeatures:
        """Returns the features of one head's queries or keys.

        Raises:
          ValueError: If there is a projection, the arrays belong to several heads, or their shapes
            do not match.
        """
        pairs = self._pairs(projection, side, x.dtype)
        return jax.lax.stop_gradient(self.calibration).log_features(x, pairs, side=side)

    def key_scores(self, y: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
        """Returns the scores of keys of one head by the calibration."""
        return self.calibration.key_scores(y)

    def exponential_form(self, projection: ProjectionLike | None, *, side: Side) -> ExponentialForm:
        """Returns the form of one head, for vectors that are not centered."""
        pairs = self._pairs(projection, side, jnp.result_type(self.query_rows))
        return jax.lax.stop_gradient(self.calibration).exponential_form(pairs, side=side)

    def _pairs(self, projection: ProjectionLike | None, side: Side, dtype: DTypeLike) -> Projection:
        """Returns the rows of one side and their negatives, with their log weights."""
        if projection is not None:
            raise ValueError(
                "Learned features have their own rows: projection must be None, got shape "
                f"{jnp.shape(projection)}."
            )
        self._check_shapes()
        if side == "query":
            rows, offsets = self.query_rows, self.query_offsets
        else:
            rows, offsets = self.key_rows, self.key_offsets
        # Calibrated features give half of each log weight to each side, but offsets count in full.
        # For float64 vectors the sums are in float64.
        log_weights, offsets = widened(self.log_weights, dtype), widened(offsets, dtype)
        log_weights = jnp.concatenate([log_weights + 2 * offsets, log_weights - 2 * offsets])
        return Projection(rows, log_weights, is_paired=True)

    def _check_shapes(self) -> None:
        rows = jnp.shape(self.query_rows)
        vectors = (self.query_offsets, self.key_offsets, self.log_weights)
        shapes = [jnp.shape(self.key_rows), *map(jnp.shape, vectors)]
        if len(rows) != 2 or shapes != [rows, *([rows[:1]] * 3)]:
            raise ValueError(
                "query_rows and key_rows must be [m, H] for one head, and query_offsets, "
                f"key_offsets and log_weights [m], got shapes {rows} and {shapes}."
            )
