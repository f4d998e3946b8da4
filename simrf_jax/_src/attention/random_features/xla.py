"""Random-feature attention in plain JAX, compiled by XLA, which supports every call.

Bidirectional attention is here; on a CPU it takes its tokens chunk by chunk. Causal and packed
attention, an exact band, and lengths that devices share have their own modules.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from simrf_jax._src.attention.estimator import Estimator, HeadMaps, compiled
from simrf_jax._src.attention.inputs.call import Call, Inputs, contract
from simrf_jax._src.attention.inputs.sharding import find_shards
from simrf_jax._src.attention.random_features.causal import (
    causal_attention,
    in_units_of_the_kernel,
    packed_attention,
)
from simrf_jax._src.attention.random_features.exact_band import attend_with_band
from simrf_jax._src.attention.random_features.exact_keys import SharedKeys
from simrf_jax._src.attention.random_features.exchange import attend_over_devices
from simrf_jax._src.attention.random_features.kept_keys import (
    ExactKeysState,
    attend_with_kept_keys,
)
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    Keys,
    sum_keys,
    weigh,
)
from simrf_jax._src.features import calls_function

CHUNK_ROWS = 8192  # Queries or keys of all heads together per chunk of features.
LEAST_CHUNK = 64  # Shorter chunks would lose more time to overhead than they save.
PLATFORM: str | None = None


def reason_against(estimator: Estimator, call: Call, *, is_asked: bool) -> str | None:
    """Returns None: XLA supports every call."""
    del estimator, call, is_asked
    return None


def attend(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention of a call, on one device or over a sharded length."""
    in_order = call.in_order(estimator.exact_bandwidth)
    axes = estimator.sequence_axis or ()
    if axes or call.explicit_axes(in_order=in_order):
        shards = find_shards(call, axes, in_order=in_order)
        if estimator.exact_keys is not None:
            raise ValueError(
                "exact_keys are for lengths that no mesh axes shard, got lengths over "
                f"{axes or shards.axes}."
            )
        if call.key.shape[-3] > 0:  # Without keys, devices have nothing to exchange.
            program = compiled(attend_over_devices, estimator.feature_map, "shards")
            return program(estimator, call, shards=shards)
    return compiled(attend_locally, estimator.feature_map)(estimator, call)


@jax.named_scope("random_feature_attention")
def attend_locally(estimator: Estimator, call: Call) -> Float[Array, "*batch T N D"]:
    """Returns the attention of tokens that are all on one device."""
    inputs, features = estimator.lay_out(call)
    choice = estimator.exact_keys if call.key.shape[-3] != 0 else None
    if estimator.exact_bandwidth is not None:
        return attend_with_band(
            inputs,
            features,
            choice,
            bandwidth=estimator.exact_bandwidth,
            is_causal=call.is_causal,
            chunk_size=estimator.chunk_size,
        )
    exact = None
    keeps = choice is not None and choice.keeps(is_causal=call.is_causal)
    if choice is not None and not keeps:
        exact = SharedKeys.of(inputs, features, choice)
        inputs = inputs.without(exact.among(inputs.key))
    if not call.in_order():
        return inputs.outputs(bidirectional_attention(inputs, features, exact))
    empty, chunk_size = AttentionState.empty(inputs, features), estimator.chunk_size
    if choice is not None and keeps:
        state = ExactKeysState.empty(inputs, features, choice.count)
        readout, _ = attend_with_kept_keys(inputs, features, state, chunk_size=chunk_size)
        return inputs.outputs(readout.outputs())
    if call.is_causal:
        read, _ = causal_attention(inputs, features, empty, chunk_size=chunk_size)
    else:
        read = packed_attention(inputs, features, empty, empty, chunk_size=chunk_size)
    readout = read.readout
    if exact is not None:
        more = exact.read(inputs, is_causal=call.is_causal)
        readout = in_units_of_the_kernel(read).add(more)
    return inputs.outputs(readout.outputs())


def bidirectional_attention(
    inputs: Inputs, features: HeadMaps, exact: SharedKeys | None = None
) -> Float[Array, "B T K G D"]:
    r"""Lets each query attend to all keys.

    .. math::
        o_t = \frac{\sum_i e^{a_{ti} + c_i - b_t} \sum_s e^{\kappa_{si} - c_i} v_s}
                   {\sum_i e^{a_{ti} + c_i - b_t} \sum_s e^{\kappa_{si} - c_i}}

    with :math:`a_{ti}` the exponents of the queries, :math:`\kappa_{si}` those of the keys (scale
    and log weights included), :math:`c_i = \max_s \kappa_{si}` (``AttentionState.maxima``) and
    :math:`b_t = \max_i (a_{ti} + c_i)` (``Readout.shift``). Values of signed maps stand as factors
    before the exponentials. Both shifts cancel, so this is the estimator itself. Nothing overflows,
    and for a positive map the denominator is at least 1 wherever a query and a visible key have a
    feature in common, so no epsilon is needed.

    On a CPU the features are computed in cache-sized chunks and recomputed in the backward pass.
    Other backends compute all of them at once.

    Args:
      inputs: Queries, keys and values without segments.
      features: Their feature maps.
      exact: Keys that the queries see exactly, which are hidden in ``inputs``; or None.

    Returns:
      ``[B, T, K, G, D]`` in the logits' dtype; zeros where no key is visible.
    """
    sizes = (*inputs.query.shape, *inputs.key.shape)
    are_known = all(isinstance(size, int) and size > 0 for size in sizes)  # Not symbolic.
    # Explicit mesh axes may shard the queries. If they shard the keys, the devices exchange sums.
    is_whole = jax.typeof(inputs.query).sharding.spec[1] is None
    if calls_function(features.feature_map) or not (are_known and is_whole):
        return _attend_at_once(inputs, features, exact)
    return jax.lax.platform_dependent(
        inputs, features, exact, cpu=_attend_by_chunks, default=_attend_at_once
    )


def _attend_at_once(
    inputs: Inputs, features: HeadMaps, exact: SharedKeys | None
) -> Float[Array, "B T K G D"]:
    """Computes the features of all tokens at once."""
    state, poisoned = sum_keys(Keys.of(inputs), features)
    queries = features.queries(inputs.query)
    if exact is not None:
        queries, state = (
            exact.append_to_queries(queries, inputs.query),
            exact.append_to_state(state),
        )
        poisoned |= jnp.any(exact.nonfinite, axis=1)
    return state.read(queries, poisoned, inputs.value.dtype).outputs()


def _attend_by_chunks(
    inputs: Inputs, features: HeadMaps, exact: SharedKeys | None
) -> Float[Array, "B T K G D"]:
    """Computes the features of a few tokens of each head at a time.

    The head axis comes before the length axis, so that matrix products are fast.
    """
    batch, length, num_heads, groups, _ = inputs.query.shape
    rows = batch * num_heads
    keys = Keys(
        _split(inputs.key, rows),
        _split(inputs.value, rows),
        _split(inputs.key_log_weights, rows, fill=-jnp.inf),
    )
    queries = _split(inputs.query, rows * groups)
    axes = features.head_axes()
    state, poisoned = jax.vmap(sum_keys, in_axes=(1, axes))(keys, features)
    state = state._replace(sums=state.sums.astype(inputs.value.dtype))  # The contraction dtype.
    # Each head has an axis of key heads, of size 1.
    exact = jax.tree.map(lambda x: jnp.expand_dims(jnp.moveaxis(x, 2, 0), 3), exact)
    read = jax.vmap(_read, in_axes=(1, 0, 0, axes, 0), out_axes=1)
    out = read(queries, state, poisoned, features, exact)  # [chunks, K, B, size, 1, G, D]
    out = jnp.moveaxis(jnp.squeeze(out, 4), (0, 1), (1, 3))
    return out.reshape(batch, -1, *out.shape[3:])[:, :length]


def _read(
    queries: Float[Array, "chunks B T 1 G H"],
    state: AttentionState,
    poisoned: Bool[Array, "B 1"],
    features: HeadMaps,
    exact: SharedKeys | None,
) -> Float[Array, "chunks B T 1 G D"]:
    """Returns the outputs of the queries of one head: numerator over denominator.

    On a CPU, a product with D columns and one with a single column are faster than one with D + 1
    columns. Likewise the product of the gradient with ones is faster than its sum.
    """
    if exact is not None:
        state = exact.append_to_state(state)
        poisoned |= jnp.any(exact.nonfinite, axis=1)
    sums, total = state.sums[..., :-1], state.sums[..., -1:]

    def read(query: Float[Array, "B T 1 G H"]) -> Float[Array, "B T 1 G D"]:
        queries = features.queries(query)
        if exact is not None:
            queries = exact.append_to_queries(queries, query)
        phi, no_features = queries
        weights, _ = weigh(phi, state.maxima[:, None, :, None])
        # With this order of axes the products need no transposed copy of the weights.
        numerator = jnp.moveaxis(contract("btkgm,bkmd->bktgd", weights, sums), 2, 1)
        denominator = jnp.moveaxis(contract("btkgm,bkmd->bktgd", weights, total), 2, 1)
        nothing = denominator == 0  # Exactly: no key is visible, or no feature is active.
        inverse = jnp.where(nothing, 0, 1 / jnp.where(nothing, 1, denominator))
        ones = jnp.ones((1, sums.shape[-1]), inverse.dtype)
        out = numerator * jnp.matmul(inverse, ones, precision=jax.lax.Precision.HIGHEST)
        # Last, because an earlier NaN would reach the gradients of W: 0 * NaN is not 0.
        return jnp.where((no_features | poisoned[:, None, :, None])[..., None], jnp.nan, out)

    if queries.shape[0] > 1:
        read = jax.checkpoint(read, prevent_cse=False)
    return jax.lax.map(read, queries)


def _split(
    x: Shaped[Array, "B length K *rest"], rows: int, fill: float | None = None
) -> Shaped[Array, "chunks K B size 1 *rest"]:
    """Splits the length into chunks of about equal size, heads first.

    Args:
      x: ``[B, length, K, ...]``.
      rows: Number of vectors at each position.
      fill: Padding of the last chunk; None to repeat the last position, whose features are finite.
    """
    batch, length, num_heads, *rest = x.shape
    count = -(-length // max(LEAST_CHUNK, CHUNK_ROWS // rows))
    size = -(-length // count)
    missing = count * size - length
    if missing:  # Empty padding would still cost a copy of the gradient.
        last = jnp.repeat(x[:, -1:], missing, axis=1)
        padding = last if fill is None else jnp.full_like(last, fill)
        x = jnp.concatenate([x, padding], axis=1)
    x = x.reshape(batch, count, size, num_heads, *rest)
    return jnp.expand_dims(jnp.moveaxis(x, (1, 3), (0, 1)), 4)
