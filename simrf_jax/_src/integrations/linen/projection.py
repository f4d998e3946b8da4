"""The box that holds W in Linen variables, together with the options of its draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from flax.core import meta

from simrf_jax._src import one_line
from simrf_jax._src.features import BipolarProjection
from simrf_jax._src.projections import DrawOptions, ProjectionLike, as_projection


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RandomProjection(meta.AxisMetadata[Any]):
    """A box in the collection ``random_features`` that holds W and the options of its draw.

    Flax unboxes W when a module reads the variable, as it does for ``nn.Partitioned``;
    ``nn.meta.unbox(variables)`` unboxes all arrays. The box has the shape, dtype and items of W,
    and JAX and NumPy functions accept it as an array. Bytes and state dicts of
    ``flax.serialization`` hold only the array. Orbax names the array ``projection.value``: restore
    a checkpoint into variables from ``init``.

    Attributes:
      value: W, ``[..., num_features, dim]``, an array or a ``Projection``.
      draw_options: Options with which W was drawn; ``redraw_projections`` reads them.
    """

    value: Any
    draw_options: DrawOptions = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W."""
        return self.value.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Floating type of W."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """Number of axes of W."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)

    def unbox(self) -> Any:
        """Returns W."""
        return self.value

    def replace_boxed(self, val: Any) -> RandomProjection:
        """Returns a box with another W."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> RandomProjection:
        """Returns the same box: all W of a stack share the options."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> RandomProjection:
        """Returns the same box: all W of a stack share the options."""
        del index, params
        return self

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the value and metadata of an NNX variable, for ``nnx.bridge``."""
        return {"value": self.value, "draw_options": self.draw_options}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> RandomProjection:
        """Returns the box of an NNX variable, for ``nnx.bridge``."""
        return cls(metadata["value"], metadata["draw_options"])


def _state_dict(box: RandomProjection) -> Any:
    return serialization.to_state_dict(box.value)


def _from_state_dict(box: RandomProjection, state: Any) -> RandomProjection:
    return box.replace_boxed(serialization.from_state_dict(box.value, state))


serialization.register_serialization_state(RandomProjection, _state_dict, _from_state_dict)


def boxed(projection: ProjectionLike | None, options: DrawOptions) -> Any:
    """Returns W in a box, unless it is a ``BipolarProjection``, which records its own draw."""
    if projection is None or isinstance(projection, BipolarProjection):
        return projection
    return RandomProjection(as_projection(projection), options)
