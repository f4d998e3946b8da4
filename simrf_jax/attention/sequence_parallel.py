"""Which mesh axes shard the length, and the call of attention on each device's part of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from simrf_jax import checks
from simrf_jax.attention.across_devices import Axes
from simrf_jax.attention.masks import per_key

# Where the length is in the arguments that have it.
LENGTH = {"query": -3, "key": -3, "value": -3, "mask": -1, "bias": -1, "segment_ids": -1}
Attend = Callable[..., jax.Array]


def attend_in_parts(
    attend: Attend,
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
      attend: Attention. Given ``axes``, it is that of a part inside ``shard_map``; these mesh axes
        shard the keys.
      sequence_axis: As ``random_feature_attention``.
      in_order: Whether the positions of queries and keys belong together, as in causal attention.
      query: As ``random_feature_attention``.
      key: Likewise.
      value: Likewise.
      **options: Likewise, those of its arguments that may be arrays.
    """
    shared = {"key": key, "value": value}
    arguments = {"query": query, **shared, **{n: x for n, x in options.items() if x is not None}}
    axes = checks.axis_names("sequence_axis", sequence_axis)
    # Bidirectional queries are free to be anywhere.
    axes = axes or explicit_axes(shared | {"query": query} if in_order else shared)
    if not axes:
        return attend(**arguments)
    _check(attend, arguments)
    if in_order and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            "Causal, packed or banded attention over a sharded length takes as many keys as "
            f"queries, got {query.shape[-3]} queries and {key.shape[-3]} keys."
        )
    if key.shape[-3] == 0:
        return attend(**arguments)
    if _are_bound(axes):
        return _attend_to_part(attend, axes, axes, arguments)
    split = (
        in_order or sequence_axis is not None or set(axes) & set(explicit_axes({"query": query}))
    )
    return _in_shard_map(attend, axes, axes if split else (), arguments)


def explicit_axes(arrays: dict[str, jax.Array]) -> Axes:
    """The explicit mesh axes that shard the length of the first array for which any do."""
    for name, x in arrays.items():
        spec = tuple(jax.typeof(x).sharding.spec)
        axes = spec[LENGTH[name]] if len(spec) >= -LENGTH[name] else None
        if axes:
            return axes if isinstance(axes, tuple) else (axes,)
    return ()


def _are_bound(axes: Axes) -> bool:
    """Whether this is inside ``shard_map`` already."""
    try:
        jax.lax.axis_size(axes)
    except NameError:
        return False
    return True


def _check(attend: Attend, arguments: dict[str, Any]) -> None:
    """Raises what attention says of the whole arrays: of parts it would tell other shapes."""
    # Known values count too: those of NumPy, and that of the scale.
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in arguments.items()
        if isinstance(x, jax.Array) and name != "scale"
    }
    known = {name: x for name, x in arguments.items() if name not in shapes}
    jax.eval_shape(functools.partial(attend, **known), **shapes)


def _attend_to_part(
    attend: Attend, axes: Axes, query_axes: Axes, arguments: dict[str, Any]
) -> jax.Array:
    """Attention of one device, where lengths count from the first position that it has."""
    arguments = dict(arguments)
    for name, x, split in (
        ("query_seq_lengths", arguments["query"], query_axes),
        ("key_value_seq_lengths", arguments["key"], axes),
    ):
        if split and name in arguments:
            first = jax.lax.axis_index(split) * x.shape[-3]
            # Lengths that end before may be of an unsigned type.
            arguments[name] = jnp.asarray(arguments[name]).astype(jnp.int32) - first
    return attend(**arguments, axes=axes)


def _in_shard_map(
    attend: Attend, axes: Axes, query_axes: Axes, arguments: dict[str, Any]
) -> jax.Array:
    """Attention of arrays that are whole to the caller."""
    mesh = _mesh(axes, arguments)
    query, key = arguments["query"], arguments["key"]
    for name in ("query", "key", "value"):
        elsewhere = list(jax.typeof(arguments[name]).sharding.spec)
        elsewhere[LENGTH[name]] = None
        if set(axes) & set(jax.tree.leaves(elsewhere)):
            raise ValueError(
                f"sequence_axis must shard the length, got {_quoted(axes)}, which shards another "
                f"axis of {name}."
            )
    _check_divisible(mesh, query_axes, "queries", query.shape[-3])
    _check_divisible(mesh, axes, "keys", key.shape[-3])
    logits = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    for name in {"mask", "bias"} & set(arguments):
        # As long as the keys; a square one of NumPy has but one row that counts.
        row = per_key(name, arguments[name], logits)
        arguments = arguments | {name: jnp.expand_dims(row, -2)}
    arguments = jax.tree.map(jnp.asarray, arguments)

    def spec(name: str) -> PartitionSpec:
        if name not in LENGTH or (name == "query" and not query_axes):
            return PartitionSpec()
        return PartitionSpec(*(None,) * (arguments[name].ndim + LENGTH[name]), axes)

    def over_devices(arguments: dict[str, Any]) -> jax.Array:
        return jax.shard_map(
            functools.partial(_attend_to_part, attend, axes, query_axes),
            mesh=_mesh(axes, arguments),
            in_specs=({name: spec(name) for name in arguments},),
            out_specs=spec("query"),
            axis_names=set(axes),
        )(arguments)

    if AxisType.Explicit in mesh.axis_types:
        # Beside manual axes, explicit ones of batch and heads make XLA gather (jax 0.10.2).
        of_output = list(jax.typeof(query).sharding.spec)
        of_output[-3] = query_axes or of_output[-3]
        sharding = NamedSharding(mesh, PartitionSpec(*of_output))
        over_devices = jax.sharding.auto_axes(over_devices, out_sharding=sharding)
    return over_devices(arguments)


def _mesh(axes: Axes, arguments: dict[str, Any]) -> AbstractMesh:
    """That of the inputs, or of the context."""
    given = [jax.typeof(arguments[name]).sharding.mesh for name in ("query", "key", "value")]
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
