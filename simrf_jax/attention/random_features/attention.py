"""Random-feature attention: the public function."""

from __future__ import annotations

import functools
from typing import Literal, SupportsIndex, TypeAlias, get_args

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax import checks
from simrf_jax.attention.inputs.arguments import Arguments
from simrf_jax.attention.inputs.masks import Lengths, Mask
from simrf_jax.attention.inputs.sharding import find_shards
from simrf_jax.attention.pallas_tpu.choice import MeshAxes, uses_kernel
from simrf_jax.attention.random_features.bidirectional import bidirectional_attention
from simrf_jax.attention.random_features.causal import (
    CHUNK_SIZE,
    causal_attention,
    packed_attention,
)
from simrf_jax.attention.random_features.exact_band import attend_beside_band, check_band
from simrf_jax.attention.random_features.exchange import attend_over_devices
from simrf_jax.attention.random_features.state import (
    AttentionState,
    as_map_and_projection,
    check_heads,
    lay_out,
)
from simrf_jax.features import FeatureMap, FeatureMapLike, calls_function
from simrf_jax.projections import ProjectionLike

Implementation: TypeAlias = Literal["xla", "pallas_tpu"]
IMPLEMENTATIONS = get_args(Implementation)


def random_feature_attention(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    value: Float[ArrayLike, "*batch S K D"],
    projection: ProjectionLike | None,
    *,
    feature_map: FeatureMapLike = "positive",
    mask: Mask | None = None,
    bias: Float[ArrayLike, " ..."] | None = None,
    scale: Real[ArrayLike, ""] | None = None,
    is_causal: bool | np.bool_ = False,
    query_seq_lengths: Lengths | None = None,
    key_value_seq_lengths: Lengths | None = None,
    implementation: Implementation | None = None,
    segment_ids: Integer[ArrayLike, "... T"] | None = None,
    chunk_size: SupportsIndex | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
    exact_bandwidth: SupportsIndex | None = None,
) -> Float[Array, "*batch T N D"]:
    r"""Returns softmax attention estimated by random features, in time linear in the length.

    .. math::
        \operatorname{Att}(Q, K, V)_t = \frac{\phi(q_t)^\top \sum_s \phi(k_s) v_s^\top}
                                             {\phi(q_t)^\top \sum_s \phi(k_s)}

    with :math:`\phi` the features of the softmax kernel of queries and keys scaled by
    :math:`\sqrt{|\text{scale}|}`, and the queries by the sign of the scale. It replaces
    ``jax.nn.dot_product_attention`` and has the same layout, defaults and meaning of masks. It
    equals the estimator at any scale of the inputs: it needs no epsilon and never overflows.

    For rotary embeddings, rotate queries and keys before the call. The kernel is then
    :math:`e^{\text{scale} \, q_t^\top R_{s-t} k_s}`. With Haar rotations the mean and the variance
    of its estimate depend on relative positions alone, although each W sees absolute positions.
    Rotated features, which some linear attention uses, are not offered: they are not positive.

    Args:
      query: ``[..., T, N, H]``: T queries of N heads, with any leading batch shape.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      value: ``[..., S, K, D]``.
      projection: W, ``[num_features, H]`` shared by all heads, or ``[K, num_features, H]``, one
        for each key head and the queries that belong to it. An array, a ``Projection``, with
        weights for maps that honor them, or what a hybrid map takes; None for a map that needs
        none.
      feature_map: A name, ``"positive"``, ``"hyperbolic"``, ``"trigonometric"``, ``"phase"`` (with
        evenly spaced phases), ``"relu"``, ``"elu"``, ``"angular_hybrid"``, ``"gaussian_hybrid"`` or
        ``"clustered_hybrid"``; an object of ``simrf_jax.feature_maps``, such as
        ``feature_maps.Phase(phases)``; or a function from (x, projection) to features, which
        becomes a ``feature_maps.Custom``. Features that may be negative (trigonometric, phase and
        hybrid ones) estimate the denominator with noise of either sign. Where that comes near zero,
        the output means nothing.
      mask: Boolean, broadcastable to ``[..., N, T, S]``, True to attend. It must be the same for
        all queries: have a query axis of size 1, or be a NumPy array that is constant along it.
      bias: Added to the logits; of the same shapes, with the same condition.
      scale: Multiplies the logits, one finite number of either sign; by default
        :math:`1/\sqrt H`.
      is_causal: True if query t attends only to keys s <= t. Nothing of later keys reaches it, not
        even through rounding. Time stays linear in the length, and the backward pass computes the
        features again instead of keeping them.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      implementation: ``"pallas_tpu"`` for fused kernels, ``"xla"`` for the compiler's own, or None
        for the kernels where they can do the call on a TPU, and XLA elsewhere. The kernels make
        features that are exponentials (positive, hyperbolic, optimal positive, calibrated and
        learned ones) and never write them to memory. They do bidirectional, causal and packed
        attention in bfloat16 or float32, also beside an exact band of up to 256 keys on each side,
        but no sharded length, and can be differentiated once, in reverse mode. The gradients of W,
        a bias, the scale and the feature map come from XLA, in addition to the kernels. A vector
        whose squared length overflows counts as not finite there. On a CPU the kernels are
        interpreted, which is for tests: for computations on the CPU of a TPU host, choose
        ``"xla"``, and likewise for forward-mode and second derivatives.
      segment_ids: Integers ``[..., T]`` of packed sequences, for as many keys as queries: a query
        attends to keys of its own segment only. Neighbours with equal ids belong to one segment.
      chunk_size: Keys that causal or packed attention takes at a time, a power of two; None for a
        default.
      sequence_axis: The mesh axis, or a tuple of them, that shards the sequence. Leave it out for
        axes of type Explicit, which are part of the types of query, key and value. Name axes of
        type Auto here; otherwise XLA all-gathers the keys of causal and packed attention. The mesh
        is that of the inputs or of ``jax.set_mesh``. Inside a ``jax.shard_map`` over the axis, pass
        the device's own part of each array, but whole sequence lengths in query_seq_lengths and
        key_value_seq_lengths; that the axis shards the length cannot be checked there. Devices
        exchange only running sums, never keys or values: in bidirectional attention one maximum and
        one sum, otherwise as many permutations as the logarithm of the number of devices. With an
        exact band they also send their neighbours the keys within it.
      batch_axis: The axis of type Auto of the mesh of ``jax.set_mesh``, or a tuple of them, that
        shards the first batch axis. Only the kernels use it. XLA cannot partition a kernel, so
        without it every device computes the whole batch. Leave it out inside a ``jax.shard_map``
        over the axis. By default the kernels are used on several devices only if it and
        ``head_axis`` name all axes of the mesh.
      head_axis: The mesh axis, or a tuple of them, that shards queries' and keys' heads, likewise.
      exact_bandwidth: None, or a distance b, at least 0. Query t then weighs the keys from t - b to
        t + b (to t if causal) by :math:`e^{\text{scale} \, q_t^\top k_s}` itself, and all other
        visible keys by its estimate. Numerator and denominator are each one sum of both. Positions
        count from 0 in queries and keys. From b = T - 1 on this is softmax attention. Bidirectional
        attention then takes chunks of keys in order, as causal attention does. The feature map must
        estimate exp(x . y) itself: relu, elu and maps of the Gaussian kernel are refused, and a
        function of one's own is trusted. What is said of features that may be negative holds here
        too. Over a sharded length there must be as many keys as queries.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype. Logits and exponentials are float32 at least; the
      contractions over the length and over the features are in bfloat16 with float32 accumulation
      if the inputs are bfloat16. Queries that see no key get zeros. A query, key or value with a
      component that is NaN, infinite or above 1e31 turns the outputs of all queries that see it
      into NaN. It reaches no other output, and no gradient of another output: neither the past in
      causal attention, nor other segments, nor a query from which it is hidden.

    Raises:
      TypeError: If a dtype is wrong, or is_causal neither True nor False.
      ValueError: If shapes do not match, a name is unknown, scale is not finite, exact_bandwidth is
        negative or the feature map estimates another kernel than it needs, or the mask or the bias
        asks for what linear attention cannot do; if sequence_axis is no axis of a mesh, its
        devices do not divide the lengths, or causal attention has other keys than queries there; if
        the kernels cannot do what ``implementation="pallas_tpu"`` asks of them, or batch_axis or
        head_axis are then no axes of a mesh that divide the batch or the heads.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 197, 12, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> simrf_jax.random_feature_attention(q, k, v, w).shape
      (2, 197, 12, 64)

    References:
      Choromanski et al., Rethinking Attention with Performers (ICLR 2021),
      https://arxiv.org/abs/2009.14794
      Reid et al., Simplex Random Features (ICML 2023), Sec. 5.4, https://arxiv.org/abs/2301.13856
    """
    checks.one_of("implementation", implementation, (*IMPLEMENTATIONS, None))
    is_causal = checks.boolean("is_causal", is_causal)
    in_order = is_causal or segment_ids is not None or exact_bandwidth is not None
    if chunk_size is not None and not in_order:
        raise ValueError(
            f"chunk_size is for causal or packed attention, got {chunk_size} with neither of them "
            "and without exact_bandwidth."
        )
    chunk_size = checks.power_of_two("chunk_size", CHUNK_SIZE if chunk_size is None else chunk_size)
    arguments = Arguments.of(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
    )
    feature_map, w = as_map_and_projection(feature_map, projection)
    num_key_heads, dim = arguments.key.shape[-2:]
    check_heads(feature_map, w, num_key_heads=num_key_heads, dim=dim)
    if exact_bandwidth is not None:
        exact_bandwidth = check_band(exact_bandwidth, feature_map)
    axes = checks.axis_names("sequence_axis", sequence_axis)
    mesh_axes = MeshAxes(
        checks.axis_names("batch_axis", batch_axis), checks.axis_names("head_axis", head_axis)
    )
    if implementation == "pallas_tpu" and axes:
        raise ValueError(
            'implementation="pallas_tpu" is for whole sequences, got a call with a sequence_axis.'
        )
    may_use_kernel = implementation == "pallas_tpu" or (
        implementation is None and jax.default_backend() == "tpu" and not axes
    )
    in_kernel = may_use_kernel and uses_kernel(
        arguments,
        w,
        feature_map,
        mesh_axes,
        is_causal=is_causal,
        exact_bandwidth=exact_bandwidth,
        is_required=implementation is not None,
    )
    if axes or arguments.explicit_axes(in_order=in_order):
        find_shards(arguments, axes, in_order=in_order)  # Raises if lengths do not fit.
        if arguments.key.shape[-3] > 0:  # Without keys there is nothing to exchange.
            return attend_over_devices(
                arguments,
                w,
                feature_map,
                axes,
                is_causal=is_causal,
                chunk_size=chunk_size,
                exact_bandwidth=exact_bandwidth,
            )
    attend = _attend if calls_function(feature_map) else _compiled_attend
    try:
        return attend(
            arguments,
            w,
            feature_map,
            is_causal=is_causal,
            chunk_size=chunk_size,
            exact_bandwidth=exact_bandwidth,
            kernel_axes=mesh_axes if in_kernel else None,
        )
    except TypeError as error:
        if in_kernel and "custom_vjp" in str(error):
            raise TypeError(
                "The Pallas kernels can be differentiated in reverse mode, got a derivative in "
                'forward mode of random-feature attention; compute it with implementation="xla".'
            ) from error
        raise


@jax.named_scope("random_feature_attention")
def _attend(
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    *,
    is_causal: bool,
    chunk_size: int,
    exact_bandwidth: int | None,
    kernel_axes: MeshAxes | None = None,
) -> Float[Array, "*batch T N D"]:
    """Attends to tokens that are all on one device, or in a kernel over mesh axes."""
    if kernel_axes is not None:
        # Here, because Pallas takes a tenth of a second to load, and most calls do without it.
        from simrf_jax.attention.pallas_tpu.attention import attend as attend_in_kernel

        return attend_in_kernel(
            arguments,
            projection,
            feature_map,
            kernel_axes,
            is_causal=is_causal,
            exact_bandwidth=exact_bandwidth,
            reference=functools.partial(
                _attend,
                is_causal=is_causal,
                chunk_size=chunk_size,
                exact_bandwidth=exact_bandwidth,
            ),
        )
    inputs, features = lay_out(arguments, projection, feature_map, scaled=exact_bandwidth is None)
    if exact_bandwidth is not None:
        return attend_beside_band(
            inputs,
            features,
            bandwidth=exact_bandwidth,
            is_causal=is_causal,
            chunk_size=chunk_size,
        )
    if inputs.segments is None and not is_causal:
        return inputs.outputs(bidirectional_attention(inputs, features))
    empty = AttentionState.empty(inputs, features)
    if is_causal:
        return inputs.outputs(causal_attention(inputs, features, empty, chunk_size=chunk_size)[0])
    return inputs.outputs(packed_attention(inputs, features, empty, empty, chunk_size=chunk_size))


# One program for each shape and feature map, also without jit around the call. A user's function is
# left out: it may do something else the next time.
_OPTIONS = ("is_causal", "chunk_size", "exact_bandwidth", "kernel_axes")
_compiled_attend = jax.jit(_attend, static_argnames=_OPTIONS, inline=True)
