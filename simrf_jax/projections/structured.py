"""Interface of projections that are not one array."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key


class StructuredProjection(abc.ABC):
    """Pytree that takes the place of an array ``[..., num_features, dim]``.

    Feature maps and attention read its shape as they read an array's. Leading axes that all its
    leaves share make it a stack of projections, as under ``jax.vmap``.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the array whose place it takes, ``[..., num_features, dim]``."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Floating type of its leaves."""

    @property
    def ndim(self) -> int:
        """Number of axes of the array whose place it takes."""
        return len(self.shape)

    # The type of ``options`` cannot stand here: DrawOptions draws structured projections, so its
    # module imports this one.
    def draw_like(self, key: Key[Array, ""], options: Any) -> StructuredProjection:
        """Draws another projection with the shapes and dtypes of this one.

        This projection must not have leading axes.

        Args:
          key: A typed PRNG key.
          options: ``DrawOptions`` to draw its rows by.

        Returns:
          A projection of the same class, shapes and dtypes.

        Raises:
          TypeError: If the projection holds parts that cannot be drawn from a key.
        """
        raise self.no_redraw()

    def no_redraw(self) -> TypeError:
        """Returns the error for a projection that ``draw_like`` cannot draw."""
        return TypeError(
            f"A {type(self).__name__} cannot be redrawn here; draw it again with the key "
            "redraw_key(key, step, interval=...), and use jax.vmap over keys for a stack."
        )


Projection: TypeAlias = Float[ArrayLike, "*stack num_features dim"] | StructuredProjection
