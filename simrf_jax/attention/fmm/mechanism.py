"""Near and far field together as a mechanism: with all that both hold, and token by token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax import one_line
from simrf_jax.attention.banded.mechanism import Band, Window
from simrf_jax.attention.fmm.attention import Weights, blend
from simrf_jax.attention.inputs.masks import Lengths, Mask
from simrf_jax.attention.mechanism import Mechanism, check_kind
from simrf_jax.attention.random_features.mechanism import RandomFeatures
from simrf_jax.attention.random_features.state import AttentionState


class BlendState(NamedTuple):
    """The state of near and far field.

    Attributes:
      near: The window of the near field.
      far: The state of each feature map of the far field.
    """

    near: Window
    far: tuple[AttentionState, ...]

    def __repr__(self) -> str:
        return one_line.representation(self)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["near", "far", "near_weight", "far_weights"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Blend:
    """Near and far field, each normalised by itself, and their weights: FMM attention.

    Attributes:
      near: The near field.
      far: Far fields, one for each feature map.
      near_weight: Weight of the near field, broadcastable to ``[N]``.
      far_weights: Weights of the far fields: one number, ``[L]``, or broadcastable to ``[L, N]``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> near, far = simrf_jax.Band(4), (simrf_jax.RandomFeatures(w),)
      >>> blend = simrf_jax.Blend(near, far, near_weight=0.5, far_weights=0.5)
      >>> whole = blend.attend(q, k, v, is_causal=True)
      >>> state = blend.init(num_key_heads=8, head_dim=64, value_dim=64)
      >>> prompt, state = blend.step(state, q[:9], k[:9], v[:9])
      >>> token, state = blend.step(state, q[9:], k[9:], v[9:])
      >>> bool(abs(token - whole[9:]).max() < 1e-5)
      True

    References:
      Nguyen et al., FMMformer: Efficient and Flexible Transformers via Decomposed Near-field and
      Far-field Attention (NeurIPS 2021), https://arxiv.org/abs/2108.02347
    """

    near: Band
    far: tuple[RandomFeatures, ...]
    near_weight: Weights = 1.0
    far_weights: Weights = 1.0

    def __repr__(self) -> str:
        return one_line.representation(self)

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
        """Returns ``fmm_attention`` of all tokens; see there for the arguments."""
        near, *far = (
            field.attend(
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
            for field in self._fields()
        )
        return blend(near, far, self.near_weight, self.far_weights)

    def init(
        self,
        *,
        batch: Sequence[SupportsIndex] = (),
        num_key_heads: SupportsIndex,
        head_dim: SupportsIndex,
        value_dim: SupportsIndex,
        dtype: DTypeLike = jnp.float32,
    ) -> BlendState:
        """Returns the state before the first token; see ``RandomFeatures.init``."""
        near, *far = (
            field.init(
                batch=batch,
                num_key_heads=num_key_heads,
                head_dim=head_dim,
                value_dim=value_dim,
                dtype=dtype,
            )
            for field in self._fields()
        )
        return BlendState(near, tuple(far))

    def step(
        self,
        state: BlendState,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch T K H"],
        value: Float[ArrayLike, "*batch T K D"],
        *,
        mask: Mask | None = None,
        bias: Float[ArrayLike, " ..."] | None = None,
        scale: Real[ArrayLike, ""] | None = None,
        query_seq_lengths: Lengths | None = None,
        key_value_seq_lengths: Lengths | None = None,
    ) -> tuple[Float[Array, "*batch T N D"], BlendState]:
        """Attends to a state and, causally, to new tokens; see ``RandomFeatures.step``.

        Raises:
          TypeError: If a dtype is wrong or the state is of another kind.
          ValueError: If shapes do not fit each other or the state.
        """
        check_kind(state, BlendState)
        if len(state.far) != len(self.far):
            raise ValueError(
                f"state must be of {len(self.far)} feature maps, got one of {len(state.far)}."
            )
        steps = [
            field.step(
                before,
                query,
                key,
                value,
                mask=mask,
                bias=bias,
                scale=scale,
                query_seq_lengths=query_seq_lengths,
                key_value_seq_lengths=key_value_seq_lengths,
            )
            for field, before in zip(self._fields(), (state.near, *state.far), strict=True)
        ]
        (near, *far), (window, *after) = zip(*steps, strict=True)
        return blend(near, far, self.near_weight, self.far_weights), BlendState(
            window, tuple(after)
        )

    def _fields(self) -> tuple[Mechanism[Any], ...]:
        return (self.near, *self.far)
