"""Means and covariances of queries and keys, accumulated over any amount of data."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LEAST_SHARE = 1e-4
# Added to the variance, which is 0 if all vectors are equal; typical variances are about 1.
LEAST_VARIANCE = 1e-6


class Moments(NamedTuple):
    """Number, mean and covariance sum of vectors, for each head.

    The moments of two sets of vectors merge into those of both, so that they can be summed over
    batches and devices. ``scatter`` is a sum around the mean, so no digits are lost if the mean is
    large.

    Attributes:
      num_vectors: ``[K]``, number of vectors.
      mean: ``[K, H]``.
      scatter: ``[K, H, H]``, sum of the outer products of the vectors minus their mean.
    """

    num_vectors: Float[Array, " K"]
    mean: Float[Array, "K H"]
    scatter: Float[Array, "K H H"]

    @classmethod
    def of(
        cls, x: Float[Array, "*batch length K H"], real: Bool[Array, "*batch length"] | None = None
    ) -> Moments:
        """Returns the moments of vectors.

        Args:
          x: Vectors, at least in float32.
          real: False at padding, which is ignored; None if there is none.
        """
        x = x.reshape(-1, *x.shape[-2:])
        weights = jnp.ones(x.shape[:1], x.dtype)
        if real is not None:
            real = real.reshape(-1)
            weights = real.astype(x.dtype)
            x = jnp.where(real[:, None, None], x, 0)  # Padding may hold anything.
        count = jnp.sum(weights)
        total = jnp.sum(x * weights[:, None, None], axis=0)
        mean = total / jnp.maximum(count, 1)
        offsets = (x - mean[None]) * weights[:, None, None]
        scatter = jnp.einsum("nkh,nkj->khj", offsets, offsets, precision=jax.lax.Precision.HIGHEST)
        return cls(jnp.broadcast_to(count, mean.shape[:1]), mean, scatter)

    @classmethod
    def empty(cls, num_heads: int, dim: int, dtype: jnp.dtype) -> Moments:
        """Returns the moments of no vectors."""
        return cls(
            jnp.zeros(num_heads, dtype),
            jnp.zeros((num_heads, dim), dtype),
            jnp.zeros((num_heads, dim, dim), dtype),
        )

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of the vectors of both.

        References:
          Chan, Golub and LeVeque, Algorithms for computing the sample variance (American
          Statistician, 1983), https://doi.org/10.1080/00031305.1983.10483115
        """
        count = self.num_vectors + other.num_vectors
        share = (other.num_vectors / jnp.maximum(count, 1))[:, None]
        shift = other.mean - self.mean
        products = shift[:, :, None] * shift[:, None]
        between = (self.num_vectors[:, None] * share)[..., None] * products
        return Moments(count, self.mean + share * shift, self.scatter + other.scatter + between)

    def covariance(self) -> Float[Array, "K H H"]:
        """Returns the covariances, shrunk toward multiples of the identity.

        The share of the identity is the oracle-approximating one: large if there are few vectors,
        zero in the limit of many. It is at least ``LEAST_SHARE``, so that float32 can invert the
        matrix.

        References:
          Chen, Wiesel, Eldar and Hero, Shrinkage algorithms for MMSE covariance estimation (IEEE
          Trans. Signal Process., 2010), Eq. 23, https://arxiv.org/abs/0907.4698
        """
        dim = self.mean.shape[-1]
        count = jnp.maximum(self.num_vectors, 1)
        sample = self.scatter / count[:, None, None]
        variance = jnp.trace(sample, axis1=-2, axis2=-1) / dim
        # In units of the variance, so the squares of large covariances do not overflow.
        unit = jnp.where(variance > 0, variance, 1)
        trace = dim * variance / unit
        squares = jnp.sum(jnp.square(sample / unit[:, None, None]), axis=(-2, -1))
        above = (1 - 2 / dim) * squares + jnp.square(trace)
        below = (count + 1 - 2 / dim) * (squares - jnp.square(trace) / dim)
        share = jnp.where(below > above, above / jnp.where(below > above, below, 1), 1)
        share = jnp.maximum(share, LEAST_SHARE)[:, None, None]
        eye = jnp.eye(dim, dtype=trace.dtype)[None]
        sphere = (variance + LEAST_VARIANCE)[:, None, None] * eye
        return (1 - share) * sample + share * sphere
