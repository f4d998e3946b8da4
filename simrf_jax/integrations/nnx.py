"""Random-feature attention for Flax NNX: an ``attention_fn`` for ``nnx.MultiHeadAttention``."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention import Blend, Mechanism, RandomFeatures
from simrf_jax.attention.random_features.exact_band import check_band
from simrf_jax.calibration.api import check_options
from simrf_jax.calibration.fit import Balance, Tilt
from simrf_jax.features import FeatureMap, FeatureMapLike, as_feature_map
from simrf_jax.features.calibrated import Calibrated
from simrf_jax.integrations import flax_attention
from simrf_jax.projections import BlockMode, Coupling, Norms, Rotation


class RandomProjection(nnx.Variable):
    """The random projection W: part of the model's state and checkpoints, but no parameter.

    Its metadata ``draw_options`` says how W was drawn: a ``simrf_jax.DrawOptions``, or for a tuple
    of projections a tuple of as many, None where there is no W. ``redraw_projections`` reads it.
    """


class Calibration(nnx.Variable):
    """The arrays of a calibrated feature map: state of the model, but no parameter."""


class CalibrationMoments(nnx.Variable):
    """Moments of the queries and keys of an adapter, while ``calibrate`` sums them."""


class _Adapter(nnx.Module):
    """A mechanism of attention with its cache, which Flax calls as an ``attention_fn``."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        is_causal: bool,
        factored_masks: bool,
        decode: bool,
        sequence_axis: str | tuple[str, ...] | None,
    ):
        self.num_heads = checks.positive_int("num_heads", num_heads)
        self.head_dim = checks.positive_int("head_dim", head_dim)
        self.is_causal = is_causal
        self.factored_masks = factored_masks
        self.decode = decode
        self.sequence_axis = sequence_axis
        self.cache: nnx.Cache | None = nnx.data(None)
        self._check_fields()

    def _check_fields(self) -> None:
        flax_attention.check_fields(
            is_causal=self.is_causal,
            factored_masks=self.factored_masks,
            decode=self.decode,
            sequence_axis=self.sequence_axis,
        )

    @abc.abstractmethod
    def _mechanism(self, num_heads: int) -> Mechanism:
        """Returns the attention of as many query heads, with its arrays."""

    def _add_moments(self, call: flax_attention.Call) -> None:
        """Adds the tokens of a call to the moments that ``calibrate`` sums, if it does."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        mask: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        scale: ArrayLike | None = None,
        is_causal: bool = False,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: PrecisionLike = None,
        module: nnx.Module | None = None,
    ) -> jax.Array:
        r"""Returns the attention of queries to keys, as ``nnx.dot_product_attention`` does.

        Keywords that linear attention cannot honour are refused.

        Args:
          query: ``[..., T, N, H]``.
          key: ``[..., S, K, H]``.
          value: ``[..., S, K, D]``.
          mask: Booleans, or zeros and ones, broadcastable to ``[..., N, T, S]``; the same for all
            queries, or with ``factored_masks`` a product. Other values raise where they are known.
            Under ``jit`` they make the output of their sequence and head NaN.
          bias: Added to the logits; see ``simrf_jax.random_feature_attention``.
          scale: Multiplies the logits; by default :math:`1/\sqrt H`.
          is_causal: True lets query t attend only to keys s <= t, also if the field is False.
          query_seq_lengths: Integers of the batch shape; outputs from there on are zero.
          key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
          segment_ids: Integers ``[..., T]`` of packed sequences; not with ``decode``.
          dropout_rng: Not used: there is no dropout.
          dropout_rate: Refused unless it is 0 or the call is deterministic.
          broadcast_dropout: Not used: there is no dropout.
          deterministic: True turns dropout off.
          dtype: Type to compute in; by default that of the query, key and value together.
          precision: Any ``jax.lax.Precision``; all give the same result, since float32 products
            have the highest in any case. An algorithm for the products is refused.
          module: Refused unless it is None: there are no attention weights to sow.

        Returns:
          ``[..., T, N, D]``.
        """
        del dropout_rng, broadcast_dropout
        self._check_fields()  # They may have been set since.
        if key.shape[-2:] != (self.num_heads, self.head_dim):
            raise ValueError(
                f"This adapter is for keys of {self.num_heads} heads of {self.head_dim}, got "
                f"{' heads of '.join(map(str, key.shape[-2:]))}."
            )
        is_causal = checks.boolean("is_causal", is_causal)
        call = flax_attention.read(
            query,
            key,
            value,
            is_causal=is_causal or self.is_causal or self.decode,
            factored_masks=self.factored_masks,
            mask=mask,
            bias=bias,
            scale=scale,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            segment_ids=segment_ids,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
        )
        self._add_moments(call)
        mechanism = self._mechanism(query.shape[-2])
        if not self.decode:
            return flax_attention.attend(mechanism, call)
        if self.cache is None:
            raise ValueError(
                "decode=True needs a cache: call init_cache(input_shape) first, or "
                "nnx.view(model, only=type(adapter), decode=True, batch_size=batch)."
            )
        out, state = flax_attention.step(mechanism, self.cache.get_value(), call)
        self.cache.set_value(state)
        return out

    def init_cache(
        self,
        input_shape: tuple[int, ...],
        dtype: DTypeLike = jnp.float32,
        *,
        value_dim: int | None = None,
    ) -> None:
        """Makes the cache empty: the state before the first token.

        Args:
          input_shape: ``[..., length, features]`` of inputs to Flax's attention, as its own
            ``init_cache`` takes it. Only what is before the length counts.
          dtype: Type of the queries, keys and values to come.
          value_dim: Width of the values, by default ``head_dim``.

        Raises:
          TypeError: If dtype is not floating or input_shape no tuple of integers.
          ValueError: If input_shape has less than two axes, a size is negative or value_dim is
            below 1.
        """
        shape = checks.lead_shape("input_shape", input_shape)
        if len(shape) < 2:
            raise ValueError(f"input_shape must be [..., length, features], got {input_shape}.")
        self._start(shape[:-2], dtype, value_dim)

    def set_view(
        self,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        cache_dtype: DTypeLike = jnp.float32,
    ) -> None:
        """Sets the attributes of a view that ``nnx.view`` makes.

        Args:
          decode: True to decode, False to attend to whole sequences; None leaves it as it is.
          batch_size: Leading shape of the tokens, one integer or a tuple of them, for a new and
            empty cache; without it a view shares the cache of what it views.
          cache_dtype: Type of the queries, keys and values to come.

        Raises:
          TypeError: If decode is not boolean, a size is no integer or cache_dtype is not floating.
          ValueError: If a size is negative.
        """
        if decode is not None:
            self.decode = checks.boolean("decode", decode)
        if batch_size is not None:
            if not isinstance(batch_size, tuple | list):
                batch_size = (checks.integer("batch_size", batch_size, least=0),)
            self._start(checks.lead_shape("batch_size", batch_size), cache_dtype, None)

    def _start(self, batch: tuple[int, ...], dtype: DTypeLike, value_dim: int | None) -> None:
        state = self._mechanism(self.num_heads).init(
            batch=batch,
            num_key_heads=self.num_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim if value_dim is None else value_dim,
            dtype=dtype,
        )
        self.cache = nnx.Cache(state)


def _as_state(feature_map: FeatureMapLike) -> Any:
    """Returns a feature map as an attribute of a module, whose state its arrays belong to."""
    if isinstance(feature_map, Calibrated):
        return Calibration(feature_map)
    return nnx.data(feature_map) if _has_arrays(feature_map) else feature_map


def _has_arrays(feature_map: FeatureMapLike) -> bool:
    """Returns whether a feature map holds arrays, or numbers in their place."""
    return isinstance(feature_map, FeatureMap) and bool(jax.tree.leaves(feature_map))


class RandomFeatureAttention(_Adapter):
    """Random-feature attention of one layer, with the projections that it draws.

    Each key head has a W of its own, drawn from ``rngs.features()``. To redraw a model, update it
    with ``redraw_projections(key, nnx.state(model, RandomProjection))``. It draws each W as before,
    because the variable keeps the options.

    To decode, in time and memory that do not depend on how many tokens there were, leave the
    ``decode`` of the attention modules off and turn that of the adapters on,

        decoder = nnx.view(model, only=RandomFeatureAttention, decode=True, batch_size=8)

    and call it with the prompt, of any length, and then token by token. The state is in
    ``nnx.Cache`` variables of the view. ``model.set_attributes(RandomFeatureAttention,
    decode=True)`` and each adapter's ``init_cache`` do the same in place. What decodes is causal
    self-attention: where a model has an encoder or cross-attention too, leave them out,
    ``only=nnx.All(nnx.PathContains("decoder"), RandomFeatureAttention)``. Each layer needs an
    instance of its own then: one instance in several layers has one cache. Call the view in
    ``nnx.jit``, or split and merge it: ``jax.jit`` hands no changed cache back. Put ``nnx.vmap``
    around ``nnx.view`` where ``nnx.vmap`` has stacked the layers.

    Args:
      num_heads: Number of key heads.
      head_dim: Width of a head.
      num_features: Number of random features; None for a map that needs no W.
      feature_map: Feature map other than ``"clustered_hybrid"``, by name or as an object; see
        ``simrf_jax.random_feature_attention``. ``"calibrated"`` holds a calibration for each key
        head: it is the positive map until ``calibrate`` fits it.
      coupling: Coupling of the rows of W, and of both base estimators of a hybrid; see
        ``simrf_jax.draw_projection``. None stands for the feature map's: simplex for positive,
        relu, elu and maps of one's own, orthogonal for the others.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``simrf_jax.draw_projection``.
      rotation: Distribution of the rotations, ``"haar"``, ``"hadamard"`` or ``"givens"``; see
        ``simrf_jax.draw_projection``.
      norms: Law of the row norms; see ``simrf_jax.draw_projection``. ``"radau"`` needs positive,
        hyperbolic or similar features, which honour weights; hybrids and optimal positive features
        refuse it, and the latter ``"sqrt_dim"`` as well.
      num_weights: Number of random vectors that estimate the weight of a hybrid, by default 8. The
        time and the state of hybrids grow with its product with ``num_features``.
      shared: True draws one W for all heads.
      is_causal: True lets each query attend only to keys up to its own position, also in calls that
        do not ask for it.
      factored_masks: True accepts masks with a query axis if they are products of a mask of
        queries, a mask of keys and, with ``is_causal``, the causal mask, as Flax's
        ``make_attention_mask``, ``make_causal_mask`` and ``combine_masks`` make them. A query that
        sees no key gets zeros. A mask that is no such product raises if its values are known, and
        makes the output NaN under ``jit``. Reading these masks takes O(T S) memory: for long
        sequences pass masks of the keys alone.
      decode: True takes each call for the next tokens of the sequences in the cache.
      sequence_axis: Mesh axes that shard the length; see ``simrf_jax.random_feature_attention``.
        Decoding does not use it.
      exact_bandwidth: Distance over which queries see keys exactly, or None; see
        ``simrf_jax.random_feature_attention``.
      rngs: Source of the key: its stream ``features``, or its default stream if there is none.

    Raises:
      TypeError: If a size is not an integer, a switch is neither True nor False, or a keyword is
        unknown.
      ValueError: If a name is unknown; when called, if linear attention cannot honour the mask, if
        dropout, sown attention weights or an algorithm for products are asked for, or if ``decode``
        has no cache.

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
      >>> decoder = nnx.view(attention, only=RandomFeatureAttention, decode=True, batch_size=2)
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
        factored_masks: bool = False,
        decode: bool = False,
        sequence_axis: str | tuple[str, ...] | None = None,
        exact_bandwidth: int | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            num_heads,
            head_dim,
            is_causal=is_causal,
            factored_masks=factored_masks,
            decode=decode,
            sequence_axis=sequence_axis,
        )
        shared = checks.boolean("shared", shared)
        feature_map = flax_attention.adapter_map(feature_map, self.num_heads, self.head_dim)
        flax_attention.check_feature_maps((feature_map,), num_weights=num_weights)
        if exact_bandwidth is not None:
            exact_bandwidth = check_band(exact_bandwidth, as_feature_map(feature_map))
        self.exact_bandwidth = exact_bandwidth
        self.feature_map = _as_state(feature_map)
        self.moments: CalibrationMoments | None = nnx.data(None)
        self.projection = nnx.data(None)
        if num_features is None:
            return
        options = flax_attention.draw_options(
            feature_map, coupling=coupling, block=block, rotation=rotation, norms=norms
        )
        w = flax_attention.draw_heads(
            rngs.features(),
            None if shared else self.num_heads,
            num_features,
            head_dim,
            feature_map=feature_map,
            num_weights=num_weights,
            options=options,
        )
        self.projection = RandomProjection(w, draw_options=options)

    def _mechanism(self, num_heads: int) -> RandomFeatures:
        del num_heads
        w = None if self.projection is None else self.projection.get_value()
        return flax_attention.random_features(
            w, self._map(), self.sequence_axis, self.exact_bandwidth
        )

    def _map(self) -> FeatureMapLike:
        if isinstance(self.feature_map, Calibration):
            return jax.lax.stop_gradient(self.feature_map.get_value())
        return self.feature_map

    def _add_moments(self, call: flax_attention.Call) -> None:
        if self.moments is not None:
            sums = flax_attention.add_moments(self.moments.get_value(), call)
            self.moments.set_value(sums)


class FMMAttention(_Adapter):
    r"""The attention of FMMformers: a near field, a far field, and their learned weights.

    .. math:: \hat V = \sigma(a) \operatorname{Near} + \sum_l \sigma(b_l) \operatorname{Far}_l

    as ``simrf_jax.fmm_attention``. Each key head has a ``near_logit`` a and ``far_logits`` b of its
    own, parameters that start at 0, and a W for each feature map. All else is as in
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
        ``simrf_jax.draw_projection``. None stands for the feature map's: simplex for positive,
        relu, elu and maps of one's own, orthogonal for the others.
      block: Row-block mode, ``"regular"`` or ``"square"``; see ``simrf_jax.draw_projection``.
      rotation: Distribution of the rotations, ``"haar"``, ``"hadamard"`` or ``"givens"``; see
        ``simrf_jax.draw_projection``.
      norms: Law of the row norms; see ``simrf_jax.draw_projection``. ``"radau"`` needs positive,
        hyperbolic or similar features, which honour weights; hybrids and optimal positive features
        refuse it, and the latter ``"sqrt_dim"`` as well.
      num_weights: Number of random vectors that estimate the weight of a hybrid, by default 8. The
        time and the state of hybrids grow with its product with ``num_features``.
      shared: True draws one W for all heads.
      is_causal: True lets each query attend only to keys up to its own position, also in calls that
        do not ask for it.
      factored_masks: True accepts masks with a query axis if they are products of a mask of
        queries, a mask of keys and, with ``is_causal``, the causal mask, as Flax's
        ``make_attention_mask``, ``make_causal_mask`` and ``combine_masks`` make them. A query that
        sees no key gets zeros. A mask that is no such product raises if its values are known, and
        makes the output NaN under ``jit``. Reading these masks takes O(T S) memory: for long
        sequences pass masks of the keys alone.
      decode: True takes each call for the next tokens of the sequences in the cache, which holds
        the last ``bandwidth`` keys and a state for each feature map.
      sequence_axis: Mesh axes that shard the length; see ``simrf_jax.random_feature_attention``.
        Decoding does not use it.
      rngs: Source of the key: its stream ``features``, or its default stream if there is none.

    Raises:
      TypeError: If ``RandomFeatureAttention`` would raise it, or ``feature_maps`` is not a tuple.
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
        factored_masks: bool = False,
        decode: bool = False,
        sequence_axis: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            num_heads,
            head_dim,
            is_causal=is_causal,
            factored_masks=factored_masks,
            decode=decode,
            sequence_axis=sequence_axis,
        )
        shared = checks.boolean("shared", shared)
        flax_attention.check_feature_maps(feature_maps, num_weights=num_weights)
        maps = tuple(feature_maps)
        has_arrays = any(map(_has_arrays, maps))
        self.feature_maps = nnx.data(tuple(map(as_feature_map, maps))) if has_arrays else maps
        self.bandwidth = checks.integer("bandwidth", bandwidth, least=0)
        self.near_logit = nnx.Param(jnp.zeros(self.num_heads))
        self.far_logits = nnx.Param(jnp.zeros((len(feature_maps), self.num_heads)))
        options = tuple(
            flax_attention.draw_options(
                one, coupling=coupling, block=block, rotation=rotation, norms=norms
            )
            for one in feature_maps
        )
        w = flax_attention.draw_maps(
            rngs.features(),
            None if shared else self.num_heads,
            num_features,
            head_dim,
            feature_maps=feature_maps,
            num_weights=num_weights,
            options=options,
        )
        drawn_by = tuple(
            None if part is None else one for part, one in zip(w, options, strict=True)
        )
        self.projections = RandomProjection(w, draw_options=drawn_by)

    def _mechanism(self, num_heads: int) -> Blend:
        return flax_attention.blend(
            self.projections.get_value(),
            feature_maps=self.feature_maps,
            bandwidth=self.bandwidth,
            near_logit=self.near_logit[...],
            far_logits=self.far_logits[...],
            num_heads=num_heads,
            sequence_axis=self.sequence_axis,
        )


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
    center: bool = True,
    balance: Balance = True,
    tilt: Tilt | None = "log",
) -> None:
    """Calibrates all adapters of a model in place, in one pass over some batches.

    The adapters are those made with ``feature_map="calibrated"``. Each sums the means and
    covariances of its queries and keys, in memory that does not depend on the number of batches,
    and then fits its feature map as ``simrf_jax.calibrate`` does. During the pass, the adapters
    compute with the maps that they have, from the calibration before or plain positive features.

    The result is in ``Calibration`` variables, which are part of the state and of checkpoints, but
    no parameters. W is as before; redraws do not change the calibration.

    Args:
      model: A model that holds adapters. It is called as the caller left it: set it to evaluation
        first, ``model.eval()``, if it has dropout.
      batches: Batches of the model's inputs. Take some of the training data.
      call: Function of the model and a batch, which it calls the model with, by default
        ``model(batch)``. It is compiled by ``nnx.jit``, once for each function.
      center: True to subtract the means; see ``simrf_jax.calibrate``.
      balance: True, ``"diagonal"`` or False; see ``simrf_jax.calibrate``.
      tilt: ``"log"``, ``"mean"``, ``"isotropic"`` or None; see ``simrf_jax.calibrate``.

    Raises:
      TypeError: If center is neither True nor False.
      ValueError: If an option is unknown, no adapter has ``feature_map="calibrated"``, one decodes
        or saw no tokens, or queries or keys are not finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import nnx
      >>> from simrf_jax.integrations.nnx import RandomFeatureAttention, calibrate
      >>> rngs = nnx.Rngs(0)
      >>> adapter = RandomFeatureAttention(8, 64, 130, feature_map="calibrated", rngs=rngs)
      >>> attention = nnx.MultiHeadAttention(8, 512, decode=False, attention_fn=adapter, rngs=rngs)
      >>> calibrate(attention, [jax.random.normal(rngs(), (2, 100, 512)) for _ in range(3)])
      >>> attention(jnp.ones((2, 10, 512))).shape
      (2, 10, 512)
    """
    check_options(center=center, balance=balance, tilt=tilt)
    adapters = [
        node
        for _, node in nnx.iter_graph(model)
        if isinstance(node, RandomFeatureAttention) and isinstance(node.feature_map, Calibration)
    ]
    if not adapters:
        raise ValueError(
            "The model has no adapter to calibrate: make its RandomFeatureAttention(...) with "
            'feature_map="calibrated".'
        )
    if any(adapter.decode for adapter in adapters):
        raise ValueError(
            "An adapter has decode=True: its cache would keep the tokens of the batches. Calibrate "
            "the model without it."
        )
    for adapter in adapters:
        flax_attention.check_tilt(tilt, getattr(adapter.projection, "draw_options", None))
    sums = [
        CalibrationMoments(flax_attention.no_moments(adapter.feature_map.get_value()))
        for adapter in adapters
    ]
    try:
        for adapter, own in zip(adapters, sums, strict=True):
            adapter.moments = own
        compiled = _compiled(_call if call is None else call)
        for batch in batches:
            compiled(model, batch)
    finally:
        for adapter in adapters:
            adapter.moments = nnx.data(None)
    fitted = [
        flax_attention.fit_stack(own.get_value(), center=center, balance=balance, tilt=tilt)
        for own in sums
    ]
    for adapter, calibrated in zip(adapters, fitted, strict=True):
        adapter.feature_map.set_value(calibrated)


def _call(model: Any, batch: Any) -> Any:
    return model(batch)


@functools.lru_cache(maxsize=8)
def _compiled(call: Callable[[Any, Any], Any]) -> Any:
    """Returns a function as ``nnx.jit`` compiles it; another one would compile it again."""
    return nnx.jit(call)
