"""Random-feature attention for Flax Linen: ``attention_fn`` of ``MultiHeadDotProductAttention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from simrf_jax.features import FeatureMap
from simrf_jax.integrations.flax_attention import attend, check_feature_map, draw_heads


class RandomFeatureAttention(nn.Module):
    """Holds the projections of one layer and attends with them.

    Each key head has a W of its own, in the collection ``random_features``, drawn at ``init`` from
    the stream ``features`` (or ``params`` if there is none). To redraw, replace the collection by
    ``redraw_projections(key, variables["random_features"], coupling=...)``.

    Made inside another module's ``@nn.compact`` method, give it ``parent=None``, or Flax files its
    W next to the attention instead of below it. One instance given to several layers is one W.

    Attributes:
      num_features: Number of random features.
      coupling: As ``simrf_jax.draw_projection``.
      block: As ``simrf_jax.draw_projection``.
      rotation: As ``simrf_jax.draw_projection``.
      feature_map: As ``simrf_jax.random_feature_attention``, but for the hybrids.
      shared: One W for all heads.
      is_causal: Whether each query attends only to keys up to its own position; Linen has no flag
        for it, and a causal mask is refused.

    Raises:
      ValueError: When called, if a name is unknown, the mask is not a key-padding mask, or dropout
        sown attention weights or einsums of one's own are asked for.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import RandomFeatureAttention
      >>> attention = nn.MultiHeadDotProductAttention(
      ...     num_heads=8, attention_fn=RandomFeatureAttention(130)
      ... )
      >>> x = jnp.ones((2, 10, 512))
      >>> variables = attention.init(jax.random.key(0), x)
      >>> variables["random_features"]["attention_fn"]["projection"].shape
      (8, 130, 64)
      >>> attention.apply(variables, x).shape
      (2, 10, 512)
    """

    num_features: int
    coupling: str = "simplex"
    block: str = "regular"
    rotation: str = "haar"
    feature_map: FeatureMap = "positive"
    shared: bool = False
    is_causal: bool = False

    @nn.compact
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
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        **unused: Any,
    ) -> jax.Array:
        """Attends; ``query`` ``[..., T, N, H]``, ``key`` and ``value`` ``[..., S, K, H]``."""
        del unused  # Flax passes only the keywords named above.
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError(
                "qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls replace contractions "
                "that random-feature attention does not make."
            )
        check_feature_map(self.feature_map)
        num_heads, head_dim = key.shape[-2:]

        def draw() -> jax.Array:
            rng = self.make_rng("features")
            if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):  # From a jax.random.PRNGKey.
                rng = jax.random.wrap_key_data(rng)
            return draw_heads(
                rng,
                None if self.shared else num_heads,
                self.num_features,
                head_dim,
                coupling=self.coupling,
                block=self.block,
                rotation=self.rotation,
            )

        projection = self.variable("random_features", "projection", draw)
        return attend(
            query,
            key,
            value,
            projection.value,
            feature_map=self.feature_map,
            mask=mask,
            bias=bias,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            module=module,
            is_causal=self.is_causal,
        )
