"""Near and far field, each normalized separately: the attention of FMMformers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from simrf_jax._src import checks, one_line
from simrf_jax._src.attention.banded.band import Band
from simrf_jax._src.attention.banded.window import Window
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inputs.masks import Lengths, Mask
from simrf_jax._src.attention.mechanism import Mechanism, check_kind
from simrf_jax._src.attention.random_feature_attention import RandomFeatureMechanism, check_chunks
from simrf_jax._src.attention.random_features.decoding import State
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.projections import ProjectionLike

# Weights of fields and heads, which may be nested tuples or lists of numbers.
Weights: TypeAlias = (
    Real[ArrayLike, "..."]
    | Sequence[Real[ArrayLike, "..."]]
    | Sequence[Sequence[Real[ArrayLike, ""]]]
)


class BlendState(NamedTuple):
    """The states of the near and far fields.

    Attributes:
      near: The window of the near field.
      far: The state of each feature map of the far field.
    """

    near: Window
    far: tuple[State, ...]

    def __repr__(self) -> str:
        return one_line.representation(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Blend(Mechanism[BlendState]):
    """Near and far field, each normalized separately, and their weights: FMM attention.

    Attributes:
      near: The near field.
      far: Far fields, one for each feature map.
      near_weight: Weight of the near field, broadcastable to ``[N]``.
      far_weights: Weights of the far fields: one number, ``[L]``, or broadcastable to ``[L, N]``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 8, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> near, far = simrf_jax.Band(4), (simrf_jax.RandomFeatureMechanism(w),)
      >>> blend = simrf_jax.fmm.Blend(near, far, near_weight=0.5, far_weights=0.5)
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
    far: tuple[RandomFeatureMechanism, ...]
    near_weight: Weights = 1.0
    far_weights: Weights = 1.0

    def __repr__(self) -> str:
        return one_line.representation(self)

    def in_order(self, call: Call) -> bool:
        """Returns True: the near field is a band."""
        return self.near.in_order(call)

    def attend_to(self, call: Call) -> Float[Array, "*batch T N D"]:
        """Returns ``fmm_attention`` of a call."""
        near = self.near.attend_to(call)
        far = [field.attend_to(call) for field in self.far]
        return blend(near, far, self.near_weight, self.far_weights)

    def init_for(self, call: Call) -> BlendState:
        """Returns the states of all fields before tokens like those of a call."""
        near = self.near.init_for(call)
        return BlendState(near, tuple(field.init_for(call) for field in self.far))

    def step_to(
        self, state: BlendState, call: Call
    ) -> tuple[Float[Array, "*batch T N D"], BlendState]:
        """Attends to the states and, causally, to new tokens."""
        check_kind(state, BlendState)
        if len(state.far) != len(self.far):
            raise ValueError(
                f"state must be of {len(self.far)} feature maps, got one of {len(state.far)}."
            )
        near, window = self.near.step_to(state.near, call)
        steps = [field.step_to(one, call) for field, one in zip(self.far, state.far, strict=True)]
        out = blend(near, [far for far, _ in steps], self.near_weight, self.far_weights)
        return out, BlendState(window, tuple(after for _, after in steps))


def fmm_attention(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    value: Float[ArrayLike, "*batch S K D"],
    projections: Sequence[ProjectionLike | None],
    *,
    bandwidth: SupportsIndex,
    near_weight: Weights = 1.0,
    far_weights: Weights = 1.0,
    feature_maps: Sequence[FeatureMapLike] = ("positive",),
    mask: Mask | None = None,
    bias: Float[ArrayLike, " ..."] | None = None,
    scale: Real[ArrayLike, ""] | None = None,
    is_causal: bool | np.bool_ = False,
    query_seq_lengths: Lengths | None = None,
    key_value_seq_lengths: Lengths | None = None,
    segment_ids: Integer[ArrayLike, "... T"] | None = None,
    chunk_size: SupportsIndex | None = None,
    block_size: SupportsIndex | None = None,
    sequence_axis: str | tuple[str, ...] | None = None,
) -> Float[Array, "*batch T N D"]:
    r"""Returns exact attention to nearby keys plus random-feature attention to all keys.

    .. math::
        \hat V = w \operatorname{Near}(Q, K, V)
            + \sum_{l=1}^L w_l \frac{\phi_l(Q) (\phi_l(K)^\top V)}{\phi_l(Q) \phi_l(K)^\top 1}

    with :math:`\operatorname{Near}` the ``banded_attention`` of a bandwidth and each further term
    the ``random_feature_attention`` of a feature map. Each term is normalized separately, and all
    take time linear in the length. FMMformers learn the weights and keep them positive by a
    sigmoid, as ``FMMAttention`` of ``simrf_jax.integrations`` does; this function uses the weights
    as given.

    Args:
      query: ``[..., T, N, H]``: T queries of N heads, with any leading batch shape.
      key: ``[..., S, K, H]``, with N a multiple of K (grouped queries).
      value: ``[..., S, K, D]``.
      projections: One W for each feature map, ``[num_features, H]`` or ``[K, num_features, H]``;
        None for a map that needs none.
      bandwidth: Distance over which the near field reaches, at least 0.
      near_weight: w, broadcastable to ``[N]``.
      far_weights: :math:`w_l`, one number, ``[L]``, or broadcastable to ``[L, N]``.
      feature_maps: The L feature maps, as names, objects or functions; see
        ``random_feature_attention``.
      mask: Boolean mask of the keys, broadcastable to ``[..., N, T, S]``, the same for all queries;
        see ``random_feature_attention``.
      bias: Added to the logits of both fields; same shapes and condition as the mask.
      scale: Multiplies the logits; by default :math:`1/\sqrt H`.
      is_causal: True if query t attends only to keys s <= t.
      query_seq_lengths: Integers of the batch shape; outputs from there on are zero.
      key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
      segment_ids: Integers ``[..., T]`` of packed sequences, each of which attends only to itself.
      chunk_size: Number of keys per chunk of causal or packed far fields, a power of two; None for
        256 if the default backend is a GPU, and 64 otherwise.
      block_size: Queries that the near field handles together; None for a default.
      sequence_axis: The mesh axis, or a tuple of them, that shards the length; queries and keys
        must have the same length. See ``random_feature_attention``.

    Returns:
      ``[..., T, N, D]`` in the inputs' dtype.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If there is not one projection for each feature map, a weight has the wrong shape,
        or ``random_feature_attention`` or ``banded_attention`` raises it.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1_000, 12, 64))
      >>> w = simrf_jax.draw_projection(jax.random.key(1), 130, 64)
      >>> out = simrf_jax.fmm.fmm_attention(
      ...     q, k, v, (w, None), bandwidth=32, feature_maps=("positive", "elu"), near_weight=0.5,
      ...     far_weights=(0.3, 0.2),
      ... )
      >>> out.shape
      (2, 1000, 12, 64)

    References:
      Nguyen et al., FMMformer: Efficient and Flexible Transformers via Decomposed Near-field and
      Far-field Attention (NeurIPS 2021), https://arxiv.org/abs/2108.02347
    """
    check_feature_maps(projections, feature_maps)
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
    if chunk_size is not None:
        check_chunks(chunk_size, call.in_order())
    far = (
        RandomFeatureMechanism(w, feature_map, chunk_size, sequence_axis)
        for w, feature_map in zip(projections, feature_maps, strict=True)
    )
    near = Band(bandwidth, block_size, sequence_axis)
    return Blend(near, tuple(far), near_weight, far_weights).attend_to(call)


def check_feature_maps(
    projections: Sequence[ProjectionLike | None], feature_maps: Sequence[FeatureMapLike]
) -> None:
    """Raises unless there is one projection for each feature map."""
    for name, given in (("projections", projections), ("feature_maps", feature_maps)):
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"{name} must be a tuple or a list, got {type(given).__name__}.")
    if len(projections) != len(feature_maps):
        raise ValueError(
            "projections must hold one for each feature map (None for a map that needs none), got "
            f"{len(projections)} for {len(feature_maps)}."
        )


def blend(
    near: Float[Array, "*lead N D"],
    far: Sequence[Float[Array, "*lead N D"]],
    near_weight: Weights,
    far_weights: Weights,
) -> Float[Array, "*lead N D"]:
    """Returns the weighted sum of the outputs ``[..., N, D]`` of both fields."""
    *lead, heads, _ = near.shape
    compute = np.promote_types(near.dtype, jnp.float32)

    def weigh(
        out: Float[Array, "*lead N D"], weight: Float[Array, " N"]
    ) -> Float[Array, "*lead N D"]:
        out = jnp.where(jnp.isnan(out), 0, out).astype(compute)
        return out * weight.reshape((1,) * len(lead) + (heads, 1)).astype(compute)

    out = weigh(near, _weights("near_weight", near_weight, (heads,)))
    for each, weight in zip(
        far, _weights("far_weights", far_weights, (len(far), heads)), strict=True
    ):
        out += weigh(each, weight)
    # Last, because an earlier NaN would reach the gradients of the weights: 0 * NaN is not 0.
    poisoned = functools.reduce(jnp.logical_or, map(jnp.isnan, (near, *far)))
    return jnp.where(poisoned, jnp.nan, out).astype(near.dtype)


def _weights(name: str, given: Weights, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
    given = jnp.asarray(given)
    if not jnp.issubdtype(given.dtype, jnp.inexact):
        given = given.astype(jnp.float32)
    given = checks.floating(name, given)
    # A single axis is that of the feature maps, even if the number of heads is the same.
    by_axis = given[:, None] if given.ndim == 1 < len(shape) else given
    try:
        return jnp.broadcast_to(by_axis, shape)
    except ValueError:
        axes = "[heads]" if len(shape) == 1 else "[feature maps, heads]"
        raise ValueError(
            f"{name} must be broadcastable to {axes} = {shape}, got shape {given.shape}."
        ) from None
