"""Random-feature attention as a mechanism: with its projection, and token by token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax import checks, one_line
from simrf_jax.attention.banded.mechanism import Window, check_bandwidth, empty_window
from simrf_jax.attention.inputs.arguments import Arguments, Inputs
from simrf_jax.attention.inputs.masks import Lengths, Mask, Shape
from simrf_jax.attention.mechanism import (
    check_kind,
    check_step,
    flatten,
    new_tokens,
    no_tokens,
    unflatten,
)
from simrf_jax.attention.random_features.attention import (
    IMPLEMENTATIONS,
    Implementation,
    random_feature_attention,
)
from simrf_jax.attention.random_features.causal import CHUNK_SIZE, causal_attention
from simrf_jax.attention.random_features.exact_band import ExactBandState, Fields, check_band
from simrf_jax.attention.random_features.next_token import attend_to_next
from simrf_jax.attention.random_features.state import (
    AttentionState,
    HeadMaps,
    as_map_and_projection,
    lay_out,
    state_of,
)
from simrf_jax.features import FeatureMap, FeatureMapLike, as_feature_map, calls_function
from simrf_jax.projections import ProjectionLike, StructuredProjection


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["projection", "feature_map"],
    meta_fields=[
        "chunk_size",
        "sequence_axis",
        "batch_axis",
        "head_axis",
        "implementation",
        "exact_bandwidth",
    ],
)
@dataclasses.dataclass(frozen=True, eq=False)
class RandomFeatures:
    """Random-feature attention with a projection and a feature map.

    Attributes:
      projection: W, ``[num_features, H]`` for all heads, or ``[K, num_features, H]``, one for each
        key head; None for a map that needs none.
      feature_map: A name, an object of ``simrf_jax.feature_maps``, or a function.
      chunk_size: Keys that causal or packed attention takes at a time, a power of two; None for a
        default.
      sequence_axis: Mesh axis, or a tuple of them, that shards the length in ``attend``; see
        ``random_feature_attention``.
      batch_axis: Mesh axes that shard the batch, for kernels; see ``random_feature_attention``.
      head_axis: Mesh axes that shard the heads, for kernels.
      implementation: ``"xla"``, ``"pallas_tpu"`` or None in ``attend``; see
        ``random_feature_attention``. Steps of decoding always take XLA.
      exact_bandwidth: Distance over which queries see keys exactly, or None; see
        ``random_feature_attention``. The state of decoding is then an ``ExactBandState``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> mechanism = simrf_jax.RandomFeatures(w)
      >>> whole = mechanism.attend(q, k, v, is_causal=True)
      >>> state = mechanism.init(num_key_heads=8, head_dim=64, value_dim=64)
      >>> state.sums.shape, state.maxima.shape
      ((8, 130, 65), (8, 130))
      >>> prompt, state = mechanism.step(state, q[:9], k[:9], v[:9])
      >>> token, state = mechanism.step(state, q[9:], k[9:], v[9:])
      >>> bool(abs(token - whole[9:]).max() < 1e-5)
      True
    """

    projection: ProjectionLike | None
    feature_map: FeatureMapLike = "positive"
    chunk_size: SupportsIndex | None = None
    sequence_axis: str | tuple[str, ...] | None = None
    batch_axis: str | tuple[str, ...] | None = None
    head_axis: str | tuple[str, ...] | None = None
    implementation: Implementation | None = None
    exact_bandwidth: SupportsIndex | None = None

    def __repr__(self) -> str:
        return one_line.representation(self)

    def __post_init__(self) -> None:
        """Checks the fields, and replaces a name or a function by its feature map, a pytree."""
        checks.one_of("implementation", self.implementation, (*IMPLEMENTATIONS, None))
        for name in ("sequence_axis", "batch_axis", "head_axis"):
            checks.axis_names(name, getattr(self, name))
        if self.chunk_size is not None:
            checks.power_of_two("chunk_size", self.chunk_size)
        if self.exact_bandwidth is not None:
            checks.integer("exact_bandwidth", self.exact_bandwidth, least=0)
        if isinstance(self.feature_map, str) or callable(self.feature_map):
            object.__setattr__(self, "feature_map", as_feature_map(self.feature_map))

    def attend(
        self,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch S K H"],
        value: Float[ArrayLike, "*batch S K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        is_causal: bool | np.bool_ = False,
        query_seq_lengths: Lengths | None = None,
        key_value_seq_lengths: Lengths | None = None,
        segment_ids: Integer[ArrayLike, "... T"] | None = None,
    ) -> Float[Array, "*batch T N D"]:
        """Returns ``random_feature_attention`` of all tokens; see there for the arguments."""
        in_order = checks.boolean("is_causal", is_causal) or segment_ids is not None
        in_order = in_order or self.exact_bandwidth is not None
        return random_feature_attention(
            query,
            key,
            value,
            self.projection,
            feature_map=self.feature_map,
            mask=mask,
            bias=bias,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            implementation=self.implementation,
            segment_ids=segment_ids,
            chunk_size=self.chunk_size if in_order else None,
            sequence_axis=self.sequence_axis,
            batch_axis=self.batch_axis,
            head_axis=self.head_axis,
            exact_bandwidth=self.exact_bandwidth,
        )

    def init(
        self,
        *,
        batch: Sequence[SupportsIndex] = (),
        num_key_heads: SupportsIndex,
        head_dim: SupportsIndex,
        value_dim: SupportsIndex,
        dtype: DTypeLike = jnp.float32,
    ) -> AttentionState | ExactBandState:
        """Returns the state before the first token.

        Args:
          batch: Leading shape.
          num_key_heads: Number K of key heads.
          head_dim: Width H of the keys.
          value_dim: Width D of the values.
          dtype: Type of the queries, keys and values to come. The state is float32 at least.

        Returns:
          A state of ``[*batch, K, num_features, D + 1]`` sums and as many maxima. With an exact
          band, an ``ExactBandState`` of it and of a window of as many keys as the bandwidth.

        Raises:
          TypeError: If a number is not an integer or dtype is not floating.
          ValueError: If a number is below 1, head_dim does not fit the projection, or the feature
            map cannot stand beside an exact band.
        """
        tokens = no_tokens(
            batch=batch,
            num_key_heads=num_key_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
        )
        w, feature_map, bandwidth = self._checked()
        inputs, features = lay_out(tokens, w, feature_map, scaled=False)
        far = unflatten(AttentionState.empty(inputs, features), tokens.key.shape[:-3])
        if bandwidth is None:
            return far
        near = unflatten(empty_window(inputs, bandwidth), tokens.key.shape[:-3])
        return ExactBandState(near, far)

    def step(
        self,
        state: AttentionState | ExactBandState,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch T K H"],
        value: Float[ArrayLike, "*batch T K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        query_seq_lengths: Lengths | None = None,
        key_value_seq_lengths: Lengths | None = None,
    ) -> tuple[Float[Array, "*batch T N D"], AttentionState | ExactBandState]:
        """Attends to a state and, causally, to new tokens.

        One token at a time this is decoding, in time and memory that do not depend on how many
        there were; with a whole prompt it is the prefill, by the parallel form.

        Args:
          state: State of the tokens before.
          query: ``[..., T, N, H]``.
          key: ``[..., T, K, H]``.
          value: ``[..., T, K, D]``.
          mask: Boolean mask of the new keys, broadcastable to ``[..., N, 1, T]``; the same for
            query heads that share a key head.
          bias: Added to the logits; of the same shapes, with the same condition.
          scale: Multiplies the logits; by default ``H ** -0.5``.
          query_seq_lengths: Integers of the batch shape; outputs from there on are zero.
          key_value_seq_lengths: Integers of the batch shape; new keys from there on are hidden.

        Returns:
          The output ``[..., T, N, D]`` and the new state, of the same shapes.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not fit each other or the state, devices share the length, or the
            mask or the bias differ between heads that share keys.
        """
        arguments = new_tokens(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=scale,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
        )
        w, feature_map = self._check_state(state)
        chunk_size = CHUNK_SIZE if self.chunk_size is None else self.chunk_size
        chunk_size = checks.power_of_two("chunk_size", chunk_size)
        step = _step if calls_function(feature_map) else _compiled_step
        return step(state, arguments, w, feature_map, chunk_size=chunk_size)

    def append(
        self,
        state: AttentionState | ExactBandState,
        key: Float[ArrayLike, "*batch S K H"],
        value: Float[ArrayLike, "*batch S K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        key_value_seq_lengths: Lengths | None = None,
    ) -> AttentionState | ExactBandState:
        """Returns the state with more keys, of any number.

        With an exact band the keys take the positions after those of the state, so the last of them
        are the band of the next query, as after a ``step``.

        Args:
          state: State of the keys before.
          key: ``[..., S, K, H]``.
          value: ``[..., S, K, D]``.
          mask: Boolean mask of the new keys, broadcastable to ``[..., K, 1, S]``.
          bias: Added to the logits; of the same shapes.
          scale: Multiplies the logits; by default ``H ** -0.5``.
          key_value_seq_lengths: Integers of the batch shape; new keys from there on are hidden.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not fit each other or the state, or devices share the length.

        Example:
          >>> import jax, simrf_jax
          >>> k, v = jax.random.normal(jax.random.key(0), (2, 10, 8, 64))
          >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
          >>> mechanism = simrf_jax.RandomFeatures(w)
          >>> state = mechanism.init(num_key_heads=8, head_dim=64, value_dim=64)
          >>> state = mechanism.append(state, k, v)
        """
        arguments = new_tokens(
            key,  # In the place of queries, of which there are none.
            key,
            value,
            mask=mask,
            bias=bias,
            scale=scale,
            query_seq_lengths=None,
            key_value_seq_lengths=key_value_seq_lengths,
        )
        w, feature_map = self._check_state(state)
        append = _append if calls_function(feature_map) else _compiled_append
        return append(state, arguments, w, feature_map)

    def _checked(
        self,
    ) -> tuple[
        Float[Array, "*K num_features H"] | StructuredProjection | None, FeatureMap, int | None
    ]:
        """Returns W as an array, the feature map as an object, and the bandwidth as an integer."""
        feature_map, w = as_map_and_projection(self.feature_map, self.projection)
        if self.exact_bandwidth is None:
            return w, feature_map, None
        return w, feature_map, check_band(self.exact_bandwidth, feature_map)

    def _check_state(
        self, state: AttentionState | ExactBandState
    ) -> tuple[Float[Array, "*K num_features H"] | StructuredProjection | None, FeatureMap]:
        """Returns W and the feature map, and raises if a state is of another band or of none."""
        w, feature_map, bandwidth = self._checked()
        check_kind(state, AttentionState if bandwidth is None else ExactBandState)
        if bandwidth is not None and isinstance(state, ExactBandState):
            check_bandwidth(state.near, bandwidth)
        return w, feature_map


@jax.named_scope("random_feature_attention_step")
def _step(
    state: AttentionState | ExactBandState,
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    *,
    chunk_size: int,
) -> tuple[Float[Array, "*batch T N D"], AttentionState | ExactBandState]:
    """Attends to a state and, causally, to new tokens."""
    if isinstance(state, ExactBandState):
        return _step_beside_band(state, arguments, projection, feature_map, chunk_size)
    inputs, features = lay_out(arguments, projection, feature_map)
    check_step(arguments, inputs)
    batch = arguments.query.shape[:-3]
    before = _flat_sums(state, inputs, features, batch)
    if _is_one(arguments.query.shape[-3]):
        out, after = attend_to_next(inputs, features, before)
    else:
        out, after = causal_attention(inputs, features, before, chunk_size=chunk_size)
    return inputs.outputs(out), unflatten(after, batch)


def _step_beside_band(
    state: ExactBandState,
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    chunk_size: int,
) -> tuple[Float[Array, "*batch T N D"], ExactBandState]:
    """Attends to the band and to the sums over the keys that have left it."""
    inputs, features = lay_out(arguments, projection, feature_map, scaled=False)
    check_step(arguments, inputs)
    batch, length = arguments.query.shape[:-3], inputs.query.shape[1]
    seen, before = _flat(state, inputs, features, batch)
    bandwidth = seen.key.shape[1] - length
    fields = Fields.of(
        seen.put_into(inputs),
        feature_map,
        bandwidth=bandwidth,
        is_causal=True,
        history=bandwidth,
    )
    out, far = fields.attend(features, before, None, chunk_size=chunk_size)
    return fields.outputs(out), _after(seen, far, length, batch)


def _is_one(length: SupportsIndex) -> bool:
    """Returns whether a length is known to be one; symbolic ones, of jax.export, are not."""
    return isinstance(length, int) and length == 1


@jax.named_scope("random_feature_attention_append")
def _append(
    state: AttentionState | ExactBandState,
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
) -> AttentionState | ExactBandState:
    """Returns the state with more keys."""
    if isinstance(state, ExactBandState):
        return _append_beside_band(state, arguments, projection, feature_map)
    inputs, features = lay_out(arguments, projection, feature_map)
    batch = arguments.key.shape[:-3]
    before = _flat_sums(state, inputs, features, batch)
    return unflatten(before.merge(state_of(inputs, features)), batch)


def _append_beside_band(
    state: ExactBandState,
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
) -> ExactBandState:
    """Returns the state with more keys, which push as many out of the window."""
    inputs, features = lay_out(arguments, projection, feature_map, scaled=False)
    batch, length = arguments.key.shape[:-3], inputs.key.shape[1]
    seen, before = _flat(state, inputs, features, batch)
    leaving = seen.part(slice(length)).put_into(inputs)
    leaving = leaving.clean(scaled=True, fill_with_tokens=not feature_map.is_finite)
    return _after(seen, before.merge(state_of(leaving, features)), length, batch)


def _flat_sums(
    state: AttentionState, inputs: Inputs, features: HeadMaps, batch: Shape
) -> AttentionState:
    """Returns the sums of a state with one leading axis, if they fit the keys and values."""
    # Merged with the state of no keys, it varies over devices of shard_map as tokens do.
    empty = AttentionState.empty(inputs, features)
    return empty.merge(flatten(state, empty, batch))


def _flat(
    state: ExactBandState, inputs: Inputs, features: HeadMaps, batch: Shape
) -> tuple[Window, AttentionState]:
    """Returns the keys of a window and new ones after them, and the sums over those before."""
    bandwidth = state.near.key.shape[-3]
    expected = jax.eval_shape(lambda: empty_window(inputs, bandwidth))
    near = flatten(state.near, expected, batch)
    return near.followed_by(inputs), _flat_sums(state.far, inputs, features, batch)


def _after(seen: Window, far: AttentionState, length: int, batch: Shape) -> ExactBandState:
    """Returns the state after as many new keys, which pushed as many out of the window."""
    near = seen.part(slice(length, None))
    return ExactBandState(unflatten(near, batch), unflatten(far, batch))


# As in random_feature_attention, a user's function is not compiled.
_compiled_step = jax.jit(_step, static_argnames=("chunk_size",), inline=True)
_compiled_append = jax.jit(_append, inline=True)
