"""Fused GPU kernels as an implementation of random-feature attention."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_gpu import choice
from simrf_jax._src.attention.pallas_gpu.choice import reason_against
from simrf_jax._src.attention.pallas_inputs import no_forward_mode

__all__ = ["PLATFORM", "attend", "reason_against"]

PLATFORM: str | None = "gpu"


def attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention for a call that the kernels support."""
    with no_forward_mode():
        return attend_compiled(estimator, call, interpret=choice.interpret)


@functools.partial(jax.jit, static_argnames="interpret")
@jax.named_scope("random_feature_attention")
def attend_compiled(
    estimator: Estimator, call: Call, *, interpret: Any
) -> Float[Array, "*batch T N D"]:
    """Returns the attention, compiled or interpreted."""
    # Imported here because Pallas takes a tenth of a second to load, and older versions of JAX do
    # not have all of it.
    from simrf_jax._src.attention.pallas_gpu import fused

    return fused.attend(estimator, call, interpret=interpret)
