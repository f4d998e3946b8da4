"""Exponential features as arrays: all that attention needs to know about such feature maps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src import one_line
from simrf_jax._src.features.log_space import LogFeatures
from simrf_jax._src.projections import Projection, product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ExponentialForm:
    r"""The features of one side of a map whose features are exponentials of quadratic functions.

    .. math:: \log \phi(x)_i = w_i \cdot x + b_i - \tfrac12 |M x - c|^2 + a - \tfrac12 \log m

    The last two terms, the same for all vectors and features, cancel in attention, but not when
    exact weights are added. Each array may have a leading axis of key heads K.

    Attributes:
      rows: w, ``[m, H]``, in float32 at least; if paired, one row of each pair, ``[m / 2, H]``.
      offsets: b, ``[m]``; None for zeros.
      stretch: M, ``[H, H]``; None for the identity.
      center: c, ``[H]``; None for zeros. The form has one only with a stretch.
      constant: a, a number; None for zero.
      is_paired: True for features of the rows followed by those of their negatives.
    """

    rows: Float[Array, "*K rows H"]
    offsets: Float[Array, "*K m"] | None = None
    stretch: Float[Array, "*K H H"] | None = None
    center: Float[Array, "*K H"] | None = None
    constant: Float[Array, "*K"] | None = None
    is_paired: bool = dataclasses.field(default=False, metadata={"static": True})
    axes_of_one: ClassVar[Mapping[str, int]] = {
        "rows": 2,
        "offsets": 1,
        "stretch": 2,
        "center": 1,
        "constant": 0,
    }

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def num_features(self) -> int:
        """Number m of features."""
        return self.rows.shape[-2] * (2 if self.is_paired else 1)

    def unpaired(self) -> ExponentialForm:
        """Returns the same features without pairs."""
        if not self.is_paired:
            return self
        rows = jnp.concatenate([self.rows, -self.rows], axis=-2)
        return dataclasses.replace(self, rows=rows, is_paired=False)

    def log_features(self, x: Float[Array, "*batch H"]) -> LogFeatures:
        """Returns the features of one head's vectors."""
        exponent = Projection(self.rows, is_paired=self.is_paired).apply(x)
        if self.offsets is not None:
            exponent += jnp.broadcast_to(self.offsets, exponent.shape)
        # A separate product: a joint one with rows and stretch would have to be split again.
        stretched = x if self.stretch is None else product(x, self.stretch)
        if self.center is not None:
            stretched -= jnp.broadcast_to(self.center, stretched.shape)
        squares = jnp.sum(jnp.square(stretched.astype(exponent.dtype)), axis=-1, keepdims=True)
        constant = 0 if self.constant is None else self.constant
        return LogFeatures(
            exponent, -0.5 * squares + (constant - 0.5 * math.log(self.num_features))
        )
