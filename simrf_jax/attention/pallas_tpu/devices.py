"""Where the kernels run: on which platform, and on the devices of a mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from simrf_jax.attention.inputs.arguments import Arguments, Axes
from simrf_jax.attention.pallas_tpu.heads import Refs
from simrf_jax.attention.pallas_tpu.operands import shape_of

# ``forward`` or ``backward``.
Kernel: TypeAlias = Callable[..., Any]


class MeshAxes(NamedTuple):
    """The mesh axes that shard the batch and the heads."""

    batch: Axes = ()
    heads: Axes = ()

    def reason_against(self, arguments: Arguments) -> str | None:
        """Returns why the axes cannot shard the arrays, or None if they can."""
        mesh = mesh_of(arguments)
        kinds = _kinds(mesh)
        batch, *_ = (*arguments.query.shape[:-3], 1)
        num_key_heads = arguments.key.shape[-2]
        for name, axes, size in (
            ("batch_axis", self.batch, batch),
            ("head_axis", self.heads, num_key_heads),
        ):
            if any(kinds.get(axis) != AxisType.Auto for axis in axes):
                return f"{name} is {axes}, which are not axes of type Auto of a mesh {kinds}"
            devices = math.prod(mesh.shape[axis] for axis in axes)
            if size % devices:
                return f"{name} is {axes}, of {devices} devices, which do not divide {size}"
        return None


def on_platform(kernel: Kernel, refs: Refs, *arrays: Any) -> Any:
    """Calls a kernel with its sizes; elsewhere than on a TPU, Pallas interprets it."""

    def call(*operands: Any, interpret: bool) -> Any:
        return kernel(shape_of(operands[0], interpret=interpret), *operands)

    return jax.lax.platform_dependent(
        refs,
        *arrays,
        tpu=functools.partial(call, interpret=False),
        default=functools.partial(call, interpret=True),
    )


def over_devices(kernel: Kernel, axes: MeshAxes, *arrays: Any) -> Any:
    """Calls a kernel on each device with its part of the batch and the heads.

    Args:
      kernel: Function of the arrays whose results have the axes of batch and heads first.
      axes: Mesh axes. Without any, the arrays are those of one device.
      arrays: Arrays ``[batch, heads, ...]`` of tokens, ``[heads, ...]`` of rows, and others; axes
        of size 1 are not split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # XLA refuses a kernel over axes of type Auto, also over those that shard nothing.
    automatic = {name for name in mesh.axis_names if _kinds(mesh)[name] == AxisType.Auto}
    if not automatic:
        return kernel(*arrays)
    specs = jax.tree.map(functools.partial(_spec, axes), arrays)
    out = PartitionSpec(axes.batch or None, axes.heads or None)
    # A kernel does not say over which axes its results vary.
    return jax.shard_map(
        kernel, in_specs=specs, out_specs=out, axis_names=automatic, check_vma=False
    )(*arrays)


def _kinds(mesh: AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _spec(axes: MeshAxes, x: jax.Array) -> PartitionSpec:
    along = {4: (axes.batch, axes.heads), 3: (axes.heads,)}.get(x.ndim, ())
    sizes = zip(along, x.shape, strict=False)
    return PartitionSpec(*(names if names and size > 1 else None for names, size in sizes))


def mesh_of(arguments: Arguments) -> AbstractMesh:
    """Returns the mesh of the context, or else of the queries; it may be empty."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.typeof(arguments.query).sharding.mesh if mesh.empty else mesh


def runs_alone(arguments: Arguments, axes: MeshAxes) -> bool:
    """Returns whether a kernel gets the tokens of one device, as far as can be known here.

    XLA cannot split a kernel. It would give each device the tokens of all.
    """
    mesh = mesh_of(arguments)
    if mesh.empty:
        return jax.device_count() == 1
    named = {*axes.batch, *axes.heads}
    return all(
        kind == AxisType.Manual or size == 1 or name in named
        for name, kind, size in zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    )
