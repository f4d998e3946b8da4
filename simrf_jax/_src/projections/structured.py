"""Interface of projections that are not one array."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from simrf_jax._src import one_line


class StructuredProjection(abc.ABC):
    """Pytree that replaces an array ``[..., num_features, dim]``.

    Feature maps and attention read its shape like that of an array. Leading axes that all its
    leaves share make it a stack of projections, as under ``jax.vmap``.

    Attributes:
      expected: Description of an argument that must be of this class, for errors.
    """

    expected: ClassVar[str]

    @classmethod
    def of(cls, projection: Any) -> Any:
        """Returns a projection of this class unchanged.

        Args:
          projection: W.

        Raises:
          TypeError: If the projection is anything else.
        """
        if isinstance(projection, cls):
            return projection
        found = "an array" if isinstance(projection, jax.Array) else type(projection).__name__
        if projection is None:
            found = "None (a Flax adapter draws it if it has num_features)"
        raise TypeError(f"projection must be {cls.expected}, got {found}.")

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that it replaces, ``[..., num_features, dim]``."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Floating type of its leaves."""

    @property
    def ndim(self) -> int:
        """Number of axes of the array that it replaces."""
        return len(self.shape)

    @property
    def is_dense(self) -> bool:
        """True if the rows are one array, which a feature map can multiply by matrices."""
        return False

    # ``draw_options`` has type Any because importing DrawOptions here would be circular.
    def redraw(self, key: Key[Array, ""], draw_options: Any = None) -> StructuredProjection:
        """Draws another projection with the structure, shapes and dtypes of this one.

        Args:
          key: A typed PRNG key.
          draw_options: ``DrawOptions`` of the draw, by default those of the projection.

        Raises:
          TypeError: If the projection holds parts that cannot be drawn from a key.
        """
        raise self.no_redraw()

    def no_redraw(self) -> TypeError:
        """Returns the error for a projection that ``redraw`` cannot draw."""
        return TypeError(
            f"A {type(self).__name__} cannot be redrawn here; draw it again with the key "
            "redraw_key(key, step, interval=...), and use jax.vmap over keys for a stack."
        )


ProjectionLike: TypeAlias = Float[ArrayLike, "*stack num_features dim"] | StructuredProjection


def is_structured(node: Any) -> bool:
    """Returns True for a projection that is not one array."""
    return isinstance(node, StructuredProjection)
