"""What both Flax adapters share: the reading of the keywords that Flax passes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike, DTypeLike

from simrf_jax.attention import random_feature_attention
from simrf_jax.features import FeatureMap, is_structured, log_feature_maps
from simrf_jax.projections import draw_projection, draw_stack


def draw_heads(
    key: jax.Array, num_heads: int | None, num_features: int, dim: int, **draw_options: Any
) -> jax.Array:
    """Draws ``[num_heads, num_features, dim]``, or ``[num_features, dim]`` if num_heads is None."""
    if num_heads is None:
        return draw_projection(key, num_features, dim, **draw_options)
    return draw_stack(jax.random.split(key, num_heads), num_features, dim, **draw_options)


def check_feature_map(feature_map: FeatureMap) -> None:
    """Accepts a feature map that takes the W that the adapters draw, one array for each head."""
    log_feature_maps(feature_map)
    if is_structured(feature_map):
        raise ValueError(
            f"feature_map={feature_map!r} takes a projection of several parts, which the adapters "
            "do not draw; call simrf_jax.random_feature_attention with it."
        )


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    projection: jax.Array,
    *,
    feature_map: FeatureMap,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    dropout_rate: float,
    deterministic: bool,
    dtype: DTypeLike | None,
    module: Any,
    is_causal: bool = False,
) -> jax.Array:
    """Random-feature attention called as Flax calls an ``attention_fn``."""
    if dropout_rate > 0 and not deterministic:
        raise ValueError(
            f"dropout_rate={dropout_rate}: random-feature attention never forms the attention "
            "weights, so it cannot drop them out. Set the attention's dropout_rate to 0."
        )
    if module is not None:
        raise ValueError(
            "sow_weights=True: random-feature attention never forms the attention weights, so "
            "there are none to sow."
        )
    if mask is not None:  # Flax makes float masks by default.
        mask = mask.astype(bool) if isinstance(mask, np.ndarray) else jnp.asarray(mask, bool)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    return random_feature_attention(
        query,
        key,
        value,
        jax.lax.stop_gradient(projection),
        feature_map=feature_map,
        mask=mask,
        bias=bias,
        is_causal=is_causal,
    )
