"""Random-feature attention: the function, and the mechanism that holds W and the feature map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex, Unpack

import jax
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax._src import checks
from simrf_jax._src.attention.estimator import (
    CHUNK_SIZE,
    CHUNK_SIZE_ON_GPUS,
    Estimator,
    ExactKeysLike,
    KeyChoice,
    check_estimates_softmax,
    compiled,
)
from simrf_jax._src.attention.implementations import Implementation, choose, names_of
from simrf_jax._src.attention.inputs.call import Call, KeyOptions, check_keywords
from simrf_jax._src.attention.inputs.masks import Lengths, Mask
from simrf_jax._src.attention.mechanism import Mechanism, check_kind
from simrf_jax._src.attention.random_features import decoding
from simrf_jax._src.attention.random_features.decoding import State
from simrf_jax._src.attention.random_features.state import AttentionState
from simrf_jax._src.attention.random_features.virtual_tokens import VirtualTokens, virtual_tokens
from simrf_jax._src.features import FeatureMapLike, as_feature_map
from simrf_jax._src.features.feature_map import register
from simrf_jax._src.projections import ProjectionLike, as_projection


class RandomFeatureMechanism(Estimator, Mechanism[State]):
    """Random-feature attention with a projection and a feature map.

    Attributes:
      projection: W, ``[num_features, H]`` for all heads, or ``[K, num_features, H]``, one for each
        key head; None for a map that needs none.
      feature_map: A name, an object of ``simrf_jax.feature_maps``, or a function.
      chunk_size: Number of keys per chunk of causal or packed attention, a power of two; None for
        256 if the default backend is a GPU when the mechanism is made, and 64 otherwise.
      sequence_axis: Mesh axis, or a tuple of them, that shards the length in ``attend``; see
        ``random_feature_attention``.
      batch_axis: Mesh axes that shard the batch, for kernels; see ``random_feature_attention``.
      head_axis: Mesh axes that shard the heads, for kernels.
      implementation: ``"xla"``, ``"pallas_tpu"``, ``"pallas_gpu"``, several to try, or None in
        ``attend``; see ``random_feature_attention``. Steps of decoding always take XLA.
      exact_bandwidth: Distance over which queries see keys exactly, or None; see
        ``random_feature_attention``. The state of decoding is then an ``ExactBandState``.
      exact_keys: Number of keys that all queries see exactly, an ``ExactKeys`` of a number and a
        rule, or positions; see ``random_feature_attention``. Only with ``ExactKeys(count,
        by="score")`` is there a state of decoding, an ``ExactKeysState``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> mechanism = simrf_jax.RandomFeatureMechanism(w)
      >>> whole = mechanism.attend(q, k, v, is_causal=True)
      >>> state = mechanism.init(num_key_heads=8, head_dim=64, value_dim=64)
      >>> state.sums.shape, state.maxima.shape
      ((8, 130, 65), (8, 130))
      >>> prompt, state = mechanism.step(state, q[:9], k[:9], v[:9])
      >>> token, state = mechanism.step(state, q[9:], k[9:], v[9:])
      >>> bool(abs(token - whole[9:]).max() < 1e-5)
      True
    """

    _static = (
        "chunk_size",
        "sequence_axis",
        "batch_axis",
        "head_axis",
        "implementation",
        "exact_bandwidth",
    )

    def __init__(
        self,
        projection: ProjectionLike | None,
        feature_map: FeatureMapLike = "positive",
        chunk_size: SupportsIndex | None = None,
        sequence_axis: str | tuple[str, ...] | None = None,
        batch_axis: str | tuple[str, ...] | None = None,
        head_axis: str | tuple[str, ...] | None = None,
        implementation: Implementation | Sequence[Implementation] | None = None,
        exact_bandwidth: SupportsIndex | None = None,
        exact_keys: ExactKeysLike | KeyChoice | None = None,
    ) -> None:
        """Checks the fields, and replaces names by what they stand for.

        Raises:
          TypeError: If a field is of a wrong type.
          ValueError: If a field is out of range, or the fields do not fit together.
        """
        feature_map = as_feature_map(feature_map)
        w = None if projection is None else as_projection(projection)
        feature_map.check_norms(w)
        if exact_bandwidth is not None:
            check_estimates_softmax("exact_bandwidth", feature_map)
            exact_bandwidth = checks.integer("exact_bandwidth", exact_bandwidth, least=0)
        if chunk_size is None:
            chunk_size = CHUNK_SIZE_ON_GPUS if jax.default_backend() == "gpu" else CHUNK_SIZE
        else:
            chunk_size = checks.power_of_two("chunk_size", chunk_size)
        super().__init__(
            w,
            feature_map,
            chunk_size,
            checks.axis_names("sequence_axis", sequence_axis) or None,
            checks.axis_names("batch_axis", batch_axis) or None,
            checks.axis_names("head_axis", head_axis) or None,
            None if implementation is None else names_of(implementation),
            exact_bandwidth,
            None if exact_keys is None else KeyChoice.of(exact_keys),
        )

    def in_order(self, call: Call) -> bool:
        """Returns whether a call is causal or packed, or there is an exact band."""
        return call.in_order(self.exact_bandwidth)

    def attend_to(self, call: Call) -> Float[Array, "*batch T N D"]:
        """Returns ``random_feature_attention`` of a call."""
        return choose(self, call).attend(self, call)

    def init_for(self, call: Call) -> State:
        """Returns the state before any tokens, for tokens like those of a call.

        It has ``[*batch, K, num_features, D + 1]`` sums and ``[*batch, K, num_features]``
        maxima. With exact keys, it is an ``ExactKeysState`` of these and of the keys that are kept.
        With an exact band, it is an ``ExactBandState`` of either and of a window of the last
        ``exact_bandwidth`` keys.
        """
        return compiled(decoding.empty_state, self.feature_map)(self, call)

    def step_to(self, state: State, call: Call) -> tuple[Float[Array, "*batch T N D"], State]:
        """Attends to a state and, causally, to new tokens."""
        decoding.check_state(self, state, call)
        return compiled(decoding.step, self.feature_map)(self, state, call)

    def append(
        self,
        state: State,
        key: Float[ArrayLike, "*batch S K H"],
        value: Float[ArrayLike, "*batch S K D"],
        **options: Unpack[KeyOptions],
    ) -> State:
        """Returns the state with more keys, of any number.

        With an exact band the keys take the positions after those of the state, so the last of them
        form the band of the next query, as after a ``step``.

        Args:
          state: State of the keys before.
          key: ``[..., S, K, H]``.
          value: ``[..., S, K, D]``.
          **options: ``mask`` of the new keys, broadcastable to ``[..., K, 1, S]``, ``bias`` of the
            same shapes, ``scale`` and ``key_value_seq_lengths``; see ``random_feature_attention``.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not fit each other or the state, or devices share the length.

        Example:
          >>> import jax, simrf_jax
          >>> k, v = jax.random.normal(jax.random.key(0), (2, 10, 8, 64))
          >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
          >>> mechanism = simrf_jax.RandomFeatureMechanism(w)
          >>> state = mechanism.init(num_key_heads=8, head_dim=64, value_dim=64)
          >>> state = mechanism.append(state, k, v)
        """
        check_keywords("append", options, KeyOptions.__optional_keys__)
        call = Call.of(key, key, value, **options)  # Keys stand in for the queries.
        decoding.check_state(self, state, call)
        return compiled(decoding.append, self.feature_map)(self, state, call)

    def virtual_tokens(
        self,
        state: AttentionState,
        query: Float[ArrayLike, "*batch T N H"] | None = None,
        *,
        scale: Real[ArrayLike, ""] | None = None,
    ) -> VirtualTokens:
        r"""Returns m tokens; softmax attention to them is this attention to all keys of a state.

        Exponential features have logarithms :math:`w_i \cdot q + b_i`, up to a term that all
        features of a query share. With the state's maxima c and sums :math:`S_i =
        (\text{numerator}, \text{denominator})`, a query attends by softmax to

        .. math:: k_i = w_i, \quad v_i = S_i^\text{num} / S_i^\text{den}, \quad
            \text{bias}_i = b_i + c_i + \log S_i^\text{den}.

        The keys do not depend on the data, and each value is an average over all keys' values. So
        any softmax attention can serve a state, and any key-value cache can hold it: m tokens at
        any length. Other attention with bounded memory is also softmax attention to a few slots:
        see Peng et al. (2022), https://arxiv.org/abs/2110.02488.

        Args:
          state: State of the keys, from ``append`` or ``step``; with an exact band or exact keys,
            its field ``far``. It must have seen a key.
          query: ``[..., T, N, H]``, to add to the bias the term that all features of a query share.
            It cancels in the softmax, unless keys with exact weights join the tokens.
          scale: The scale that the keys of the state had, and queries will have; not zero.

        Returns:
          ``key`` ``[..., m, K, H]``, ``value`` ``[..., m, K, D]`` and ``bias``, ``[..., K, 1, m]``
          or ``[..., N, T, m]`` with a query, for ``jax.nn.dot_product_attention`` with this scale.
          It takes a bias for each query head: ``jnp.repeat(bias, N // K, axis=-3)``.

        Raises:
          TypeError: If the state is of another kind, or scale is not a number.
          ValueError: If the features are not exponentials, or scale is 0 or not finite.

        Example:
          >>> import jax, simrf_jax
          >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 50, 8, 64))
          >>> mechanism = simrf_jax.RandomFeatureMechanism(
          ...     simrf_jax.draw_projection(jax.random.key(1), 130, 64)
          ... )
          >>> state = mechanism.init(batch=(1,), num_key_heads=8, head_dim=64, value_dim=64)
          >>> tokens = mechanism.virtual_tokens(mechanism.append(state, k, v))
          >>> tokens.key.shape
          (1, 130, 8, 64)
          >>> out = jax.nn.dot_product_attention(q, tokens.key, tokens.value, bias=tokens.bias)
          >>> bool(abs(out - mechanism.attend(q, k, v)).max() < 1e-4)
          True
        """
        check_kind(state, AttentionState)
        return virtual_tokens(self, state, query, scale)


# Without its constructor, which would refuse the placeholders that JAX puts in place of leaves.
register(RandomFeatureMechanism)


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
    implementation: Implementation | Sequence[Implementation] | None = None,
    segment_ids: Integer[ArrayLike, "... T"] | None = None,
    chunk_size: SupportsIndex | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
    exact_bandwidth: SupportsIndex | None = None,
    exact_keys: ExactKeysLike | None = None,
) -> Float[Array, "*batch T N D"]:
    r"""Returns softmax attention estimated by random features, in time linear in the length.

    .. math::
        \operatorname{Att}(Q, K, V)_t = \frac{\phi(q_t)^\top \sum_s \phi(k_s) v_s^\top}
                                             {\phi(q_t)^\top \sum_s \phi(k_s)}

    with :math:`\phi` the features of the softmax kernel of queries and keys scaled by
    :math:`\sqrt{|\text{scale}|}`, and the queries by the sign of the scale. It replaces
    ``jax.nn.dot_product_attention`` and has the same layout, defaults and meaning of masks. It
    computes the estimator exactly at any scale of the inputs: it needs no epsilon and never
    overflows.

    For rotary embeddings, rotate queries and keys before the call. The kernel is then
    :math:`e^{\text{scale} \, q_t^\top R_{s-t} k_s}`. With Haar rotations the mean and the variance
    of its estimate depend only on relative positions, although each W sees absolute positions.
    Rotated features, which some linear attention uses, are not offered: they are not positive.

    Args:
      query: ``[..., T, N, H]``: T queries of N heads, with any leading batch shape.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      value: ``[..., S, K, D]``.
      projection: W, ``[num_features, H]`` shared by all heads, or ``[K, num_features, H]``, one
        for each key head and the queries that belong to it. An array, a
        ``Projection``, or what a hybrid map takes; None for a map that needs none.
      feature_map: A name, ``"positive"``, ``"hyperbolic"``, ``"trigonometric"``, ``"phase"`` (with
        evenly spaced phases), ``"relu"``, ``"elu"``, ``"angular_hybrid"``, ``"gaussian_hybrid"`` or
        ``"clustered_hybrid"``; an object of ``simrf_jax.feature_maps``, such as
        ``feature_maps.Phase(phases)``; or a function from (x, projection) to features, which
        becomes a ``feature_maps.Custom``. Features that may be negative (trigonometric, phase and
        hybrid ones) estimate the denominator with noise of either sign. Where it comes near zero,
        the output is meaningless.
      mask: Boolean, broadcastable to ``[..., N, T, S]``, True to attend. It must be the same for
        all queries: have a query axis of size 1, or be a NumPy array that is constant along it.
      bias: Added to the logits; same shapes and condition as the mask.
      scale: Multiplies the logits, one finite number of either sign; by default
        :math:`1/\sqrt H`.
      is_causal: True if query t attends only to keys s <= t. Later keys do not affect it, not even
        through rounding. Time stays linear in the length, and the backward pass recomputes the
        features instead of keeping them.
      query_seq_lengths: Integers of the batch shape (``(1,)`` if there is no batch); outputs from
        there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      implementation: ``"pallas_tpu"`` or ``"pallas_gpu"`` for fused Pallas kernels, ``"xla"`` for
        plain JAX, or a sequence of names, of which the first that supports the call is used. None
        uses the Pallas kernels on a TPU where they support the call, on a GPU in bidirectional
        attention without a band, and XLA elsewhere. The Pallas kernels compute features that are
        exponentials (positive, hyperbolic, optimal positive, calibrated and learned ones) and never
        write them to memory. They do not support sharded lengths, and can be differentiated once,
        in reverse mode: choose ``"xla"`` for forward-mode and second derivatives. The kernels for
        TPUs support bidirectional, causal and packed attention in bfloat16 or float32, with or
        without an exact band of up to 256 keys on each side. The gradients of W, a bias, the scale
        and the feature map come from XLA, in addition to the kernels. There, a vector whose squared
        length overflows counts as not finite. On a CPU the kernels are interpreted, which is for
        tests: choose ``"xla"`` for computations on the CPU of a TPU host. The kernels for GPUs
        support bidirectional attention in bfloat16 with heads of width 64 or 128, on GPUs of
        compute capability 9 (H100, H200, GH200), with jax 0.11 or newer. Where asked, they also
        support causal and packed attention and exact bands, with heads of width 64 and at most 128
        rows of W. Later tokens may change how causal outputs round, a key with a component
        above 1e15 counts as not finite, and a value only if it is infinite or NaN.
      segment_ids: Integers ``[..., T]`` of packed sequences, for self-attention (T = S): a query
        attends only to keys of its own segment. Neighbors with equal ids belong to one segment.
      chunk_size: Number of keys per chunk of causal or packed attention, a power of two; None for
        256 if the default backend is a GPU, and 64 otherwise.
      sequence_axis: The mesh axis, or a tuple of them, that shards the sequence. Leave it out for
        axes of type Explicit, which are part of the types of query, key and value. Name axes of
        type Auto here; otherwise XLA all-gathers the keys of causal and packed attention. The mesh
        is that of the inputs or of ``jax.set_mesh``. Inside a ``jax.shard_map`` over the axis, pass
        the device's own part of each array, but whole sequence lengths in query_seq_lengths and
        key_value_seq_lengths; the function cannot check there that the axis shards the length.
        Devices exchange only running sums, never keys or values: one maximum and one sum in
        bidirectional attention, otherwise a number of permutations that is logarithmic in the
        number of devices. With an exact band they also send their neighbors the keys within it.
      batch_axis: The axis of type Auto of the mesh of ``jax.set_mesh``, or a tuple of them, that
        shards the first batch axis. Only the kernels for TPUs use it. XLA cannot partition a
        kernel, so without it every device computes the whole batch. Leave it out inside a
        ``jax.shard_map`` over the axis. By default the kernels are used on several devices only if
        it and ``head_axis`` name all axes of the mesh.
      head_axis: The mesh axis, or a tuple of them, that shards the heads of queries and keys; see
        ``batch_axis``.
      exact_bandwidth: None, or a distance b, at least 0. Query t then weighs the keys from t - b to
        t + b (to t if causal) by :math:`e^{\text{scale} \, q_t^\top k_s}` itself, and all other
        visible keys by its estimate. Numerator and denominator each sum over both kinds of keys.
        Positions count from 0 in queries and keys. From b = T - 1 on this is softmax attention.
        Bidirectional attention then takes chunks of keys in order, as causal attention does. The
        feature map must estimate exp(x . y) itself: relu, elu and maps of the Gaussian kernel are
        refused, and custom functions are not checked. The caveat about features that may be
        negative applies here too. Over a sharded length, queries and keys must have the same
        length.
      exact_keys: None, or a number g: the g keys with the largest estimated mass then have exact
        weights for all queries. Features estimate the weights of all other keys, under the same
        normalizer. A few keys, such as attention sinks, cause most of the error of random features:
        in a trained encoder, 16 exact keys in place of 16 features make it 6 times smaller with an
        exact band, and 2 times smaller without one (``experiments.swap``). The mass of a key is the
        sum over queries of the attention weights that the features imply. The features must be
        positive; custom functions are not checked. Choosing takes one more pass over queries and
        keys. The same W chooses keys and estimates the rest, which biases the estimate a little.
        Each query affects the choice, and so the outputs of all others. If queries and keys have
        the same length, queries at hidden keys do not count; mark other padding by
        query_seq_lengths. ``simrf_jax.ExactKeys(g, by="score")`` scores keys without queries and
        without W, so there is no bias. In causal attention and in decoding each query then sees the
        g best of the keys before it. Positions, integers ``[g]`` or ``[*batch, g]``, counted from
        the end if negative, choose keys such as the first tokens, a class token or registers;
        positions beyond the keys choose none. Causal attention takes only scores and positions,
        packed attention that is not causal only positions, and decoding only scores. The feature
        map must estimate exp(x . y) itself, as for exact_bandwidth. Neither the Pallas kernels nor
        sharded lengths support exact keys.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype. Logits and exponentials are at least float32; the
      contractions over the length and over the features are in bfloat16 with float32 accumulation
      if the inputs are bfloat16. Queries that see no key get zeros. A query, key or value with a
      component that is NaN, infinite or above 1e31 turns the outputs of all queries that see it
      into NaN. It reaches no other output, and no gradient of another output: neither the past in
      causal attention, nor other segments, nor a query from which it is hidden.

    Raises:
      TypeError: If a dtype is wrong, or is_causal is neither True nor False.
      ValueError: If shapes do not match, a name is unknown, scale is not finite, exact_bandwidth is
        negative or needs another kernel than the feature map estimates, or the mask or the bias
        asks for something that linear attention cannot do; if sequence_axis is not an axis of a
        mesh, its devices do not divide the lengths, or queries and keys of causal attention then
        differ in length; if the implementation that is asked for does not support the call, or
        batch_axis or head_axis are then not axes of a mesh that divide the batch or the heads.

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
    call = Call.of(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
    )
    mechanism = RandomFeatureMechanism(
        projection,
        feature_map,
        chunk_size,
        sequence_axis,
        batch_axis,
        head_axis,
        implementation,
        exact_bandwidth,
        exact_keys,
    )
    if chunk_size is not None:
        check_chunks(chunk_size, mechanism.in_order(call))
    return mechanism.attend_to(call)


def check_chunks(chunk_size: SupportsIndex, in_order: bool) -> None:
    """Raises ``ValueError`` if ``chunk_size`` is given to a call without chunks."""
    if not in_order:
        raise ValueError(
            f"chunk_size is for causal or packed attention, got {chunk_size} with neither of them "
            "and without exact_bandwidth."
        )
