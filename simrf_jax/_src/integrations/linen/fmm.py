"""The attention of FMMformers as an ``attention_fn`` of Linen's attention."""

from __future__ import annotations

from typing import Any

from flax import linen as nn

from simrf_jax._src.attention import Blend
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.integrations import flax_attention
from simrf_jax._src.integrations.linen.adapter import Adapter
from simrf_jax._src.integrations.linen.projection import boxed
from simrf_jax._src.projections import BlockMode, Coupling, Norms, Rotation


class FMMAttention(Adapter):
    r"""The attention of FMMformers: a near field, a far field, and their learned weights.

    .. math:: \hat V = \sigma(a) \operatorname{Near} + \sum_l \sigma(b_l) \operatorname{Far}_l

    as in ``simrf_jax.fmm.fmm_attention``. Each key head has its own ``near_logit`` a and
    ``far_logits`` b, parameters that start at 0, and a W for each feature map, all in
    ``projections`` of the collection ``random_features``. All else is as in
    ``RandomFeatureAttention``.

    Attributes:
      num_features: Number of random features, or a tuple of one number for each feature map; None
        for a map that needs no W.
      bandwidth: Bandwidth of the near field; see ``simrf_jax.banded_attention``.
      feature_maps: Feature maps of the far field, other than ``"clustered_hybrid"``, by name or as
        objects.
      coupling: Coupling of the rows of W, and of both base estimators of a hybrid; see
        ``simrf_jax.draw_projection``. None uses the default of the feature map: simplex for
        positive, relu, elu and custom maps, orthogonal for the others.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``simrf_jax.draw_projection``.
      rotation: Distribution of the rotations, ``"haar"``, ``"hadamard"`` or ``"givens"``; see
        ``simrf_jax.draw_projection``.
      norms: Law of the row norms; see ``simrf_jax.draw_projection``. ``"radau"`` needs positive,
        hyperbolic or similar features, which honor weights; hybrids and optimal positive features
        refuse it, and the latter ``"sqrt_dim"`` as well.
      num_weights: Number of random vectors that estimate the weight of a hybrid, by default 8. Time
        and state of hybrids grow like ``num_weights * num_features``.
      shared: True draws one W for all heads.
      is_causal: True lets each query attend only to keys up to its own position, in every call. The
        adapter then accepts the causal mask of Flax's ``make_causal_mask``, and its products with
        other masks as for ``masks="factored"``.
      masks: Masks that the adapter accepts. ``"keys"``: masks that are the same for all queries.
        ``"factored"``: also products of a mask of queries, a mask of keys and, with ``is_causal``,
        the causal mask, such as those of Flax's ``make_attention_mask`` and ``combine_masks``. A
        query that sees no key gets zeros. Any other mask raises if its values are known. Under
        ``jit`` it turns the output into NaN, and the logger ``simrf_jax`` explains why. Reading
        these masks takes O(T S) memory: for long sequences pass masks of the keys only.
        ``"packed"``: also masks of packed sequences, for self-attention: products with
        ``make_attention_mask(ids, ids, jnp.equal)`` as another factor, where neighbors with equal
        ids are one segment. For long sequences pass the ids themselves as the mask, integers
        ``[..., 1, 1, T]`` with 0 for padding: ``mask=ids[:, None, None]`` takes O(T) memory, and
        mesh axes may shard T. With ``decode`` there are no segments.
      decode: True to treat each call as the next tokens of the sequences in the cache, which holds
        the last ``bandwidth`` keys and a state for each feature map.
      sequence_axis: Mesh axes that shard the length; see ``simrf_jax.random_feature_attention``.
        Decoding does not use it.

    Raises:
      TypeError: When called, if ``RandomFeatureAttention`` would raise it, or ``feature_maps`` is
        not a tuple.
      ValueError: When called, if ``RandomFeatureAttention`` would raise it, if there is not one
        number of features for each feature map, or if the cache is for another bandwidth.

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
      Nguyen et al., FMMformer (NeurIPS 2021), https://arxiv.org/abs/2108.02347
    """

    num_features: int | tuple[int | None, ...] | None
    bandwidth: int
    feature_maps: tuple[FeatureMapLike, ...] = ("positive",)
    coupling: Coupling | None = None
    block: BlockMode = "regular"
    rotation: Rotation = "haar"
    norms: Norms = "chi"
    num_weights: int | None = None
    shared: bool = False
    is_causal: bool = False
    masks: flax_attention.Masks = "keys"
    decode: bool = False
    sequence_axis: str | tuple[str, ...] | None = None

    def _mechanism(self, num_heads: int, num_key_heads: int, head_dim: int) -> Blend:
        drawing = self._drawing()
        drawing.check(self.feature_maps)
        heads = None if self.shared else num_key_heads

        def draw() -> tuple[Any, ...]:
            w = drawing.draw_all(self._key(), heads, self.num_features, head_dim, self.feature_maps)
            return tuple(
                boxed(part, drawing.options(one))
                for part, one in zip(w, self.feature_maps, strict=True)
            )

        zeros = nn.initializers.zeros_init()
        return flax_attention.blend(
            self._drawn("projections", draw),
            feature_maps=self.feature_maps,
            bandwidth=self.bandwidth,
            near_logit=self.param("near_logit", zeros, (num_key_heads,)),
            far_logits=self.param("far_logits", zeros, (len(self.feature_maps), num_key_heads)),
            num_heads=num_heads,
            sequence_axis=self.sequence_axis,
        )
