"""Fused TPU kernels as an implementation of random-feature attention."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_tpu.choice import reason_against
from simrf_jax._src.attention.random_features.xla import attend_locally

__all__ = ["PLATFORM", "attend", "reason_against"]

PLATFORM: str | None = "tpu"


def attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention for a call that the kernels support."""
    try:
        return _attend(estimator, call)
    except TypeError as error:
        if "custom_vjp" in str(error):
            raise TypeError(
                "The Pallas kernels can be differentiated in reverse mode, got a derivative in "
                'forward mode of random-feature attention; compute it with implementation="xla".'
            ) from error
        raise


@jax.jit
@jax.named_scope("random_feature_attention")
def _attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    # Imported here because Pallas takes a tenth of a second to load, and most calls do not need it.
    from simrf_jax._src.attention.pallas_tpu import fused

    return fused.attend(estimator, call, reference=attend_locally)
