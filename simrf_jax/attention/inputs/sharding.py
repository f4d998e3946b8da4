"""Sequence lengths that mesh axes shard: which axes, and the part of the arguments on a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, Shaped

from simrf_jax.attention.inputs.arguments import Arguments, Axes, axes_of_length, shape_of_logits
from simrf_jax.attention.inputs.masks import per_key

# The position of the length among the axes of each argument that has it.
LENGTH = {"query": -3, "key": -3, "value": -3, "mask": -1, "bias": -1, "segment_ids": -1}

# What all devices have alike, beside the arguments: W and the feature map, or None.
Heads = TypeVar("Heads")


class Shards(NamedTuple):
    """The mesh axes that shard the lengths of one call.

    Attributes:
      axes: Axes that shard the keys, those of one device left out outside ``shard_map``.
      query_axes: Axes that shard the queries; none if each device has all of them.
      is_inside: True if the call is inside ``shard_map`` over these axes already.
    """

    axes: Axes
    query_axes: Axes
    is_inside: bool

    def part(self, arguments: Arguments) -> Arguments:
        """Returns a device's arguments with lengths that count from its first position."""
        return dataclasses.replace(
            arguments,
            query_seq_lengths=_from_first(
                arguments.query_seq_lengths, arguments.query, self.query_axes
            ),
            key_value_seq_lengths=_from_first(
                arguments.key_value_seq_lengths, arguments.key, self.axes
            ),
        )


def find_shards(arguments: Arguments, axes: Axes, *, in_order: bool) -> Shards:
    """Returns the mesh axes that shard the lengths.

    Args:
      arguments: Arguments of the call.
      axes: Axes that the caller named; none for the explicit axes of the arrays.
      in_order: True if the positions of queries and keys belong together, as in causal attention.

    Raises:
      ValueError: If they do, and there are not as many keys as queries; or if an axis is of no
        mesh.
    """
    named = bool(axes)
    axes = axes or arguments.explicit_axes(in_order=in_order)
    is_inside = are_bound(axes)
    split = is_inside or in_order or named or set(axes) & set(axes_of_length(arguments.query))
    if not is_inside:
        # Over an axis of one device XLA cannot compile a sum beside other axes (jax 0.10.2).
        mesh = _mesh(axes, arguments)
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    query_length, key_length = arguments.query.shape[-3], arguments.key.shape[-3]
    if axes and in_order and query_length != key_length:
        raise ValueError(
            "Causal, packed or banded attention over a sharded length takes as many keys as "
            f"queries, got {query_length} queries and {key_length} keys."
        )
    return Shards(axes, axes if split else (), is_inside)


def check_whole(
    attend: Callable[[Arguments, Heads], object], arguments: Arguments, heads: Heads
) -> None:
    """Traces ``attend`` with whole shapes, because errors of parts would tell other shapes."""
    shapes = {
        field.name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for field in dataclasses.fields(arguments)
        # The others have shapes that count for nothing, or whose values are checked.
        if isinstance(x := getattr(arguments, field.name), jax.Array) and field.name != "scale"
    }

    def with_shapes(shapes: dict[str, Shaped[Array, " ..."]], heads: Heads) -> object:
        return attend(dataclasses.replace(arguments, **shapes), heads)

    of_heads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), heads)
    jax.eval_shape(with_shapes, shapes, of_heads)


def over_devices(
    attend: Callable[[Arguments, Heads], Float[Array, "*batch T N D"]],
    shards: Shards,
    arguments: Arguments,
    heads: Heads,
) -> Float[Array, "*batch T N D"]:
    """Calls ``attend`` with the part of the length that each device has.

    Args:
      attend: Attention of one part.
      shards: Mesh axes that shard the lengths.
      arguments: Whole arguments, or those of the device inside ``shard_map``.
      heads: W and the feature map, which are the same on all devices, or None.
    """
    if shards.is_inside:
        return attend(arguments, heads)
    mesh = _mesh(shards.axes, arguments)
    for name in ("query", "key", "value"):
        elsewhere = list(jax.typeof(getattr(arguments, name)).sharding.spec)
        elsewhere[LENGTH[name]] = None
        if set(shards.axes) & set(jax.tree.leaves(elsewhere)):
            raise ValueError(
                f"sequence_axis must shard the length, got {_quoted(shards.axes)}, which shards "
                f"another axis of {name}."
            )
    query, key = arguments.query, arguments.key
    _check_divisible(mesh, shards.query_axes, "queries", query.shape[-3])
    _check_divisible(mesh, shards.axes, "keys", key.shape[-3])
    logits = shape_of_logits(query, key)
    # Masks as long as the keys, also where they have an axis of size 1 for these.
    rows = {
        name: jnp.expand_dims(per_key(jnp.asarray(x), logits), -2)
        for name, x in (("mask", arguments.mask), ("bias", arguments.bias))
        if x is not None
    }
    arguments = jax.tree.map(jnp.asarray, dataclasses.replace(arguments, **rows))
    specs = _specs(arguments, shards)

    def mapped(arguments: Arguments, heads: Heads) -> Float[Array, "*batch T N D"]:
        if not shards.axes:
            return attend(arguments, heads)
        return jax.shard_map(
            attend,
            mesh=_mesh(shards.axes, arguments),
            in_specs=(specs, PartitionSpec()),
            out_specs=specs.query,
            axis_names=set(shards.axes),
        )(arguments, heads)

    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit in types.values():
        # Beside manual axes, explicit ones of batch and heads make XLA gather (jax 0.10.2).
        of_output = list(jax.typeof(query).sharding.spec)
        # The type of an array names no axes of type Auto.
        explicit = tuple(axis for axis in shards.query_axes if types[axis] == AxisType.Explicit)
        of_output[-3] = explicit or of_output[-3]
        sharding = NamedSharding(mesh, PartitionSpec(*of_output))
        # An enclosing shard_map over other axes keeps those.
        axes = tuple(axis for axis, kind in types.items() if kind == AxisType.Explicit)
        mapped = jax.sharding.auto_axes(mapped, axes=axes, out_sharding=sharding)
    return mapped(arguments, jax.tree.map(jnp.asarray, heads))


def from_earlier_device(x: Shaped[Array, "*shape"], axes: Axes, by: int) -> Shaped[Array, "*shape"]:
    """Returns the value held ``by`` devices earlier, wrapping around."""
    size = jax.lax.axis_size(axes)
    if size == 1:
        return x
    return jax.lax.ppermute(x, axes, [(i, (i + by) % size) for i in range(size)])


def _from_first(
    lengths: Shaped[Array, "*lengths"] | None,
    x: Float[Array, "*batch length heads dim"],
    axes: Axes,
) -> Shaped[Array, "*lengths"] | None:
    """Returns sequence lengths that count from the first position of a device's part."""
    if lengths is None or not axes:
        return lengths
    first = jax.lax.axis_index(axes) * x.shape[-3]
    # Lengths that end before may be of an unsigned type.
    return lengths.astype(jnp.int32) - first


def are_bound(axes: Axes) -> bool:
    """Returns whether this is inside ``shard_map`` over the axes already."""
    try:
        jax.lax.axis_size(axes)
    except NameError:
        return False
    return True


def _specs(arguments: Arguments, shards: Shards) -> Arguments:
    """Returns the sharding of each argument, in the place of the argument."""

    def spec(path: tuple[GetAttrKey], x: Shaped[Array, " ..."]) -> PartitionSpec:
        name = path[0].name
        axes = shards.query_axes if name == "query" else shards.axes
        if name not in LENGTH or not axes:
            return PartitionSpec()
        return PartitionSpec(*(None,) * (x.ndim + LENGTH[name]), axes)

    return jax.tree.map_with_path(spec, arguments)


def _mesh(axes: Axes, arguments: Arguments) -> AbstractMesh:
    """Returns the mesh of the arrays, or of the context."""
    given = [jax.typeof(x).sharding.mesh for x in (arguments.query, arguments.key, arguments.value)]
    meshes = [mesh for mesh in (*given, jax.sharding.get_abstract_mesh()) if not mesh.empty]
    if not meshes:
        raise ValueError(
            "sequence_axis must be an axis of a mesh: of the inputs', of that of jax.set_mesh, or "
            f"of an enclosing jax.shard_map, got {_quoted(axes)} and no mesh."
        )
    if not set(axes) <= set(meshes[0].axis_names):
        raise ValueError(
            f"sequence_axis must be among the axes {meshes[0].axis_names} of the mesh, got "
            f"{_quoted(axes)}."
        )
    return meshes[0]


def _check_divisible(mesh: AbstractMesh, axes: Axes, name: str, length: int) -> None:
    size = math.prod(mesh.shape[axis] for axis in axes)
    if length % size:
        raise ValueError(
            f"The length must be a multiple of the {size} devices of {_quoted(axes)}, got "
            f"{length} {name}."
        )


def _quoted(axes: Axes) -> str:
    return " and ".join(map(repr, axes))
