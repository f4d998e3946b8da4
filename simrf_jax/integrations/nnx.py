"""Random-feature attention for Flax NNX: an ``attention_fn`` for ``nnx.MultiHeadAttention``."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.features import FeatureMap
from simrf_jax.integrations.flax_attention import attend, check_feature_map, draw_heads


class RandomProjection(nnx.Variable):
    """W: part of the model's state, and of its checkpoints, but no parameter."""


class RandomFeatureAttention(nnx.Module):
    """Holds the projections of one layer and attends with them.

    Each key head has a W of its own, drawn from ``rngs.features()``. To redraw a model, update it
    with ``redraw_projections(key, nnx.state(model, RandomProjection), coupling=...)``.

    Args:
      num_heads: Number of key heads.
      head_dim: Width of a head.
      num_features: Number of random features.
      coupling: As ``simrf_jax.draw_projection``.
      block: As ``simrf_jax.draw_projection``.
      rotation: As ``simrf_jax.draw_projection``.
      feature_map: As ``simrf_jax.random_feature_attention``, but for the hybrids.
      shared: One W for all heads.
      rngs: Source of the key; a ``features`` stream if it has one, else its default.

    Raises:
      ValueError: If a name is unknown; when called, if the mask is not a key-padding mask or
        dropout or sown attention weights are asked for.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import RandomFeatureAttention
      >>> rngs = nnx.Rngs(0)
      >>> attention = nnx.MultiHeadAttention(
      ...     8, 512, decode=False, rngs=rngs,
      ...     attention_fn=RandomFeatureAttention(8, 64, 130, rngs=rngs),
      ... )
      >>> attention(jnp.ones((2, 10, 512))).shape
      (2, 10, 512)
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_features: int,
        *,
        coupling: str = "simplex",
        block: str = "regular",
        rotation: str = "haar",
        feature_map: FeatureMap = "positive",
        shared: bool = False,
        rngs: nnx.Rngs,
    ):
        check_feature_map(feature_map)
        self.feature_map = feature_map
        heads = None if shared else checks.positive_int("num_heads", num_heads)
        self.projection = RandomProjection(
            draw_heads(
                rngs.features(),
                heads,
                num_features,
                head_dim,
                coupling=coupling,
                block=block,
                rotation=rotation,
            )
        )

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        module: Any = None,
        is_causal: bool = False,
        **unused: Any,
    ) -> jax.Array:
        """Attends; ``query`` ``[..., T, N, H]``, ``key`` and ``value`` ``[..., S, K, H]``."""
        del unused  # Dropout's key and layout, and a precision that the numbers here do not need.
        return attend(
            query,
            key,
            value,
            self.projection[...],
            feature_map=self.feature_map,
            mask=mask,
            bias=bias,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            module=module,
            is_causal=is_causal,
        )
