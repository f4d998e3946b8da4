"""Random-feature attention for Flax Linen: ``attention_fn`` of ``MultiHeadDotProductAttention``."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import serialization
from flax.core import meta
from flax.typing import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention import Blend, Mechanism, RandomFeatures
from simrf_jax.calibration.api import check_options
from simrf_jax.calibration.fit import Balance, Tilt
from simrf_jax.features import BipolarProjection, FeatureMapLike
from simrf_jax.features.calibrated import Calibrated
from simrf_jax.integrations import flax_attention
from simrf_jax.integrations.flax_attention import Call
from simrf_jax.projections import (
    BlockMode,
    Coupling,
    DrawOptions,
    Norms,
    Projection,
    Rotation,
    as_projection,
)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["draw_options"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class RandomProjection(meta.AxisMetadata[Any]):
    """A box in the collection ``random_features`` that holds W and the options of its draw.

    Flax unboxes W when a module reads the variable, as it does for ``nn.Partitioned``;
    ``nn.meta.unbox(variables)`` unboxes all arrays. The box has the shape, dtype and items of W,
    and JAX and NumPy functions accept it as an array. Bytes and state dicts of
    ``flax.serialization`` hold the array alone. Orbax names the array ``projection.value``:
    restore a checkpoint into variables that ``init`` made.

    Attributes:
      value: W, ``[..., num_features, dim]``, an array or a ``WeightedProjection``.
      draw_options: Options that W was drawn by, which ``redraw_projections`` reads.
    """

    value: Any
    draw_options: DrawOptions

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of W."""
        return self.value.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Floating type of W."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """Number of axes of W."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)

    def unbox(self) -> Any:
        """Returns W."""
        return self.value

    def replace_boxed(self, val: Any) -> RandomProjection:
        """Returns a box with another W in it."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> RandomProjection:
        """Returns the same box: the options are those of every W in a stack."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> RandomProjection:
        """Returns the same box: the options are those of every W in a stack."""
        del index, params
        return self

    def to_nnx_metadata(self) -> dict[str, Any]:
        """Returns the value and metadata of an NNX variable, for ``nnx.bridge``."""
        return {"value": self.value, "draw_options": self.draw_options}

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> RandomProjection:
        """Returns the box of an NNX variable, for ``nnx.bridge``."""
        return cls(metadata["value"], metadata["draw_options"])


def _state_dict(box: RandomProjection) -> Any:
    return serialization.to_state_dict(box.value)


def _from_state_dict(box: RandomProjection, state: Any) -> RandomProjection:
    return box.replace_boxed(serialization.from_state_dict(box.value, state))


serialization.register_serialization_state(RandomProjection, _state_dict, _from_state_dict)


def _box(projection: Projection | None, options: DrawOptions) -> Any:
    """Returns W in a box. A ``BipolarProjection`` says by itself how it was drawn."""
    if projection is None or isinstance(projection, BipolarProjection):
        return projection
    return RandomProjection(as_projection(projection), options)


class _Adapter(nn.Module):
    """A mechanism of attention with its cache, which Flax calls as an ``attention_fn``.

    Subclasses have the fields ``is_causal``, ``factored_masks``, ``decode``, ``shared`` and
    ``sequence_axis``.
    """

    @abc.abstractmethod
    def _mechanism(self, num_heads: int, num_key_heads: int, head_dim: int) -> Mechanism:
        """Returns the attention, with its arrays."""

    # Flax's attention passes those of its keywords that stand in this signature, and drops others.
    @nn.compact
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
        module: nn.Module | None = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        r"""Returns the attention of queries to keys, as ``nn.dot_product_attention`` does.

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
          force_fp32_for_softmax: Not used: exponentials are float32 at least.
          qk_attn_weights_einsum: Refused unless it is None: there are no attention weights.
          attn_weights_value_einsum: Refused unless it is None: there are no attention weights.

        Returns:
          ``[..., T, N, D]``.
        """
        del dropout_rng, broadcast_dropout, force_fp32_for_softmax
        self._check_fields()
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError(
                "qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls replace contractions "
                "that random-feature attention does not make."
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
        mechanism = self._mechanism(query.shape[-2], *key.shape[-2:])
        self._add_moments(call)
        if not self.decode:
            return flax_attention.attend(mechanism, call)
        return self._step(mechanism, call)

    def _add_moments(self, call: Call) -> None:
        """Adds the tokens of a call to the moments that ``calibrate`` sums, if it does."""
        if not self.has_variable("calibration_moments", "moments"):
            return
        if self.decode:
            raise ValueError("An adapter has decode=True: calibrate the model without it.")
        sums: nn.Variable[Any] = self.variable("calibration_moments", "moments")
        sums.value = flax_attention.add_moments(sums.value, call)

    def _check_fields(self) -> None:
        checks.boolean("shared", self.shared)
        flax_attention.check_fields(
            is_causal=self.is_causal,
            factored_masks=self.factored_masks,
            decode=self.decode,
            sequence_axis=self.sequence_axis,
        )

    def _step(self, mechanism: Mechanism, call: Call) -> jax.Array:
        """Attends to the tokens in the cache and to those of a call, and adds these to it."""
        if self.is_initializing():
            # As in Flax's own attention, the call that makes the cache does not count.
            empty = flax_attention.init(mechanism, call)
            self.variable("cache", "state", lambda: empty)
            return flax_attention.step(mechanism, empty, call)[0]
        if not self.has_variable("cache", "state"):
            raise ValueError(
                "decode=True needs a cache: make an empty one, "
                'cache = jax.jit(model.init)(jax.random.key(0), tokens)["cache"], and call '
                'model.apply({**variables, "cache": cache}, tokens, mutable=["cache"]). Where the '
                "layer is in a lifted transformation, it must know the collection too, as nn.scan "
                'by variable_axes={"cache": 0}.'
            )
        if not self.is_mutable_collection("cache"):
            raise ValueError(
                'decode=True adds the tokens to the cache: pass mutable=["cache"] to apply, and '
                "the cache that it returns to the next call."
            )
        cache: nn.Variable[Any] = self.variable("cache", "state")
        out, cache.value = flax_attention.step(mechanism, cache.value, call)
        return out

    def _key(self) -> jax.Array:
        """Returns a typed key to draw W from."""
        key = self.make_rng("features")
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return key
        return jax.random.wrap_key_data(key)  # From a jax.random.PRNGKey.


class RandomFeatureAttention(_Adapter):
    """Random-feature attention of one layer, with the projections that it draws.

    Each key head has a W of its own, in the collection ``random_features``, drawn at ``init`` from
    the stream ``features`` (or ``params`` if there is none). To redraw, replace the collection by
    ``redraw_projections(key, variables["random_features"])``. It draws each W as before, because
    the collection keeps the options.

    Made inside another module's ``@nn.compact`` method, give it ``parent=None``, or Flax files its
    W next to the attention instead of below it. One instance given to several layers is one W, and
    one cache: it cannot decode.

    To decode, in time and memory that do not depend on how many tokens there were, set ``decode``
    here and leave that of Flax's attention off. The variables may come from training without it.
    ``init`` makes the empty state, in the collection ``cache``, and does not count its tokens. Then
    give the prompt, of any length, and token after token, each with the cache of the call before:

        cache = jax.jit(model.init)(jax.random.key(0), tokens)["cache"]
        out, updates = model.apply({**variables, "cache": cache}, tokens, mutable=["cache"])

    Without a cache, or without ``mutable``, ``apply`` raises. Take the values that ``init`` gives:
    an empty state is not all zeros. ``nn.scan`` over layers and ``nn.vmap`` over the batch need
    ``"cache": 0`` in their ``variable_axes``.

    Attributes:
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

    Raises:
      TypeError: When called, if a switch is neither True nor False or a keyword is unknown.
      ValueError: When called, if a name is unknown, if linear attention cannot honour the mask, if
        dropout, sown attention weights, an algorithm for products or einsums of one's own are asked
        for, or if ``decode`` has no cache or may not change it.

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
    factored_masks: bool = False
    decode: bool = False
    sequence_axis: str | tuple[str, ...] | None = None
    exact_bandwidth: int | None = None

    def _mechanism(self, num_heads: int, num_key_heads: int, head_dim: int) -> RandomFeatures:
        del num_heads
        feature_map = flax_attention.adapter_map(self.feature_map, num_key_heads, head_dim)
        flax_attention.check_feature_maps((feature_map,), num_weights=self.num_weights)
        if isinstance(feature_map, Calibrated):
            if not self.is_initializing() and not self.has_variable("calibration", "feature_map"):
                raise ValueError(
                    "The variables lack the collection calibration, which holds the arrays of a "
                    "calibrated feature map: take it from init, and pass it to apply."
                )
            calibration = self.variable("calibration", "feature_map", lambda: feature_map)
            feature_map = jax.lax.stop_gradient(calibration.value)

        def draw() -> Any:
            options = flax_attention.draw_options(
                feature_map,
                coupling=self.coupling,
                block=self.block,
                rotation=self.rotation,
                norms=self.norms,
            )
            w = flax_attention.draw_heads(
                self._key(),
                None if self.shared else num_key_heads,
                self.num_features,
                head_dim,
                feature_map=feature_map,
                num_weights=self.num_weights,
                options=options,
            )
            return _box(w, options)

        w = None
        if self.num_features is not None:
            w = self.variable("random_features", "projection", draw).value
        return flax_attention.random_features(
            w, feature_map, self.sequence_axis, self.exact_bandwidth
        )


class FMMAttention(_Adapter):
    r"""The attention of FMMformers: a near field, a far field, and their learned weights.

    .. math:: \hat V = \sigma(a) \operatorname{Near} + \sum_l \sigma(b_l) \operatorname{Far}_l

    as ``simrf_jax.fmm_attention``. Each key head has a ``near_logit`` a and ``far_logits`` b of its
    own, parameters that start at 0, and a W for each feature map, all in ``projections`` of the
    collection ``random_features``. All else is as in ``RandomFeatureAttention``.

    Attributes:
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
    factored_masks: bool = False
    decode: bool = False
    sequence_axis: str | tuple[str, ...] | None = None

    def _mechanism(self, num_heads: int, num_key_heads: int, head_dim: int) -> Blend:
        flax_attention.check_feature_maps(self.feature_maps, num_weights=self.num_weights)

        def draw() -> tuple[Any, ...]:
            options = [
                flax_attention.draw_options(
                    one,
                    coupling=self.coupling,
                    block=self.block,
                    rotation=self.rotation,
                    norms=self.norms,
                )
                for one in self.feature_maps
            ]
            w = flax_attention.draw_maps(
                self._key(),
                None if self.shared else num_key_heads,
                self.num_features,
                head_dim,
                feature_maps=self.feature_maps,
                num_weights=self.num_weights,
                options=options,
            )
            return tuple(_box(part, one) for part, one in zip(w, options, strict=True))

        zeros = nn.initializers.zeros_init()
        return flax_attention.blend(
            self.variable("random_features", "projections", draw).value,
            feature_maps=self.feature_maps,
            bandwidth=self.bandwidth,
            near_logit=self.param("near_logit", zeros, (num_key_heads,)),
            far_logits=self.param("far_logits", zeros, (len(self.feature_maps), num_key_heads)),
            num_heads=num_heads,
            sequence_axis=self.sequence_axis,
        )


def calibrate(
    model: nn.Module,
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    call: Callable[..., Any] = nn.Module.apply,
    center: bool = True,
    balance: Balance = True,
    tilt: Tilt | None = "log",
) -> dict[str, Any]:
    """Calibrates all adapters of a model, in one pass over some batches.

    The adapters are those made with ``feature_map="calibrated"``. Each sums the means and
    covariances of its queries and keys, in memory that does not depend on the number of batches,
    and then fits its feature map as ``simrf_jax.calibrate`` does. During the pass, the adapters
    compute with the maps that they have, from the calibration before or plain positive features.

    Args:
      model: A model that holds adapters. ``nn.scan`` over layers and ``nn.vmap`` need
        ``"calibration": 0`` and ``"calibration_moments": 0`` in their ``variable_axes``.
      variables: Variables of the model, with the collection ``calibration``, which ``init`` makes.
      batches: Batches of the model's inputs. Take some of the training data.
      call: ``call(model, variables, batch, mutable=[...])`` returns the output and the changed
        collections, by default ``model.apply``. It is compiled by ``jax.jit``, once for each
        function.
      center: True to subtract the means; see ``simrf_jax.calibrate``.
      balance: True, ``"diagonal"`` or False; see ``simrf_jax.calibrate``.
      tilt: ``"log"``, ``"mean"``, ``"isotropic"`` or None; see ``simrf_jax.calibrate``.

    Returns:
      The variables with another collection ``calibration``. It gets no gradient unless
      ``jax.grad`` is taken by it, and redraws do not change it.

    Raises:
      TypeError: If center is neither True nor False.
      ValueError: If an option is unknown, no adapter has ``feature_map="calibrated"``, one decodes
        or saw no tokens, or queries or keys are not finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from simrf_jax.integrations.linen import RandomFeatureAttention, calibrate
      >>> adapter = RandomFeatureAttention(130, feature_map="calibrated")
      >>> attention = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=adapter)
      >>> x = jax.random.normal(jax.random.key(0), (2, 100, 512))
      >>> variables = attention.init(jax.random.key(1), x)
      >>> variables = calibrate(attention, variables, [x, 2 * x])
      >>> attention.apply(variables, x).shape
      (2, 100, 512)
    """
    check_options(center=center, balance=balance, tilt=tilt)
    if not variables.get("calibration"):
        raise ValueError(
            "The variables have no collection calibration: make the model's "
            'RandomFeatureAttention(...) with feature_map="calibrated", and call init.'
        )

    boxes = jax.tree.leaves(
        variables.get("random_features", {}), is_leaf=lambda node: hasattr(node, "draw_options")
    )
    for box in boxes:
        flax_attention.check_tilt(tilt, getattr(box, "draw_options", None))

    sums = _start(variables["calibration"])
    for batch in batches:
        sums = _add(model, call, variables, sums, batch)

    def fit(path: Any, calibrated: Calibrated) -> Calibrated:
        found = sums
        for key in path[:-1]:
            found = found[key.key]
        return flax_attention.fit_stack(found["moments"], center=center, balance=balance, tilt=tilt)

    calibration = jax.tree_util.tree_map_with_path(
        fit, variables["calibration"], is_leaf=lambda node: isinstance(node, Calibrated)
    )
    return {**variables, "calibration": calibration}


def _start(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a collection ``calibration_moments`` of no tokens for all adapters."""
    sums: dict[str, Any] = {}
    for name, node in calibration.items():
        if isinstance(node, Calibrated):
            sums["moments"] = flax_attention.no_moments(node)
        else:
            sums[name] = _start(node)
    return sums


@functools.partial(jax.jit, static_argnums=(0, 1))
def _add(model: nn.Module, call: Callable[..., Any], variables: Any, sums: Any, batch: Any) -> Any:
    """Returns the moments with those of a batch."""
    given = {**variables, "calibration_moments": sums}
    _, updates = call(model, given, batch, mutable=["calibration_moments"])
    return updates["calibration_moments"]
