"""Random-feature attention by XLA's own programs, which take every call."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from simrf_jax.attention.estimator import Estimator, compiled
from simrf_jax.attention.inputs.call import Call
from simrf_jax.attention.inputs.sharding import find_shards
from simrf_jax.attention.random_features.bidirectional import bidirectional_attention
from simrf_jax.attention.random_features.causal import causal_attention, packed_attention
from simrf_jax.attention.random_features.exact_band import attend_beside_band
from simrf_jax.attention.random_features.exchange import attend_over_devices
from simrf_jax.attention.random_features.state import AttentionState

PLATFORM: str | None = None


def reason_against(estimator: Estimator, call: Call, *, is_asked: bool) -> str | None:
    """Returns None: there is no call that XLA cannot take."""
    del estimator, call, is_asked
    return None


def attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention of a call, on one device or over a sharded length."""
    in_order = call.in_order(estimator.exact_bandwidth)
    if estimator.sequence_axes or call.explicit_axes(in_order=in_order):
        shards = find_shards(call, estimator.sequence_axes, in_order=in_order)
        if call.key.shape[-3] > 0:  # Without keys there is nothing to exchange.
            return attend_over_devices(estimator, call, shards)
    return attend_locally(estimator, call)


@compiled()
@jax.named_scope("random_feature_attention")
def attend_locally(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention of tokens that are all on one device."""
    inputs, features = estimator.lay_out(call)
    if estimator.exact_bandwidth is not None:
        return attend_beside_band(
            inputs,
            features,
            bandwidth=estimator.exact_bandwidth,
            is_causal=call.is_causal,
            chunk_size=estimator.chunk_size,
        )
    if not call.in_order():
        return inputs.outputs(bidirectional_attention(inputs, features))
    empty, chunk_size = AttentionState.empty(inputs, features), estimator.chunk_size
    if call.is_causal:
        return inputs.outputs(causal_attention(inputs, features, empty, chunk_size=chunk_size)[0])
    return inputs.outputs(packed_attention(inputs, features, empty, empty, chunk_size=chunk_size))
