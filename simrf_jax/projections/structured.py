"""What stands for a projection without being one array."""

from __future__ import annotations

import abc
from typing import Any, Self

import jax
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

    def draw_like(self, key: jax.Array, **draw_options: Any) -> Self:
        """Another draw of the shapes and dtypes of this one, which has no leading axes.

        Args:
          key: A typed PRNG key.
          **draw_options: Those of ``draw_projection``.

        Raises:
          TypeError: If it holds what no key can draw.
        """
        raise TypeError(
            f"A {type(self).__name__} cannot be redrawn here; draw it again from "
            "redraw_key(key, step, interval=...), by jax.vmap over keys for a stack."
        )
