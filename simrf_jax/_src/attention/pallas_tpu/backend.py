"""Fused TPU kernels as an implementation of random-feature attention."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_inputs import no_forward_mode
from simrf_jax._src.attention.pallas_tpu.choice import reason_against

__all__ = ["PLATFORM", "attend", "reason_against"]

PLATFORM: str | None = "tpu"


def attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention for a call that the kernels support."""
    with no_forward_mode():
        return _attend(estimator, call)


@jax.jit
@jax.named_scope("random_feature_attention")
def _attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    # Imported here because Pallas takes a tenth of a second to load, and most calls do not need it.
    from simrf_jax._src.attention.pallas_tpu import fused

    return fused.attend(estimator, call)
