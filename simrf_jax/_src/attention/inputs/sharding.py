"""Sequence lengths that mesh axes shard: which axes, and the part of the call on a device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, Shaped

from simrf_jax._src.attention.inputs.call import Axes, Call, axes_of_length, shape_of_logits
from simrf_jax._src.attention.inputs.masks import per_key

# The position of the length among the axes of each argument that has it.
LENGTH = {"query": -3, "key": -3, "value": -3, "mask": -1, "bias": -1, "segment_ids": -1}


class MeshAxes(NamedTuple):
    """The mesh axes that shard the batch and the heads."""

    batch: Axes = ()
    heads: Axes = ()

    def reason_against(self, call: Call) -> str | None:
        """Returns why the axes cannot shard the arrays, or None if they can."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = kinds_of_axes(mesh)
        batch, *_ = (*call.query.shape[:-3], 1)
        num_key_heads = call.key.shape[-2]
        for name, axes, size in (
            ("batch_axis", self.batch, batch),
            ("head_axis", self.heads, num_key_heads),
        ):
            if any(kinds.get(axis) != AxisType.Auto for axis in axes):
                return f"{name} is {axes}, no axes of type Auto of jax.set_mesh's mesh {kinds}"
            devices = math.prod(mesh.shape[axis] for axis in axes)
            if size % devices:
                return f"{name} is {axes}, of {devices} devices, which do not divide {size}"
        return None


def kinds_of_axes(mesh: AbstractMesh) -> dict[str, AxisType]:
    """Returns the type of each axis of a mesh."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


class Shards(NamedTuple):
    """The mesh axes that shard the lengths of one call.

    Attributes:
      axes: Axes that shard the keys; outside ``shard_map``, without axes of one device.
      query_axes: Axes that shard the queries; none if each device has all of them.
      is_inside: True if the call is inside ``shard_map`` over these axes already.
    """

    axes: Axes
    query_axes: Axes
    is_inside: bool

    def part(self, call: Call) -> Call:
        """Returns a device's call with lengths that count from its first position."""
        return dataclasses.replace(
            call,
            query_seq_lengths=_from_first(call.query_seq_lengths, call.query, self.query_axes),
            key_value_seq_lengths=_from_first(call.key_value_seq_lengths, call.key, self.axes),
        )


def find_shards(call: Call, axes: Axes, *, in_order: bool) -> Shards:
    """Returns the mesh axes that shard the lengths.

    Args:
      call: The call.
      axes: Axes that the caller named; none for the explicit axes of the arrays.
      in_order: True if queries and keys must be aligned by position, as in causal attention.

    Raises:
      ValueError: If they must be aligned but differ in number, or if an axis belongs to no mesh.
    """
    named = bool(axes)
    axes = axes or call.explicit_axes(in_order=in_order)
    is_inside = are_bound(axes)
    split = is_inside or in_order or named or set(axes) & set(axes_of_length(call.query))
    if not is_inside:
        # XLA cannot compile a sum over an axis of one device next to other axes (jax 0.10.2).
        mesh = _mesh(axes, call)
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    query_length, key_length = call.query.shape[-3], call.key.shape[-3]
    if axes and in_order and query_length != key_length:
        raise ValueError(
            "Causal, packed or banded attention over a sharded length needs equal numbers of "
            f"queries and keys, got {query_length} queries and {key_length} keys."
        )
    return Shards(axes, axes if split else (), is_inside)


def check_whole(attend: Callable[..., object], call: Call, *replicated: Any) -> None:
    """Traces ``attend`` with whole shapes, so that its errors name the shapes the caller knows."""
    shapes: dict[str, Any] = {
        field.name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for field in dataclasses.fields(call)
        # The other fields have shapes that do not matter, or values that are checked.
        if isinstance(x := getattr(call, field.name), jax.Array) and field.name != "scale"
    }

    def with_shapes(shapes: dict[str, Any], *replicated: Any) -> object:
        return attend(dataclasses.replace(call, **shapes), *replicated)

    jax.eval_shape(
        with_shapes,
        shapes,
        *jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), replicated),
    )


def over_devices(
    attend: Callable[..., Float[Array, "*batch T N D"]],
    shards: Shards,
    call: Call,
    *replicated: Any,
) -> Float[Array, "*batch T N D"]:
    """Calls ``attend`` with the part of the length that each device has.

    Args:
      attend: Attention of one part, a function of a call and of the replicated values.
      shards: Mesh axes that shard the lengths.
      call: The whole call, or that of the device inside ``shard_map``.
      *replicated: Values that all devices have, such as W and the feature map.
    """
    if shards.is_inside:
        return attend(call, *replicated)
    mesh = _mesh(shards.axes, call)
    for name in ("query", "key", "value"):
        elsewhere = list(jax.typeof(getattr(call, name)).sharding.spec)
        elsewhere[LENGTH[name]] = None
        if set(shards.axes) & set(jax.tree.leaves(elsewhere)):
            raise ValueError(
                f"sequence_axis must shard the length, got {_quoted(shards.axes)}, which shards "
                f"another axis of {name}."
            )
    query, key = call.query, call.key
    _check_divisible(mesh, shards.query_axes, "queries", query.shape[-3])
    _check_divisible(mesh, shards.axes, "keys", key.shape[-3])
    logits = shape_of_logits(query, key)
    # Masks get the length of the keys, even where their axis of keys has size 1.
    rows: dict[str, Any] = {
        name: jnp.expand_dims(per_key(jnp.asarray(x), logits), -2)
        for name, x in (("mask", call.mask), ("bias", call.bias))
        if x is not None
    }
    call = jax.tree.map(jnp.asarray, dataclasses.replace(call, **rows))
    specs = _specs(call, shards)

    def mapped(call: Call, *replicated: Any) -> Float[Array, "*batch T N D"]:
        if not shards.axes:
            return attend(call, *replicated)
        return jax.shard_map(
            attend,
            mesh=_mesh(shards.axes, call),
            in_specs=(specs, *(PartitionSpec() for _ in replicated)),
            out_specs=specs.query,
            axis_names=set(shards.axes),
        )(call, *replicated)

    types = kinds_of_axes(mesh)
    if AxisType.Explicit in types.values():
        # Next to manual axes, explicit axes of batch and heads make XLA gather (jax 0.10.2).
        of_output = list(jax.typeof(query).sharding.spec)
        # The type of an array does not name axes of type Auto.
        explicit = tuple(axis for axis in shards.query_axes if types[axis] == AxisType.Explicit)
        of_output[-3] = explicit or of_output[-3]
        sharding = NamedSharding(mesh, PartitionSpec(*of_output))
        # An enclosing shard_map over other axes keeps its own.
        axes = tuple(axis for axis, kind in types.items() if kind == AxisType.Explicit)
        mapped = jax.sharding.auto_axes(mapped, axes=axes, out_sharding=sharding)
    return mapped(call, *jax.tree.map(jnp.asarray, replicated))


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
    # Signed, because lengths that end before this part become negative.
    return lengths.astype(jnp.int32) - first


def are_bound(axes: Axes) -> bool:
    """Returns whether the caller is already inside ``shard_map`` over the axes."""
    try:
        jax.lax.axis_size(axes)
    except NameError:
        return False
    return True


def _specs(call: Call, shards: Shards) -> Call:
    """Returns a call whose fields are the shardings of the arguments."""

    def spec(path: tuple[GetAttrKey], x: Shaped[Array, " ..."]) -> PartitionSpec:
        name = path[0].name
        axes = shards.query_axes if name == "query" else shards.axes
        if name not in LENGTH or not axes:
            return PartitionSpec()
        return PartitionSpec(*(None,) * (x.ndim + LENGTH[name]), axes)

    return jax.tree.map_with_path(spec, call)


def _mesh(axes: Axes, call: Call) -> AbstractMesh:
    """Returns the mesh of the arrays, or of the context."""
    given = [jax.typeof(x).sharding.mesh for x in (call.query, call.key, call.value)]
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
