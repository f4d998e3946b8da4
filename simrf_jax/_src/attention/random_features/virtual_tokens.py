"""A state as tokens of softmax attention, one for each feature, that represent all keys."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from simrf_jax._src import checks, one_line
from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.random_features.state import AttentionState
from simrf_jax._src.features.log_space import widened


class VirtualTokens(NamedTuple):
    """Tokens that softmax attention reads in place of all keys of a state.

    Attributes:
      key: ``[*batch, m, K, H]``.
      value: ``[*batch, m, K, D]``.
      bias: ``[*batch, K, 1, m]``, or ``[*batch, N, T, m]`` for given queries: terms to add to the
        logits of the tokens, besides the products of queries and keys.
    """

    key: Float[Array, "*batch m K H"]
    value: Float[Array, "*batch m K D"]
    bias: Float[Array, "*batch heads #T m"]

    def __repr__(self) -> str:
        return one_line.representation(self)


def virtual_tokens(
    estimator: Estimator,
    state: AttentionState,
    query: Float[ArrayLike, "*batch T N H"] | None,
    scale: Real[ArrayLike, ""] | None,
) -> VirtualTokens:
    """Returns the tokens of a state; see ``RandomFeatureMechanism.virtual_tokens``."""
    # Rows computed in float32 would round a state of float64 vectors.
    widen = functools.partial(widened, dtype=state.sums.dtype)
    w, feature_map = jax.tree.map(widen, (estimator.projection, estimator.feature_map))
    form = feature_map.exponential_forms(w, side="query")
    if form is None:
        raise ValueError(
            "Virtual tokens need features that are exponentials (positive, hyperbolic, optimal "
            f"positive, calibrated and learned ones), got {feature_map!r}."
        )
    form, weight = form.unpaired(), state.sums[..., -1]
    seen = jnp.where(weight == 0, 1, weight)
    value = jnp.moveaxis(state.sums[..., :-1] / seen[..., None], -3, -2)
    bias = jnp.where(weight == 0, -jnp.inf, state.maxima + jnp.log(seen))
    if form.offsets is not None:
        bias += jnp.broadcast_to(form.offsets, bias.shape)
    shape = (*value.shape[:-1], form.rows.shape[-1])
    given = jnp.zeros(shape, value.dtype) if query is None else jnp.asarray(query)
    nothing = (jnp.zeros(x, given.dtype) for x in (shape, value.shape))
    call = Call.of(given, *nothing, scale=scale)  # Runs the checks.
    if not checks.is_traced(call.logit_scale) and call.logit_scale == 0:
        raise ValueError("scale must not be 0, because the keys are divided by its root, got 0.")
    estimator.check_heads(call)
    key = jnp.broadcast_to(jnp.moveaxis(form.rows, -3, -2), shape).astype(value.dtype)
    root = jnp.sqrt(jnp.abs(jnp.asarray(call.logit_scale, key.dtype)))
    bias = bias[..., None, :]
    if query is not None:
        # Terms that all features of a query share cancel, unless other keys join the tokens.
        *batch, length, heads, dim = call.query.shape
        num_key_heads = key.shape[-2]
        scaled = jnp.sign(call.logit_scale) * root * call.query.astype(key.dtype)
        scaled = scaled.reshape(-1, length, num_key_heads, heads // num_key_heads, dim)
        common = feature_map.log_features_of_heads(scaled, w, side="query").log_scale
        common = jnp.moveaxis(common.reshape(*batch, length, heads, 1), -3, -2)
        bias = jnp.repeat(bias, heads // num_key_heads, axis=-3) + common
    return VirtualTokens(key / root, value, bias)
