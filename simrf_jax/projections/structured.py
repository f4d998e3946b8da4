"""What stands for a projection without being one array."""

from __future__ import annotations

import abc

import jax.numpy as jnp


class StructuredProjection(abc.ABC):
    """A pytree in the place of an array ``[..., num_features, dim]``.

    Feature maps and attention read its shape as they read an array's; leading axes of all its
    leaves are a stack of projections, as under ``jax.vmap``.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array it stands for, ``[..., num_features, dim]``."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The floating type of what it holds."""

    @property
    def ndim(self) -> int:
        """The number of axes of the array it stands for."""
        return len(self.shape)
