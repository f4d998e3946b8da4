"""The choice between the kernels and XLA, made without loading Pallas."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_inputs import (
    reason_against_call,
    reason_against_tokens,
    runs_alone,
    shapes_of_form,
)

# Mosaic does not support products of bfloat16 on these chips.
OLD_CHIPS = ("TPU v2", "TPU v3")

LANES = 128
# Wider windows of exact keys make the programs long.
MOST_BANDWIDTH = 2 * LANES
# Bytes of a core's memory that a program may take, as ``Program`` estimates them: from v5e on, and
# on a v4, whose cores have 16 MiB.
MEMORY, MEMORY_OF_V4 = 40 * 2**20, 11 * 2**20


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
        """Returns about how many bytes the program needs for a tile of ``tile`` tokens.

        The last axis of each array is padded to ``LANES``.
        """
        lanes = -(-self.width // LANES) * LANES
        # Blocks of seven arrays of tokens, each twice, because the next ones are prefetched.
        tokens = 14 * self.groups * self.width * tile * self.itemsize
        # Two parts of the rows of queries and of keys, twice as well.
        parts = -(-2 * self.width // LANES) * LANES
        rows = 2 * sum(self.num_rows) * parts * self.itemsize
        # The state, its gradient, and the maxima and offsets, whose columns are padded.
        kept = 4 * self.num_features * (3 * lanes + 3 * LANES)
        if self.is_causal:  # Exponents and units of a tile, and the units of all tiles.
            kept += 4 * self.num_features * 8 * LANES
        # Features of about three heads, several times each.
        features = 48 * self.num_features * tile
        if self.is_causal:  # Its chains are longer, so more heads run at once.
            heads = self.num_heads * self.groups
            features += 14 * heads * self.num_features * tile * self.itemsize
        return self.num_heads * (tokens + rows + kept) + features


def memory() -> int:
    """Returns the bytes of a core's memory that a program may take."""
    return MEMORY_OF_V4 if jax.devices()[0].device_kind == "TPU v4" else MEMORY


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
        # Each tile of a window and its neighbors twice, because the next ones are prefetched: keys
        # and values, and queries, the gradients of their sums, and rows in float32.
        of_keys = 2 * window + 2
        of_queries = self.groups * (2 * window + 1)
        tokens = 2 * LANES * self.width * self.itemsize * (of_keys + of_queries)
        rows = 2 * 2 * 8 * 4 * LANES * window * self.groups
        # Keys, values and queries side by side; logits and weights of about three heads.
        windows = 4 * LANES * window * self.width * self.itemsize
        logits = 3 * 6 * 4 * LANES * LANES * window
        return self.num_heads * (tokens + rows + windows) + logits


def reason_against(estimator: Estimator, call: Call, *, is_asked: bool) -> str | None:
    """Returns why the kernels cannot take a call, or None if they can.

    Args:
      estimator: W, the feature map and options.
      call: The call.
      is_asked: True if the caller chose the kernels. If False, they are used only from v4 on, and
        where each device is known to get its own tokens.
    """
    platform = jax.default_backend()
    if platform not in ("cpu", "tpu"):
        return f"its kernels run on TPUs, and interpreted on CPUs, got the backend {platform}"
    return (
        reason_against_call(estimator, call)
        or estimator.mesh_axes.reason_against(call)
        or reason_against_tokens(call, (jnp.float32, jnp.bfloat16))
        or _reason_against_size(estimator, call)
        or _reason_unasked(estimator, is_asked)
    )


def _reason_unasked(estimator: Estimator, is_asked: bool) -> str | None:
    if is_asked:
        return None
    if jax.devices()[0].device_kind in OLD_CHIPS:
        return "the chip is older than v4"
    return None if runs_alone(estimator.mesh_axes) else "several devices may share the tokens"


def _reason_against_size(estimator: Estimator, call: Call) -> str | None:
    form, bandwidth = shapes_of_form(estimator), estimator.exact_bandwidth
    if isinstance(form, str):
        return form
    groups = call.query.shape[-2] // call.key.shape[-2]
    width = max(call.query.shape[-1], call.value.shape[-1])
    itemsize = call.query.dtype.itemsize
    num_rows = form.rows.shape[-2]
    rows = (num_rows, num_rows + (0 if form.stretch is None else width))
    in_order = call.in_order(bandwidth)
    program = Program(1, groups, width, form.num_features, rows, itemsize, in_order)
    if program.bytes_of(LANES) > memory():
        return f"{form.num_features} features do not fit into the memory of a core"
    if bandwidth is None:
        return None
    if bandwidth > MOST_BANDWIDTH:
        return f"exact_bandwidth is {bandwidth}, above {MOST_BANDWIDTH}"
    if NearProgram(1, groups, width, itemsize, bandwidth).bytes_taken > memory():
        return f"a band of {bandwidth} keys does not fit into the memory of a core"
    return None
