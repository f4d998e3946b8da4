"""The attention of FMMformers as an ``attention_fn`` of ``nnx.MultiHeadAttention``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from simrf_jax._src import checks
from simrf_jax._src.attention import Blend
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.integrations import flax_attention, flax_drawing, flax_repr
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.nnx.adapter import Adapter, as_state, features_key, in_state
from simrf_jax._src.integrations.nnx.variables import RandomProjection
from simrf_jax._src.projections import BlockMode, Coupling, Norms, Rotation


class FMMAttention(Adapter):
    r"""The attention of FMMformers: a near field, a far field, and their learned weights.

    .. math:: \hat V = \sigma(a) \operatorname{Near} + \sum_l \sigma(b_l) \operatorname{Far}_l

    as in ``simrf_jax.fmm.fmm_attention``. Each key head has its own ``near_logit`` a and
    ``far_logits`` b, parameters that start at 0, and a W for each feature map. All else is as in
    ``RandomFeatureAttention``.

    Args:
      num_heads: Number of key heads.
      head_dim: Width of a head.
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
      rngs: Source of the key: its stream ``features``, or its default stream if there is none, or
        else ``params``.

    Raises:
      TypeError: If ``RandomFeatureAttention`` would raise it, or ``feature_maps`` is neither a
        tuple nor a list.
      ValueError: If ``RandomFeatureAttention`` would raise it, if there is not one number of
        features for each feature map, or when called with a cache for another bandwidth.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import FMMAttention
      >>> rngs = nnx.Rngs(0)
      >>> maps = ("positive", "elu")
      >>> adapter = FMMAttention(8, 64, (130, None), 32, feature_maps=maps, rngs=rngs)
      >>> attention = nnx.MultiHeadAttention(8, 512, decode=False, attention_fn=adapter, rngs=rngs)
      >>> attention(jnp.ones((2, 10, 512))).shape
      (2, 10, 512)
      >>> adapter.far_logits.shape
      (2, 8)

    References:
      Nguyen et al., FMMformer (NeurIPS 2021), https://arxiv.org/abs/2108.02347
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_features: int | tuple[int | None, ...] | None,
        bandwidth: int,
        *,
        feature_maps: tuple[FeatureMapLike, ...] = ("positive",),
        coupling: Coupling | None = None,
        block: BlockMode = "regular",
        rotation: Rotation = "haar",
        norms: Norms = "chi",
        num_weights: int | None = None,
        shared: bool = False,
        is_causal: bool = False,
        masks: flax_attention.Masks = "keys",
        decode: bool = False,
        sequence_axis: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            num_heads,
            head_dim,
            shared=shared,
            is_causal=is_causal,
            masks=masks,
            decode=decode,
            sequence_axis=sequence_axis,
        )
        drawing = flax_drawing.Drawing(coupling, block, rotation, norms, num_weights)
        drawing.check(feature_maps)
        self.feature_maps = as_state(tuple(feature_maps))
        self.bandwidth = checks.integer("bandwidth", bandwidth, least=0)
        self.near_logit = nnx.Param(jnp.zeros(self.num_heads))
        self.far_logits = nnx.Param(jnp.zeros((len(feature_maps), self.num_heads)))
        heads = None if self.shared else self.num_heads
        w = drawing.draw_all(features_key(rngs), heads, num_features, head_dim, feature_maps)
        drawn_by = tuple(
            None if part is None else drawing.options(one)
            for part, one in zip(w, feature_maps, strict=True)
        )
        self.projections = RandomProjection(w, draw_options=drawn_by)

    def stack_shape(self) -> tuple[int, ...]:
        """Returns the leading shape of a stack of layers, ``()`` for one layer."""
        return self.near_logit.shape[:-1]

    def _draws(self) -> dict[str, Any]:
        drawn_by = self.projections.draw_options
        sizes = tuple(None if w is None else w.shape[-2] for w in get_value(self.projections))
        maps = flax_repr.name_of_map(in_state(self.feature_maps))
        shown = {"num_features": sizes, "bandwidth": self.bandwidth, "feature_maps": maps}
        return shown | flax_repr.drawn_by(drawn_by)

    def mechanism(self, num_heads: int) -> Blend:
        return flax_attention.blend(
            get_value(self.projections),
            feature_maps=in_state(self.feature_maps),
            bandwidth=self.bandwidth,
            near_logit=self.near_logit[...],
            far_logits=self.far_logits[...],
            num_heads=num_heads,
            sequence_axis=self.sequence_axis,
        )
