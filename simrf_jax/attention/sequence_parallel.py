"""Which mesh axes shard the length, and the call of attention on each device's part of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from simrf_jax.attention.across_devices import Axes
from simrf_jax.attention.masks import per_key

# Where the length is in the arguments that have it.
LENGTH = {"query": -3, "key": -3, "value": -3, "mask": -1, "bias": -1, "segment_ids": -1}


def attend_in_parts(
    attend: Callable[..., jax.Array],
    sequence_axis: str | Axes | None,
    *,
    in_order: bool,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    **options: Any,
) -> jax.Array:
    """Calls ``attend(query=..., ...)`` with the part of the length that each device has.

    Args:
      attend: Attention; given ``axes``, that of a part inside ``shard_map``, with the mesh axes
        that shard the keys.
      sequence_axis: As ``random_feature_attention``.
      in_order: Whether the positions of queries and keys belong together.
      query: As ``random_feature_attention``.
      key: Likewise.
      value: Likewise.
      **options: Likewise, what of its arguments may be arrays.
    """
    whole = {"query": query, "key": key, "value": value}
    axes = _named(sequence_axis) or _of_types(whole if in_order else {"key": key, "value": value})
    arguments = whole | {name: x for name, x in options.items() if x is not None}
    if not axes:
        return attend(**arguments)
    _check(attend, arguments)
    if in_order and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            "Causal attention over a sharded length takes as many keys as queries, got "
            f"{query.shape[-3]} queries and {key.shape[-3]} keys."
        )
    if key.shape[-3] == 0:
        return attend(**arguments)
    if _are_bound(axes):
        return _attend_here(attend, axes, axes, arguments)
    # Few queries may be on all devices.
    split = in_order or sequence_axis is not None or set(axes) & set(_of_types({"query": query}))
    return _in_shard_map(attend, axes, axes if split else (), arguments)


def _named(sequence_axis: str | Axes | None) -> Axes:
    axes = (sequence_axis,) if isinstance(sequence_axis, str) else sequence_axis
    if axes is not None and not (
        isinstance(axes, tuple) and axes and all(isinstance(axis, str) for axis in axes)
    ):
        raise TypeError(
            f"sequence_axis must be the name of a mesh axis, or a tuple of names, got {axes!r}."
        )
    return axes or ()


def _of_types(arrays: dict[str, jax.Array]) -> Axes:
    """The explicit mesh axes that shard the length of the first array for which any do."""
    for name, x in arrays.items():
        spec = tuple(jax.typeof(x).sharding.spec)
        axes = spec[LENGTH[name]] if len(spec) >= -LENGTH[name] else None
        if axes:
            return axes if isinstance(axes, tuple) else (axes,)
    return ()


def _check(attend: Callable[..., jax.Array], arguments: dict[str, Any]) -> None:
    """Raises what attention says of the whole arrays, of which the devices see parts."""
    known = {name: x for name, x in arguments.items() if not isinstance(x, jax.Array)}
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in arguments.items()
        if name not in known
    }
    jax.eval_shape(functools.partial(attend, **known), **shapes)


def _are_bound(axes: Axes) -> bool:
    """Whether this is inside ``shard_map`` already."""
    try:
        jax.lax.axis_size(axes)
    except NameError:
        return False
    return True


def _attend_here(
    attend: Callable[..., jax.Array], axes: Axes, query_axes: Axes, arguments: dict[str, Any]
) -> jax.Array:
    """Attention of this device's part, to which lengths are counted from its first position."""
    offsets = {
        "query_seq_lengths": _first_position(arguments["query"], query_axes),
        "key_value_seq_lengths": _first_position(arguments["key"], axes),
    }
    counted = {name: jnp.asarray(arguments[name]) - offsets[name] for name in offsets if name in arguments}
    return attend(**arguments | counted, axes=axes)


def _first_position(x: jax.Array, axes: Axes) -> ArrayLike:
    return jax.lax.axis_index(axes) * x.shape[-3] if axes else 0


def _in_shard_map(
    attend: Callable[..., jax.Array], axes: Axes, query_axes: Axes, arguments: dict[str, Any]
) -> jax.Array:
    mesh = _mesh(axes, arguments)
    query, key = arguments["query"], arguments["key"]
    size = math.prod(mesh.shape[axis] for axis in axes)
    lengths = {"queries": query.shape[-3] if query_axes else 0, "keys": key.shape[-3]}
    for name, length in lengths.items():
        if length % size:
            raise ValueError(
                f"The length must be a multiple of the {size} devices of {axes}, got {length} "
                f"{name}."
            )
    target = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    for name in ("mask", "bias"):
        if name in arguments:
            # With the axis of keys, in which some have but one.
            x = per_key(name, arguments[name], target)
            arguments = arguments | {name: jnp.expand_dims(x, -2)}
    arguments = {
        name: x if name == "projection" else jnp.asarray(x) for name, x in arguments.items()
    }

    def spec(name: str) -> PartitionSpec:
        if name not in LENGTH or (name == "query" and not query_axes):
            return PartitionSpec()
        return PartitionSpec(*(None,) * (arguments[name].ndim + LENGTH[name]), axes)

    def over_devices(arguments: dict[str, Any]) -> jax.Array:
        return jax.shard_map(
            functools.partial(_attend_here, attend, axes, query_axes),
            mesh=_mesh(axes, arguments),
            in_specs=({name: spec(name) for name in arguments},),
            out_specs=spec("query"),
            axis_names=set(axes),
        )(arguments)

    if AxisType.Explicit in mesh.axis_types:
        # Explicit axes of batch and heads beside manual ones make XLA gather (jax 0.10.2).
        of_output = list(jax.typeof(query).sharding.spec)
        if query_axes:
            of_output[-3] = query_axes
        sharding = NamedSharding(mesh, PartitionSpec(*of_output))
        over_devices = jax.sharding.auto_axes(over_devices, out_sharding=sharding)
    return over_devices(arguments)


def _mesh(axes: Axes, arguments: dict[str, Any]) -> AbstractMesh:
    """That of the inputs, or of the context."""
    given = [jax.typeof(arguments[name]).sharding.mesh for name in ("query", "key", "value")]
    meshes = [mesh for mesh in (*given, jax.sharding.get_abstract_mesh()) if not mesh.empty]
    if not meshes:
        raise ValueError(
            f"sequence_axis {axes} must name axes of a mesh: of that over which the inputs are "
            "sharded, of the context (jax.set_mesh), or of an enclosing jax.shard_map; got none."
        )
    if unknown := set(axes) - set(meshes[0].axis_names):
        raise ValueError(
            f"sequence_axis must be among the axes {meshes[0].axis_names} of the mesh, got "
            f"{sorted(unknown)}."
        )
    return meshes[0]
