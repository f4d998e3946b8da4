"""The choice between the kernels and other implementations, made without loading Pallas."""

from __future__ import annotations

from typing import Any

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

# Widths of heads whose tiles fit the shared memory and the registers.
WIDTHS = (64, 128)
# Where positions matter, a program keeps all rows of W and the state in shared memory.
WIDTH_IN_ORDER, ROWS_IN_ORDER = 64, 128
# ``wgmma`` exists on these GPUs only: older ones have no such instruction, newer ones another one.
CAPABILITY = "9."
# float32 holds all integers below this one.
MOST_POSITIONS = 2**24

# Parameters of Pallas's interpreter, with which tests run the kernels on a CPU; None to compile.
interpret: Any = None


def reason_against(estimator: Estimator, call: Call, *, is_asked: bool) -> str | None:
    """Returns why the kernels cannot take a call, or None if they can.

    Args:
      estimator: W, the feature map and options.
      call: The call.
      is_asked: True if the caller chose the kernels. If False, they are used only for bidirectional
        attention without segments or a band, and where each device is known to get its own tokens.
    """
    return (
        _reason_against_device()
        or reason_against_call(estimator, call)
        or _reason_against_mode(estimator, call)
        or reason_against_tokens(call, (jnp.bfloat16,))
        or _reason_against_size(estimator, call)
        or (None if is_asked else _reason_unasked(estimator, call))
    )


def _reason_unasked(estimator: Estimator, call: Call) -> str | None:
    if call.is_causal:  # Which other implementations exclude.
        return "later tokens may change how earlier causal outputs round"
    if call.in_order(estimator.exact_bandwidth):
        return "packed attention and exact bands were not timed on a GPU yet"
    return None if runs_alone(estimator.mesh_axes) else "several devices may share the tokens"


def _reason_against_device() -> str | None:
    if jax.__version_info__ < (0, 11):
        return f"its kernels need jax 0.11 or newer, got {jax.__version__}"
    if interpret is not None:
        return None
    wanted = "its kernels run on NVIDIA GPUs of compute capability 9, such as an H100 or H200, got"
    platform = jax.default_backend()
    if platform != "gpu":
        return f"{wanted} the backend {platform}"
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "none"))
    if not capability.startswith(CAPABILITY):
        return f"{wanted} {device.device_kind} of compute capability {capability}"
    return None


def _reason_against_mode(estimator: Estimator, call: Call) -> str | None:
    if estimator.mesh_axes.batch or estimator.mesh_axes.heads:
        return (
            "its kernels have no batch_axis or head_axis; call them in "
            "jax.shard_map(..., check_vma=False)"
        )
    return None


def _reason_against_size(estimator: Estimator, call: Call) -> str | None:
    form = shapes_of_form(estimator)
    if isinstance(form, str):
        return form
    widths = (call.query.shape[-1], call.value.shape[-1])
    if not {*widths} <= {*WIDTHS}:
        wanted = " or ".join(map(str, WIDTHS))
        return f"heads of queries and values must be {wanted} wide, got {widths[0]} and {widths[1]}"
    lengths = (call.query.shape[-3], call.key.shape[-3])
    if not call.in_order(estimator.exact_bandwidth):
        return None
    mode = "attention that is causal, packed or beside an exact band"
    if lengths[0] != lengths[1]:
        return f"{mode} has as many keys as queries, got {lengths[1]} and {lengths[0]}"
    num_rows = form.rows.shape[-2] * (2 if form.is_paired else 1)
    if {*widths} != {WIDTH_IN_ORDER} or num_rows > ROWS_IN_ORDER:
        return (
            f"{mode} has heads {WIDTH_IN_ORDER} wide and at most {ROWS_IN_ORDER} rows of W, "
            f"got {widths[0]} and {widths[1]}, and {num_rows}"
        )
    reach = min(estimator.exact_bandwidth or 0, lengths[0] - 1)
    most = lengths[0] * (1 if call.segment_ids is None else 2 + reach)
    if most >= MOST_POSITIONS:
        return f"positions in float32 must be less than {MOST_POSITIONS}, got up to {most}"
    return None
