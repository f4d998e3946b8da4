"""Random-feature attention for Flax Linen: ``attention_fn`` of ``MultiHeadDotProductAttention``."""

from __future__ import annotations

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from simrf_jax.features import FeatureMap
from simrf_jax.integrations import flax_attention
from simrf_jax.integrations.flax_attention import Method
from simrf_jax.projections import Projection


class _Adapter(nn.Module):
    """A method of attention, called as Flax calls an ``attention_fn``, and its cache.

    Subclasses have the fields ``is_causal``, ``factored_masks``, ``decode`` and ``sequence_axis``.
    """

    @abc.abstractmethod
    def _method(self, num_heads: int, head_dim: int) -> Method:
        """The attention, with its arrays."""

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
        call = flax_attention.read(
            query,
            key,
            value,
            is_causal=self.is_causal or self.decode,
            factored_masks=self.factored_masks,
            mask=mask,
            bias=bias,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            module=module,
        )
        method = self._method(*key.shape[-2:])
        if not self.decode:
            return flax_attention.attend(method, call)
        # As in Flax's own cache, the call that makes it does not count.
        started = self.has_variable("cache", "state")
        cache = self.variable(
            "cache", "state", functools.partial(flax_attention.init_state, method, call)
        )
        out, state = flax_attention.step(method, cache.value, call)
        if started:
            cache.value = state
        return out

    def _key(self) -> jax.Array:
        """A typed key to draw W from."""
        key = self.make_rng("features")
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return key
        return jax.random.wrap_key_data(key)  # From a jax.random.PRNGKey.


class RandomFeatureAttention(_Adapter):
    """Holds the projections of one layer and attends with them.

    Each key head has a W of its own, in the collection ``random_features``, drawn at ``init`` from
    the stream ``features`` (or ``params`` if there is none). To redraw, replace the collection by
    ``redraw_projections(key, variables["random_features"], coupling=...)``.

    Made inside another module's ``@nn.compact`` method, give it ``parent=None``, or Flax files its
    W next to the attention instead of below it. One instance given to several layers is one W, and
    one cache: it cannot decode.

    To decode, in time and memory that do not depend on how many tokens there were, set ``decode``
    here and leave that of Flax's attention off. Then ``init`` makes an empty state in the
    collection ``cache``, and ``model.apply(variables, tokens, mutable=["cache"])`` takes first the
    prompt, of any length, and then token by token.

    Attributes:
      num_features: Number of random features; None for a map that needs no W.
      coupling: As ``simrf_jax.draw_projection``, also for both bases of a hybrid.
      block: As ``simrf_jax.draw_projection``.
      rotation: As ``simrf_jax.draw_projection``.
      feature_map: As ``simrf_jax.random_feature_attention``, but for ``"clustered_hybrid"``.
      num_weights: Random vectors that estimate the weight of a hybrid, by default 8; the time and
        the state of hybrids grow with their product with num_features.
      shared: One W for all heads.
      is_causal: Whether each query attends only to keys up to its own position.
      factored_masks: Masks with a query axis are products of a mask of queries, a mask of keys and,
        with is_causal, the causal mask, as ``nn.make_attention_mask``, ``make_causal_mask`` and
        ``combine_masks`` make them. A query that sees no key gets zeros. A mask that is no such
        product raises where its values are known, and makes the output NaN under ``jit``. Reading
        them takes O(T S) memory: for long sequences pass masks of the keys alone.
      decode: Whether calls bring the next tokens of sequences in the cache.
      sequence_axis: As ``simrf_jax.random_feature_attention``.

    Raises:
      ValueError: When called, if a name is unknown, the mask is none that linear attention can
        honour, or dropout, sown attention weights or einsums of one's own are asked for.

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

    num_features: int | None
    coupling: str = "simplex"
    block: str = "regular"
    rotation: str = "haar"
    feature_map: FeatureMap = "positive"
    num_weights: int | None = None
    shared: bool = False
    is_causal: bool = False
    factored_masks: bool = False
    decode: bool = False
    sequence_axis: str | tuple[str, ...] | None = None

    def _method(self, num_heads: int, head_dim: int) -> Method:
        flax_attention.check_feature_maps((self.feature_map,), num_weights=self.num_weights)
        if self.num_features is None:
            return flax_attention.random_feature_method(None, self.feature_map, self.sequence_axis)

        def draw() -> Projection | None:
            return flax_attention.draw_heads(
                self._key(),
                None if self.shared else num_heads,
                self.num_features,
                head_dim,
                feature_map=self.feature_map,
                num_weights=self.num_weights,
                coupling=self.coupling,
                block=self.block,
                rotation=self.rotation,
            )

        w = self.variable("random_features", "projection", draw).value
        return flax_attention.random_feature_method(w, self.feature_map, self.sequence_axis)


class FMMAttention(_Adapter):
    r"""The attention of FMMformers: a near field, a far field, and their learned weights.

    .. math:: \hat V = \sigma(a) \operatorname{Near} + \sum_l \sigma(b_l) \operatorname{Far}_l

    as ``simrf_jax.fmm_attention``. Each key head has a ``near_logit`` a and ``far_logits`` b of its
    own, parameters that start at 0, and a W for each feature map, all in ``projections`` of the
    collection ``random_features``. All else is as in ``RandomFeatureAttention``.

    Attributes:
      num_features: Number of random features, or a tuple of one number for each feature map; None
        for a map that needs no W.
      bandwidth: As ``simrf_jax.banded_attention``.
      feature_maps: Of the far field.
      coupling: As ``RandomFeatureAttention``, and so the others.
      block: Likewise.
      rotation: Likewise.
      num_weights: Likewise.
      shared: Likewise.
      is_causal: Likewise.
      factored_masks: Likewise.
      decode: Likewise; the cache holds the last ``bandwidth`` keys and a state for each map.
      sequence_axis: Likewise.

    Raises:
      TypeError: When called, if feature_maps is no tuple.
      ValueError: When called, as ``RandomFeatureAttention``; if there is not one number of features
        for each feature map.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import FMMAttention
      >>> adapter = FMMAttention((130, None), 32, feature_maps=("positive", "elu"))
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=adapter)
      >>> variables = attention.init(jax.random.key(0), jnp.ones((2, 10, 512)))
      >>> variables["params"]["attention_fn"]["far_logits"].shape
      (2, 8)

    References:
      Nguyen et al., FMMformer (NeurIPS 2021).
    """

    num_features: int | tuple[int | None, ...] | None
    bandwidth: int
    feature_maps: tuple[FeatureMap, ...] = ("positive",)
    coupling: str = "simplex"
    block: str = "regular"
    rotation: str = "haar"
    num_weights: int | None = None
    shared: bool = False
    is_causal: bool = False
    factored_masks: bool = False
    decode: bool = False
    sequence_axis: str | tuple[str, ...] | None = None

    def _method(self, num_heads: int, head_dim: int) -> Method:
        flax_attention.check_feature_maps(self.feature_maps, num_weights=self.num_weights)

        def draw() -> tuple[Projection | None, ...]:
            return flax_attention.draw_maps(
                self._key(),
                None if self.shared else num_heads,
                self.num_features,
                head_dim,
                feature_maps=self.feature_maps,
                num_weights=self.num_weights,
                coupling=self.coupling,
                block=self.block,
                rotation=self.rotation,
            )

        zeros = nn.initializers.zeros_init()
        return flax_attention.fmm_method(
            self.variable("random_features", "projections", draw).value,
            feature_maps=self.feature_maps,
            bandwidth=self.bandwidth,
            near_logit=self.param("near_logit", zeros, (num_heads,)),
            far_logits=self.param("far_logits", zeros, (len(self.feature_maps), num_heads)),
            sequence_axis=self.sequence_axis,
        )
