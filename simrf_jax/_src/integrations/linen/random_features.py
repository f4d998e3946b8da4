"""Random-feature attention as an ``attention_fn`` of Linen's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from simrf_jax._src import checks
from simrf_jax._src.attention import ExactKeys, RandomFeatureMechanism
from simrf_jax._src.attention.implementations import Implementation
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.integrations import (
    flax_attention,
    flax_calibration,
    flax_distillation,
    flax_drawing,
)
from simrf_jax._src.integrations.flax_report import add_call
from simrf_jax._src.integrations.linen.adapter import Adapter, not_of_init
from simrf_jax._src.integrations.linen.projection import boxed
from simrf_jax._src.projections import (
    BlockMode,
    Coupling,
    Norms,
    ProjectionLike,
    Rotation,
)

# Names of the parameters of learned features.
PARAMETERS = tuple(Learned.axes_of_one)


class RandomFeatureAttention(Adapter):
    """Random-feature attention of one layer, which draws its own projections.

    Each key head has its own W, in the collection ``random_features``, drawn at ``init`` from the
    stream ``features`` (or ``params`` if there is none). To redraw, replace the collection by
    ``redraw_projections(key, variables["random_features"])``. It draws each W with the same
    options, because the collection keeps them.

    A trainer that keeps only ``init(...)["params"]`` loses W, and ``apply`` then raises. Keep the
    collection in the train state::

        class TrainState(flax.training.train_state.TrainState):
            random_features: Any

        state = TrainState.create(apply_fn=model.apply, tx=tx, **model.init(key, tokens))
        out = model.apply({"params": params, "random_features": state.random_features}, tokens)

    ``nn.scan`` over layers needs ``"random_features": 0`` in its ``variable_axes``; ``nn.remat``
    needs nothing. ``attention_report`` measures the error of each layer's attention.

    Inside another module's ``@nn.compact`` method, create it with ``parent=None``; otherwise Flax
    files its W next to the attention instead of below it. One instance in several layers has one W
    and one cache, so it cannot decode.

    To decode, in time and memory that do not depend on the number of earlier tokens, set ``decode``
    here and leave that of Flax's attention off. The variables may come from training without it.
    ``init`` makes the empty state, in the collection ``cache``, and does not add its tokens. Then
    pass the prompt, of any length, and token after token, each with the cache of the previous
    call::

        cache = jax.jit(model.init)(jax.random.key(0), tokens)["cache"]
        out, updates = model.apply({**variables, "cache": cache}, tokens, mutable=["cache"])

    Without a cache, or without ``mutable``, ``apply`` raises. Use the values that ``init`` returns:
    an empty state is not all zeros. ``nn.scan`` over layers and ``nn.vmap`` over the batch need
    ``"cache": 0`` in their ``variable_axes``.

    Attributes:
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

    Raises:
      TypeError: When called, if a switch is neither True nor False or a keyword is unknown.
      ValueError: When called, if a name is unknown, if linear attention cannot honor the mask, if
        dropout, sown attention weights, an algorithm for products or custom einsums are requested,
        or if ``decode`` has no cache or the cache is not mutable.

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
    feature_map: FeatureMapLike = "positive"
    coupling: Coupling | None = None
    block: BlockMode = "regular"
    rotation: Rotation = "haar"
    norms: Norms = "chi"
    num_weights: int | None = None
    shared: bool = False
    is_causal: bool = False
    masks: flax_attention.Masks = "keys"
    decode: bool = False
    sequence_axis: flax_attention.AxisNames = None
    batch_axis: flax_attention.AxisNames = None
    head_axis: flax_attention.AxisNames = None
    implementation: Implementation | None = None
    exact_bandwidth: int | None = None
    exact_keys: int | ExactKeys | tuple[int, ...] | None = None

    def _mechanism(
        self, num_heads: int, num_key_heads: int, head_dim: int
    ) -> RandomFeatureMechanism:
        del num_heads
        feature_map = flax_calibration.adapter_map(
            self.feature_map, num_key_heads, head_dim, self.num_features
        )
        drawing = self._drawing()
        drawing.check((feature_map,))
        flax_attention.check_exact_keys(self.exact_keys)
        if isinstance(feature_map, Calibrated):
            feature_map = self._calibration(feature_map)

        heads = None if self.shared else num_key_heads

        def draw() -> ProjectionLike | None:
            return drawing.draw(self._key(), heads, self.num_features, head_dim, feature_map)

        w = None
        if isinstance(feature_map, Learned):
            feature_map = self._learned(feature_map, draw)
        elif self.num_features is not None:
            w = self._drawn("projection", lambda: boxed(draw(), drawing.options(feature_map)))
            self._check_drawn(w)
            w = flax_drawing.in_pairs(w, feature_map, drawing.options(feature_map))
        return flax_attention.random_features(w, feature_map, self)

    def _check_drawn(self, w: Any) -> None:
        """Raises ``ValueError`` if the variables hold W of another adapter."""
        found, is_shared = np.shape(w)[-2], np.ndim(w) == 2
        if found != self.num_features or is_shared != self.shared:
            raise ValueError(
                f"The variables of {'/'.join(self.path) or 'the adapter'} hold W of shape "
                f"{np.shape(w)}, drawn for num_features={found} and shared={is_shared}, but the "
                f"adapter has num_features={self.num_features} and shared={self.shared}."
            )

    def _calibration(self, initial: Calibrated) -> Calibrated:
        """Returns the calibration in the variables, which has no gradient."""
        is_made = self.is_initializing() and self.is_mutable_collection("calibration")
        if not is_made and not self.has_variable("calibration", "feature_map"):
            raise self._lacks("calibration", "the arrays of a calibrated feature map")
        # A copy, because a training step may donate the variables, and the caller owns the map.
        calibration: nn.Variable[Any] = self.variable(
            "calibration", "feature_map", lambda: jax.tree.map(jnp.array, initial)
        )
        if isinstance(calibration.value, Mapping):
            raise not_of_init("calibration", *self.path, "feature_map")
        return jax.lax.stop_gradient(calibration.value)

    def _learned(self, start: Learned, draw: Callable[[], ProjectionLike | None]) -> Learned:
        """Returns the map with the parameters in the variables, initialized with rows of one W."""
        calibration = self._calibration(start.calibration)
        if self.num_features is not None and not self.has_variable("params", "query_rows"):
            start = Learned.start(jnp.asarray(draw()), calibration)
        params = {name: self._param(name, getattr(start, name)) for name in PARAMETERS}
        return Learned(calibration, **params)

    def _param(self, name: str, start: jax.Array) -> jax.Array:
        return self.param(name, lambda _: start)

    def _observe(self, request: flax_attention.Request, mechanism: RandomFeatureMechanism) -> None:
        """Updates the variables of ``calibrate``, ``distillation_loss`` or ``attention_report``."""
        if sums := self._asked_for("calibration_moments", "moments", "calibrate"):
            sums.value = flax_calibration.add_moments(sums.value, request)
        if total := self._asked_for("distillation", "loss", "distill"):
            total.value = flax_distillation.add_loss(total.value, request, mechanism)
        # mutable=True and Flax's DenyList admit any name, but do not request a report.
        is_asked = self.is_mutable_collection("attention_calls")
        is_asked &= not self.is_mutable_collection("a name that nothing has")
        if is_asked and not self.is_initializing():
            self._refuse_decoding("report on")
            seen: nn.Variable[Any] = self.variable("attention_calls", "calls", tuple)
            seen.value = add_call(seen.value, request, mechanism)

    def _asked_for(self, collection: str, name: str, verb: str) -> nn.Variable[Any] | None:
        """Returns a variable to update, if there is one; raises if the adapter decodes."""
        if not self.has_variable(collection, name):
            return None
        self._refuse_decoding(verb)
        return self.variable(collection, name)

    def _refuse_decoding(self, verb: str) -> None:
        if self.decode:
            raise ValueError(f"An adapter has decode=True: {verb} the model without it.")


def check_without_sizes(adapter: RandomFeatureAttention) -> None:
    """Checks the fields of an adapter, but not whether they fit the sizes of a layer.

    Raises:
      TypeError: If a field is of a wrong type.
      ValueError: If a field has no such value, or the fields do not fit together.
    """
    flax_attention.check_fields(adapter)
    if adapter.num_features is not None:
        checks.positive_int("num_features", adapter.num_features)
    flax_attention.check_exact_keys(adapter.exact_keys)
    feature_map = flax_calibration.adapter_map(adapter.feature_map, 1, 1, adapter.num_features)
    drawing = adapter._drawing()
    drawing.check((feature_map,))
    drawing.options(feature_map)
    flax_attention.random_features(None, feature_map, adapter)
