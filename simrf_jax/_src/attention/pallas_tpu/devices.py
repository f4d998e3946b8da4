"""Calls of the kernels on any platform, and on the devices of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, PartitionSpec

from simrf_jax._src.attention.inputs.sharding import MeshAxes, kinds_of_axes
from simrf_jax._src.attention.pallas_inputs import without_x64

# ``forward`` or ``backward``.
Kernel: TypeAlias = Callable[..., Any]
# Function of the operands and of ``interpret``.
Sizes: TypeAlias = Callable[..., Any]


def on_platform(kernel: Kernel, sizes_of: Sizes, refs: Any, *arrays: Any) -> Any:
    """Calls a kernel with its sizes; on a CPU, Pallas interprets it.

    Args:
      kernel: Function of the sizes and the arrays.
      sizes_of: Function of ``refs`` and of ``interpret`` that returns the sizes.
      refs: The operands.
      arrays: Further arrays.
    """

    def call(*operands: Any, interpret: bool) -> Any:
        # With jax_enable_x64, indices would be int64 and some constants float64, which TPUs do not
        # support.
        with without_x64():
            return kernel(sizes_of(operands[0], interpret=interpret), *operands)

    return jax.lax.platform_dependent(
        refs,
        *arrays,
        tpu=functools.partial(call, interpret=False),
        cpu=functools.partial(call, interpret=True),
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
    # XLA refuses a kernel over axes of type Auto, even over those that shard nothing.
    automatic = {name for name in mesh.axis_names if kinds_of_axes(mesh)[name] == AxisType.Auto}
    if not automatic:
        return kernel(*arrays)
    specs = jax.tree.map(functools.partial(_spec, axes), arrays)
    out = PartitionSpec(axes.batch or None, axes.heads or None)
    # Unchecked, because a kernel does not declare over which mesh axes its results vary.
    return jax.shard_map(
        kernel, in_specs=specs, out_specs=out, axis_names=automatic, check_vma=False
    )(*arrays)


def _spec(axes: MeshAxes, x: jax.Array) -> PartitionSpec:
    along = {4: (axes.batch, axes.heads), 3: (axes.heads,)}.get(x.ndim, ())
    sizes = zip(along, x.shape, strict=False)
    return PartitionSpec(*(names if names and size > 1 else None for names, size in sizes))
