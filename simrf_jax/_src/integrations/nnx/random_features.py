"""Random-feature attention as an ``attention_fn`` of ``nnx.MultiHeadAttention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from simrf_jax._src import checks
from simrf_jax._src.attention import ExactKeys, RandomFeatureMechanism
from simrf_jax._src.attention.estimator import KeyChoice
from simrf_jax._src.attention.implementations import Implementation
from simrf_jax._src.features import FeatureMapLike, as_feature_map
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations import (
    flax_attention,
    flax_calibration,
    flax_drawing,
    flax_repr,
)
from simrf_jax._src.integrations.flax_versions import get_value
from simrf_jax._src.integrations.nnx.adapter import Adapter, as_state, features_key, in_state
from simrf_jax._src.integrations.nnx.variables import (
    LearnedMap,
    Observer,
    RandomProjection,
)
from simrf_jax._src.projections import BlockMode, Coupling, Norms, Rotation


class RandomFeatureAttention(Adapter):
    """Random-feature attention of one layer, which draws its own projections.

    Each key head has its own W, drawn from the stream ``features`` of ``rngs``. To redraw a model,
    update it with ``redraw_projections(key, nnx.state(model, RandomProjection))``. It draws each W
    with the same options, because the variable keeps them. ``attention_report`` measures the error
    of each layer's attention.

    ``swap_attention`` puts adapters into an existing model. By hand, assign one as data, because
    Flax otherwise treats the attribute as static: ``layer.attention_fn =
    nnx.data(RandomFeatureAttention(...))``.

    To decode, in time and memory that do not depend on the number of earlier tokens, leave the
    ``decode`` of the attention modules off and turn that of the adapters on::

        decoder = view(model, only=RandomFeatureAttention, decode=True, batch_size=8)

    Call the view with the prompt, of any length, and then token by token. The state is in its
    ``nnx.Cache`` variables. ``model.set_attributes(RandomFeatureAttention, decode=True)`` and each
    adapter's ``init_cache`` do the same in place. Only causal self-attention can decode: if a model
    also has an encoder or cross-attention, exclude them with
    ``only=nnx.All(nnx.PathContains("decoder"), RandomFeatureAttention)``. Each layer then needs its
    own instance: one instance in several layers has one cache. Call the view in ``nnx.jit``, or
    split and merge it: ``jax.jit`` does not return the changed cache. Layers that ``nnx.vmap`` has
    stacked, for ``nnx.scan``, decode in a view of the stack. Only if their map has no W and no
    calibration, such as ``"elu"``, put ``nnx.vmap`` around ``view``.

    Args:
      num_heads: Number of key heads.
      head_dim: Width of a head.
      num_features: Number of random features; None for a map that needs no W.
      feature_map: Feature map other than ``"clustered_hybrid"``, by name or as an object; see
        ``simrf_jax.random_feature_attention``. ``"calibrated"`` holds a calibration for each key
        head: it is the positive map until ``calibrate`` fits it. ``"learned"`` has pairs of
        exponentials as parameters, which start at hyperbolic features, or once ``calibrate`` has
        fitted their coordinates, at calibrated ones; see ``simrf_jax.feature_maps.Learned`` and
        ``distillation_loss``.
      coupling: Coupling of the rows of W, and of both base estimators of a hybrid; see
        ``simrf_jax.draw_projection``. None uses the default of the feature map: simplex for
        positive, relu, elu and custom maps, orthogonal for the others.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``simrf_jax.draw_projection``.
      rotation: Distribution of the rotations, ``"haar"``, ``"hadamard"`` or ``"givens"``; see
        ``simrf_jax.draw_projection``.
      norms: Law of the row norms; see ``simrf_jax.draw_projection``. ``"radau"`` needs positive,
        hyperbolic or similar features, which honor weights; hybrids and optimal positive features
        refuse it, and the latter ``"sqrt_dim"`` as well. With ``coupling="cross_polytope"``,
        ``"pair"`` and ``"shared"`` save half the products with W for positive, optimal positive and
        calibrated features: of each pair, rows 2i and 2i + 1, only the first is read.
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
      decode: True to treat each call as the next tokens of the sequences in the cache. No token
        sees a later one then, even without ``is_causal``.
      sequence_axis: Mesh axes that shard the length; see ``simrf_jax.random_feature_attention``.
        Decoding does not use it.
      batch_axis: Mesh axes that shard the batch, for the Pallas kernels; see
        ``simrf_jax.random_feature_attention``.
      head_axis: Mesh axes that shard the heads, for the Pallas kernels.
      implementation: ``"pallas_tpu"``, ``"pallas_gpu"``, ``"xla"`` or None; see
        ``simrf_jax.random_feature_attention``. Decoding does not use it.
      exact_bandwidth: Distance over which queries see keys exactly, or None; see
        ``simrf_jax.random_feature_attention``.
      exact_keys: Number of keys that all queries see exactly, an ``ExactKeys`` of a number and a
        rule, a tuple of positions, or None; see ``simrf_jax.random_feature_attention``. Causal
        attention accepts positions and ``ExactKeys(count, by="score")``, and decoding only the
        latter.
      rngs: Source of the key: its stream ``features``, or its default stream if there is none, or
        else ``params``.

    Raises:
      TypeError: If a size is not an integer, a switch is neither True nor False, or a keyword is
        unknown.
      ValueError: If a name is unknown; when called, if linear attention cannot honor the mask, if
        dropout, sown attention weights or an algorithm for products are requested, or if ``decode``
        has no cache.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import RandomFeatureAttention, view
      >>> rngs = nnx.Rngs(0)
      >>> attention = nnx.MultiHeadAttention(
      ...     8, 512, decode=False, rngs=rngs,
      ...     attention_fn=RandomFeatureAttention(8, 64, 130, rngs=rngs),
      ... )
      >>> attention(jnp.ones((2, 10, 512))).shape
      (2, 10, 512)
      >>> decoder = view(attention, only=RandomFeatureAttention, decode=True, batch_size=2)
      >>> prompt, token = decoder(jnp.ones((2, 10, 512))), decoder(jnp.ones((2, 1, 512)))
      >>> prompt.shape, token.shape
      ((2, 10, 512), (2, 1, 512))
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_features: int | None,
        *,
        feature_map: FeatureMapLike = "positive",
        coupling: Coupling | None = None,
        block: BlockMode = "regular",
        rotation: Rotation = "haar",
        norms: Norms = "chi",
        num_weights: int | None = None,
        shared: bool = False,
        is_causal: bool = False,
        masks: flax_attention.Masks = "keys",
        decode: bool = False,
        sequence_axis: flax_attention.AxisNames = None,
        batch_axis: flax_attention.AxisNames = None,
        head_axis: flax_attention.AxisNames = None,
        implementation: Implementation | None = None,
        exact_bandwidth: int | None = None,
        exact_keys: int | ExactKeys | tuple[int, ...] | None = None,
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
        self.batch_axis = batch_axis
        self.head_axis = head_axis
        self.implementation = implementation
        feature_map = flax_calibration.adapter_map(
            feature_map, self.num_heads, self.head_dim, num_features
        )
        drawing = flax_drawing.Drawing(coupling, block, rotation, norms, num_weights)
        drawing.check((feature_map,))
        if exact_bandwidth is not None:
            exact_bandwidth = checks.integer("exact_bandwidth", exact_bandwidth, least=0)
        self.exact_bandwidth = exact_bandwidth
        if exact_keys is not None:
            flax_attention.check_exact_keys(exact_keys)
            KeyChoice.of(exact_keys).check(as_feature_map(feature_map), is_causal=is_causal)
        self.exact_keys = exact_keys
        self.observer: Observer | None = nnx.data(None)
        self.learned: LearnedMap | None = nnx.data(None)
        self.projection = nnx.data(None)
        if num_features is not None:
            heads = None if self.shared else self.num_heads
            w = drawing.draw(features_key(rngs), heads, num_features, head_dim, feature_map)
            if isinstance(feature_map, Learned):
                feature_map = Learned.start(jnp.asarray(w), feature_map.calibration)
            else:
                options = drawing.options(feature_map)
                self.projection = RandomProjection(w, draw_options=options)
        self._keep(feature_map)
        self.mechanism(self.num_heads)  # Checks the other fields.

    def _keep(self, feature_map: FeatureMapLike) -> None:
        """Makes the arrays of a feature map part of the module's state."""
        if isinstance(feature_map, Learned):
            self.learned = LearnedMap(jax.tree.map(jnp.array, feature_map))  # See as_state.
            feature_map = feature_map.calibration
        self.feature_map = as_state(feature_map)

    def stack_shape(self) -> tuple[int, ...]:
        """Returns the leading shape of a stack of layers, ``()`` for one layer.

        It is that of W or of a calibration. A layer with neither does not know its stack.
        """
        feature_map = in_state(self.feature_map)
        if isinstance(feature_map, Calibrated):
            return feature_map.query_mean.shape[:-2]
        if self.projection is None:
            return ()
        rows = jax.tree.leaves(get_value(self.projection))[0]
        return rows.shape[: -2 if self.shared else -3]

    def _draws(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"feature_map": self._map_name()}
        if self.learned is not None:
            return {"num_features": self.learned.query_rows.shape[-2], **shown}
        if self.projection is None:
            return shown
        rows = jax.tree.leaves(get_value(self.projection))[0]
        drawn_by = flax_repr.drawn_by((self.projection.draw_options,))
        return {"num_features": rows.shape[-2], **shown, **drawn_by}

    def _map_name(self) -> Any:
        name = flax_repr.name_of_map(in_state(self.feature_map))
        return name if self.learned is None else "learned"

    def mechanism(self, num_heads: int) -> RandomFeatureMechanism:
        """Returns the attention of any number of query heads, with its arrays."""
        del num_heads
        w, feature_map = None, self._map()
        if self.projection is not None:
            options = getattr(self.projection, "draw_options", None)  # None if set by hand.
            w = flax_drawing.in_pairs(get_value(self.projection), feature_map, options)
        return flax_attention.random_features(w, feature_map, self)

    def _map(self) -> FeatureMapLike:
        feature_map = in_state(self.feature_map)
        if not isinstance(feature_map, Calibrated):
            return feature_map
        calibration = jax.lax.stop_gradient(feature_map)
        return calibration if self.learned is None else self.learned.feature_map(calibration)

    def _observe(self, request: flax_attention.Request, mechanism: RandomFeatureMechanism) -> None:
        if self.observer is not None:
            self.observer.observe(request, mechanism)
