"""Exact attention to a band of keys and random features for all others, under one normalizer.

Query t sees the keys s < t - bandwidth by their features. Once all keys are moved ``bandwidth``
positions later, these are the keys before position t, so the scan of causal attention reads them,
and nothing leaks from the future. The scan of the reversed sequence reads the keys after the band.
No sum is the difference of two sums, so the far field keeps its digits however small it is.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Integer

from simrf_jax._src import one_line
from simrf_jax._src.attention.banded.softmax import (
    QueryBlocks,
    attend_in_windows,
    cut,
    sum_in_windows,
)
from simrf_jax._src.attention.banded.window import Window
from simrf_jax._src.attention.estimator import HeadMaps, KeyChoice
from simrf_jax._src.attention.inputs.call import Inputs
from simrf_jax._src.attention.random_features.causal import (
    Tokens,
    in_units_of_the_kernel,
    one_key_for_each_query,
    scan,
    scan_both_ways,
)
from simrf_jax._src.attention.random_features.exact_keys import SharedKeys
from simrf_jax._src.attention.random_features.kept_keys import Division, ExactKeysState
from simrf_jax._src.attention.random_features.state import (
    AttentionState,
    Readout,
    state_of,
)
from simrf_jax._src.features import FeatureMap


class ExactBandState(NamedTuple):
    """The state of random-feature attention with an exact band.

    Attributes:
      near: The last ``bandwidth`` keys and values.
      far: Sums over the keys before them; with ``exact_keys``, some of these keys and sums over
        the others.
    """

    near: Window
    far: AttentionState | ExactKeysState

    def __repr__(self) -> str:
        return one_line.representation(self)


class Fields(NamedTuple):
    """The keys that queries see exactly, and those that they see by random features.

    Attributes:
      near: Queries and keys that are not scaled.
      blocks: Blocks of the queries and their windows of keys.
      segments: ``[B, T]``, segments of the queries, or None.
      earlier: The same queries, scaled, each paired with the last key of the band: it sees the keys
        before that one.
      later: The same queries, each paired with the first key of the band: it sees the keys after
        that one. None if attention is causal.
      trailing: Keys after those of ``later``, which all queries see; empty unless there are more
        keys than queries.
    """

    near: Inputs
    blocks: QueryBlocks
    segments: Integer[Array, "B T"] | None
    earlier: Inputs
    later: Inputs | None
    trailing: Inputs

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        feature_map: FeatureMap,
        *,
        bandwidth: int,
        is_causal: bool,
        history: int = 0,
        hidden: Bool[Array, "B S K"] | None = None,
    ) -> Fields:
        """Splits keys into those inside the band and those outside it.

        Args:
          inputs: Queries and keys that are not scaled.
          feature_map: The feature map.
          bandwidth: Distance over which a query sees keys exactly.
          is_causal: True if queries see no later keys.
          history: Keys before the position of the first query.
          hidden: ``[B, S, K]``, True at keys to leave out of the far field; None for none.
        """
        length, key_length = inputs.query.shape[1], inputs.key.shape[1]
        blocks = cut(length, key_length, bandwidth, is_causal, history=history)
        segments = inputs.segments
        if segments is not None:
            segments = segments[:, history:][:, :length]
        far = inputs.clean(scaled=True, fill_with_tokens=not feature_map.is_finite)
        if hidden is not None:
            far = far.without(hidden)
        earlier = one_key_for_each_query(far, history - bandwidth)
        later = None if is_causal else one_key_for_each_query(far, history + bandwidth)
        end = history + bandwidth + length
        trailing = dataclasses.replace(
            far,
            key=far.key[:, end:],
            value=far.value[:, end:],
            key_log_weights=far.key_log_weights[:, end:],
        )
        return cls(inputs, blocks, segments, earlier, later, trailing)

    def attend(
        self,
        features: HeadMaps,
        before: AttentionState | ExactKeysState,
        after: AttentionState | None,
        *,
        chunk_size: int,
        more: Readout | None = None,
    ) -> tuple[Float[Array, "B T K G D"], AttentionState | ExactKeysState]:
        r"""Lets each query attend to the keys of its band and to all others.

        .. math::
            o_t = \frac{\sum_{s \in N_t} e^{\ell_{ts}} v_s
                        + \sum_{s \in F_t} \phi(q_t)^\top \phi(k_s) v_s}
                       {\sum_{s \in N_t} e^{\ell_{ts}} + \sum_{s \in F_t} \phi(q_t)^\top \phi(k_s)}

        Args:
          features: Feature maps.
          before: State of the keys before those of ``earlier``.
          after: State of the keys after those of ``later``; None if attention is causal.
          chunk_size: Number of keys per chunk, a power of two.
          more: Sums over other keys.

        Returns:
          ``[B, T, K, G, D]`` in the logits' dtype, zeros where no key is visible; and the state of
          all keys before the band of the next query.
        """
        readout = Readout(*sum_in_windows(self.near, self.blocks))
        earlier, divided = self.earlier, None
        if isinstance(before, ExactKeysState):
            divided = Division.of(
                earlier,
                self.segments,
                features,
                before.kept,
                chunk_size=chunk_size,
                with_own_key=False,
            )
            readout, earlier, before = readout.add(divided.near), divided.far, before.far
        tokens = Tokens.of(earlier, self.segments)
        if self.later is None or after is None:
            read, far_state = scan(
                tokens, before, features, chunk_size=chunk_size, with_own_key=False
            )
        else:
            later = Tokens.of(self.later, self.segments)
            read, far_state = scan_both_ways(
                tokens, later, before, after, features, chunk_size=chunk_size, with_own_key=False
            )
        readout = in_units_of_the_kernel(read).add(readout)
        if more is not None:
            readout = readout.add(more)
        state = far_state if divided is None else ExactKeysState(divided.kept, far_state)
        return readout.outputs(), state


def attend_with_band(
    inputs: Inputs,
    features: HeadMaps,
    choice: KeyChoice | None,
    *,
    bandwidth: int,
    is_causal: bool,
    chunk_size: int,
) -> Float[Array, "*batch T N D"]:
    """Attends to tokens that are all on one device.

    Args:
      inputs: Queries and keys that are not scaled.
      features: Feature maps.
      choice: Keys that queries see exactly outside the band too, or None.
      bandwidth: Distance over which a query sees keys exactly.
      is_causal: True if queries see no later keys.
      chunk_size: Number of keys per chunk of the far field, a power of two.
    """
    lengths = inputs.query.shape[1], inputs.key.shape[1]
    are_known = all(isinstance(length, int) for length in lengths)  # Not symbolic, of jax.export.
    if are_known and bandwidth >= max(lengths) - 1:  # No key is left to the features.
        return inputs.outputs(attend_in_windows(inputs, cut(*lengths, bandwidth, is_causal)))
    feature_map, hidden, more = features.feature_map, None, None
    keeps = choice is not None and choice.keeps(is_causal=is_causal)
    if choice is not None and not keeps:
        scaled = inputs.clean(scaled=True, fill_with_tokens=not feature_map.is_finite)
        exact = SharedKeys.of(scaled, features, choice)
        hidden = exact.among(inputs.key)
        more = exact.read(scaled, is_causal=is_causal, bandwidth=bandwidth)
    fields = Fields.of(inputs, feature_map, bandwidth=bandwidth, is_causal=is_causal, hidden=hidden)
    empty = AttentionState.empty(fields.earlier, features)
    after = None if is_causal else empty
    if after is not None and fields.trailing.key.shape[1] > 0:
        after = state_of(fields.trailing, features)
    before: AttentionState | ExactKeysState = empty
    if choice is not None and keeps:
        before = ExactKeysState.empty(fields.earlier, features, choice.count)
    out, _ = fields.attend(features, before, after, chunk_size=chunk_size, more=more)
    return fields.earlier.outputs(out)
