"""The choice between the kernels and XLA, made without loading Pallas."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from simrf_jax.attention.inputs.arguments import Arguments, Axes
from simrf_jax.features import FeatureMap
from simrf_jax.projections import ProjectionLike

# Their cores have less memory than the kernels take.
OLD_CHIPS = ("TPU v2", "TPU v3", "TPU v4")

LANES = 128
# Wider windows of exact keys make long programs.
MOST_BANDWIDTH = 2 * LANES
# Bytes of a core's memory that a program may take by the estimate of ``Program``.
MEMORY = 40 * 2**20


class Program(NamedTuple):
    """The sizes that the memory of a program of the kernels depends on.

    Attributes:
      num_heads: Key heads of the program.
      groups: Query heads of each.
      width: Width of a head.
      num_features: Number of features.
      num_rows: Number of rows of queries, and of keys.
      itemsize: Bytes of a number of the tokens.
      is_causal: True for causal attention.
    """

    num_heads: int
    groups: int
    width: int
    num_features: int
    num_rows: tuple[int, int]
    itemsize: int
    is_causal: bool

    def bytes_of(self, tile: int) -> int:
        """Returns about how many bytes the program takes for a tile of so many tokens.

        The last axis of each array is padded to ``LANES``.
        """
        lanes = -(-self.width // LANES) * LANES
        # Blocks of seven arrays of tokens, each twice, as the next ones are loaded ahead.
        tokens = 14 * self.groups * self.width * tile * self.itemsize
        # Rows of queries and of keys, likewise, and their parts.
        rows = sum(
            8 * self.width * (-(-rows // LANES) * LANES) + 2 * rows * lanes * self.itemsize
            for rows in self.num_rows
        )
        # The state, its gradient, and the maxima and offsets, whose columns are padded.
        kept = 4 * self.num_features * (3 * lanes + 3 * LANES)
        if self.is_causal:  # Exponents and units of a tile, and the units of all tiles.
            kept += 4 * self.num_features * 8 * LANES
        # Features of about three heads, several times each.
        features = 48 * self.num_features * tile
        if self.is_causal:  # Its chains are longer, so more heads are under way.
            heads = self.num_heads * self.groups
            features += 14 * heads * self.num_features * tile * self.itemsize
        return self.num_heads * (tokens + rows + kept) + features


class NearProgram(NamedTuple):
    """The sizes that the memory of a program of the kernels of a band depends on.

    Attributes:
      num_heads: Key heads of the program.
      groups: Query heads of each.
      width: Width of a head.
      itemsize: Bytes of a number of the tokens.
      bandwidth: Distance over which queries see keys.
    """

    num_heads: int
    groups: int
    width: int
    itemsize: int
    bandwidth: int

    @property
    def bytes_taken(self) -> int:
        """Estimate of the bytes that the program of the gradient takes."""
        window = 1 + 2 * -(-self.bandwidth // LANES)
        # Each tile of a window and its neighbours twice, as the next ones are loaded ahead: keys
        # and values, and queries, the gradients of their sums, and rows in float32.
        of_keys = 2 * window + 2
        of_queries = self.groups * (2 * window + 1)
        tokens = 2 * LANES * self.width * self.itemsize * (of_keys + of_queries)
        rows = 2 * 2 * 8 * 4 * LANES * window * self.groups
        # Keys, values and queries side by side; logits and weights of about three heads.
        windows = 4 * LANES * window * self.width * self.itemsize
        logits = 3 * 6 * 4 * LANES * LANES * window
        return self.num_heads * (tokens + rows + windows) + logits


class MeshAxes(NamedTuple):
    """The mesh axes that shard the batch and the heads."""

    batch: Axes = ()
    heads: Axes = ()

    def reason_against(self, arguments: Arguments) -> str | None:
        """Returns why the axes cannot shard the arrays, or None if they can."""
        mesh = jax.sharding.get_abstract_mesh()
        kinds = kinds_of_axes(mesh)
        batch, *_ = (*arguments.query.shape[:-3], 1)
        num_key_heads = arguments.key.shape[-2]
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


def uses_kernel(
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    axes: MeshAxes,
    *,
    is_causal: bool,
    exact_bandwidth: int | None,
    is_required: bool,
) -> bool:
    """Returns whether a call goes to the kernels.

    Args:
      arguments: Arguments of the call.
      projection: W.
      feature_map: The feature map.
      axes: Mesh axes that shard the batch and the heads.
      is_causal: True for causal attention.
      exact_bandwidth: Distance over which queries see keys exactly, or None.
      is_required: True if the caller chose the kernels; False takes them where they can do it, and
        where each device is known to get its own tokens.

    Raises:
      ValueError: If the caller chose the kernels, and they cannot do it.
    """
    reason = _reason_against_platform() or axes.reason_against(arguments)
    is_packed = arguments.segment_ids is not None
    in_order = is_causal or is_packed or exact_bandwidth is not None
    reason = reason or _reason_against(arguments, projection, feature_map, in_order)
    if reason is None and exact_bandwidth is not None:
        reason = _reason_against_band(arguments, exact_bandwidth)
    if reason is not None and is_required:
        raise ValueError(f'implementation="pallas_tpu" cannot do this call: {reason}.')
    if reason is not None or is_required:
        return reason is None
    return jax.devices()[0].device_kind not in OLD_CHIPS and _runs_alone(axes)


def _reason_against_platform() -> str | None:
    platform = jax.default_backend()
    if platform in ("cpu", "tpu"):
        return None
    return f"they are for TPUs, and interpreted on CPUs alone, got the backend {platform}"


def _reason_against(
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    in_order: bool,
) -> str | None:
    dtypes = {x.dtype for x in (arguments.query, arguments.key, arguments.value)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        return f"queries, keys and values are {names}, not all float32 or all bfloat16"
    tokens = (arguments.query, arguments.key, arguments.value)
    sizes = [size for x in tokens for size in x.shape]
    if not all(isinstance(size, int) for size in sizes):
        return "a size is symbolic"
    if 0 in sizes:
        return "an array is empty"
    if any(axis is not None for x in tokens for axis in jax.typeof(x).sharding.spec):
        return "axes of type Explicit shard the arrays, so call it inside jax.shard_map"
    of_keys = functools.partial(type(feature_map).exponential_forms, side="key")
    form = jax.eval_shape(of_keys, feature_map, projection)
    if form is None:
        return f"{type(feature_map).__name__} features are no exponentials that estimate exp(x . y)"
    if form.rows.dtype != jnp.float32:
        return f"projection is {form.rows.dtype.name}"
    groups = arguments.query.shape[-2] // arguments.key.shape[-2]
    width = max(arguments.query.shape[-1], arguments.value.shape[-1])
    itemsize = arguments.query.dtype.itemsize
    num_rows = form.rows.shape[-2]
    rows = (num_rows, num_rows + (0 if form.stretch is None else width))
    program = Program(1, groups, width, form.num_features, rows, itemsize, in_order)
    if program.bytes_of(LANES) > MEMORY:
        return f"{form.num_features} features do not fit into the memory of a core"
    return None


def _reason_against_band(arguments: Arguments, bandwidth: int) -> str | None:
    groups = arguments.query.shape[-2] // arguments.key.shape[-2]
    width = max(arguments.query.shape[-1], arguments.value.shape[-1])
    itemsize = arguments.query.dtype.itemsize
    if bandwidth > MOST_BANDWIDTH:
        return f"exact_bandwidth is {bandwidth}, above {MOST_BANDWIDTH}"
    if NearProgram(1, groups, width, itemsize, bandwidth).bytes_taken > MEMORY:
        return f"a band of {bandwidth} keys does not fit into the memory of a core"
    return None


def _runs_alone(axes: MeshAxes) -> bool:
    """Returns whether a kernel gets the tokens of one device, as far as can be known here.

    XLA cannot split a kernel. It would give each device the tokens of all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    named = {*axes.batch, *axes.heads}
    return all(
        kind == AxisType.Manual or size == 1 or name in named
        for name, kind, size in zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    )
