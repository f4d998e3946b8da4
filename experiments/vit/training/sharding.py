"""Sharding of a training run: the mesh, rules for the state, the batch and its microbatches."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.harness.mistakes import UserError
from simrf_jax.models import ViTConfig

# Images are split over data and fsdp, parameters over fsdp and tensor, tokens over sequence. The
# last axes exchange most, and are the nearest neighbors of a pod.
AXES = ("data", "fsdp", "tensor", "sequence")
BATCH = PartitionSpec(("data", "fsdp"))

Tree = TypeVar("Tree")


class Rule(NamedTuple):
    """The sharding of the arrays whose path has a pattern in it.

    Attributes:
      pattern: Regular expression, searched for in a path such as
        ``"params/blocks/0/mlp_in/kernel"``.
      spec: Mesh axes of the last dimensions. Those before, as the depth of stacked blocks, are not
        split.
    """

    pattern: str
    spec: PartitionSpec


# The first that matches counts. The moments of the optimizer have the paths of their parameters in
# theirs, and so their shardings.
RULES = (
    Rule("attention/(query|key|value)/kernel$", PartitionSpec("fsdp", "tensor", None)),
    Rule("attention/(query|key|value)/bias$", PartitionSpec("tensor", None)),
    Rule("attention/out/kernel$", PartitionSpec("tensor", None, "fsdp")),
    Rule("mlp_in/kernel$", PartitionSpec("fsdp", "tensor")),
    Rule("mlp_in/bias$", PartitionSpec("tensor")),
    Rule("mlp_out/kernel$", PartitionSpec("tensor", "fsdp")),
    Rule("patch_embedding/kernel$", PartitionSpec(None, "fsdp")),
    Rule("head/kernel$", PartitionSpec("fsdp", None)),
    Rule("attention_fn/projection$", PartitionSpec("tensor", None, None)),
    Rule("feature_map/value/(query|key)_matrix$", PartitionSpec("tensor", None, None)),
    Rule("feature_map/value/(query_mean|key_mean|variances)$", PartitionSpec("tensor", None)),
    Rule("(bias|scale|position_embedding|class_token)$", PartitionSpec()),
)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh of the axes ``data``, ``fsdp``, ``tensor`` and ``sequence``.

    Args:
      sizes: Size of each axis; -1 for data takes the devices that the others leave.
      devices: Devices of the mesh, by default all there are.

    Raises:
      UserError: If the devices do not suffice, or some would be left over that -1 or other
        processes count on.
    """
    devices = jax.devices() if devices is None else devices
    rest = math.prod(sizes[name] for name in AXES[1:])
    data = len(devices) // rest if sizes["data"] == -1 else sizes["data"]
    shape = (data, *(sizes[name] for name in AXES[1:]))
    size = data * rest
    given = " x ".join(str(sizes[name]) for name in AXES)
    if size > len(devices) or data == 0:
        raise UserError(
            f"config.mesh must take no more than the {len(devices)} devices there are, got {given}."
        )
    if size < len(devices) and (sizes["data"] == -1 or jax.process_count() > 1):
        raise UserError(
            f"config.mesh must take all {len(devices)} devices, with mesh.data=-1 and with several "
            f"processes, got {given}."
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, types, devices=devices[:size])


def check_batch(mesh: Mesh, *, batch_size: int, num_microbatches: int) -> None:
    """Refuses a batch that cannot be split.

    Raises:
      UserError: If a microbatch is no multiple of the devices that share its images.
    """
    images = round_up(1, mesh)
    if batch_size % (num_microbatches * images):
        raise UserError(
            f"config.batch_size must be a multiple of {num_microbatches * images}, the "
            f"{num_microbatches} microbatches times the {images} devices that share the images of "
            f"each, got {batch_size}."
        )


def check_model(mesh: Mesh, model: ViTConfig) -> None:
    """Refuses a model that cannot be split.

    Raises:
      UserError: If the heads, the MLP, the width or the tokens are no multiple of the mesh axes
        they are split over.
    """
    for name, number, axis in (
        ("config.model.width", model.width, "fsdp"),
        ("config.model.num_heads", model.num_heads, "tensor"),
        ("config.model.mlp_dim", model.mlp_dim, "tensor"),
        ("The number of tokens", model.num_tokens, "sequence"),
    ):
        if number % mesh.shape[axis]:
            raise UserError(
                f"{name} must be a multiple of config.mesh.{axis}={mesh.shape[axis]}, got {number}."
            )


def state_shardings(state: Any, mesh: Mesh, rules: tuple[Rule, ...] = RULES) -> Any:
    """Returns the sharding of each array of a state.

    Args:
      state: A pytree of arrays or of ``jax.ShapeDtypeStruct``.
      mesh: Mesh to shard over.
      rules: Rules, of which the first that matches counts. Scalars are replicated.

    Returns:
      A pytree of ``NamedSharding``.

    Raises:
      UserError: If a dimension of an array is not a multiple of the devices to split it over.
      ValueError: If no rule matches an array, or it has fewer dimensions than the rule says.
    """

    def sharding(path: tuple[Any, ...], x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        spec = _spec(name, x.shape, mesh, rules) if x.shape else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map_with_path(sharding, state)


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh, rules: tuple[Rule, ...]) -> PartitionSpec:
    rule = next((rule for rule in rules if re.search(rule.pattern, name)), None)
    if rule is None:
        raise ValueError(f"No sharding rule matches {name} of shape {shape}.")
    missing = len(shape) - len(rule.spec)
    if missing < 0:
        raise ValueError(f"The sharding rule {rule} does not fit {name} of shape {shape}.")
    spec = (None,) * missing + tuple(rule.spec)
    for size, axis in zip(shape, spec, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"{name} of shape {shape} is split as {spec}: {size} must be a multiple of "
                f"config.mesh.{axis}={mesh.shape[axis]}."
            )
    return PartitionSpec(*spec)


def round_up(batch_size: int, mesh: Mesh) -> int:
    """Returns the next multiple of the devices that share the images of a batch."""
    images = mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-batch_size // images) * images


@functools.lru_cache
def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the ascending numbers of the images that the devices of this process need."""
    indices = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,)).values()
    return np.unique([np.arange(batch_size)[index] for index in indices])


def rows_of_host(mesh: Mesh, *batch_sizes: int) -> Callable[[int], np.ndarray]:
    """Returns ``local_rows`` for some batch sizes, which workers call without mesh and devices."""
    return {size: local_rows(mesh, size) for size in batch_sizes}.__getitem__


def global_batch(
    part: Mapping[str, np.ndarray], mesh: Mesh, batch_size: int
) -> dict[str, jax.Array]:
    """Puts a batch on all devices; each process brings its ``local_rows``."""
    rows = local_rows(mesh, batch_size)

    def put(x: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # The sharding has an axis to split.
            start, stop, _ = index[0].indices(batch_size)
            return x[slice(*np.searchsorted(rows, (start, stop)))]

        shape = (batch_size, *x.shape[1:])
        return jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH), shard)

    return {name: put(x) for name, x in part.items()}


def mean_over_microbatches(
    function: Callable[[dict[str, jax.Array], jax.Array], Tree],
    batch: dict[str, jax.Array],
    keys: jax.Array,
) -> Tree:
    """Averages ``function(microbatch, key)`` over equal parts of a batch, one after the other.

    Args:
      function: Function of a microbatch and a PRNG key that returns arrays.
      batch: Arrays ``[batch, ...]``.
      keys: PRNG keys, one for each microbatch.
    """
    count = len(keys)
    if count == 1:
        return function(batch, keys[0])

    def split(x: jax.Array) -> jax.Array:
        # Every device has a part of every microbatch, without sending images.
        x = jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(None, *BATCH))

    def add(total: Tree, given: tuple[dict[str, jax.Array], jax.Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, function(*given)), None

    parts = (jax.tree.map(split, batch), keys)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *one))
    total = jax.lax.scan(add, zeros, parts)[0]
    return jax.tree.map(lambda x: x / count, total)
