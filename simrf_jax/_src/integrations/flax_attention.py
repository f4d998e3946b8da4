"""Attention for both Flax APIs: how an adapter reads and answers a call."""

from __future__ import annotations

import abc
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from simrf_jax._src import checks
from simrf_jax._src.attention import (
    Band,
    Blend,
    Call,
    ExactKeys,
    Mechanism,
    RandomFeatureMechanism,
)
from simrf_jax._src.attention.inputs.masks import differs_between_queries
from simrf_jax._src.features import FeatureMapLike
from simrf_jax._src.integrations import flax_masks
from simrf_jax._src.integrations.flax_masks import Mask
from simrf_jax._src.projections import ProjectionLike

# Masks that an adapter takes.
Masks: TypeAlias = Literal["keys", "factored", "packed"]
# Names of mesh axes, as users give them.
AxisNames: TypeAlias = str | tuple[str, ...] | None


# Fields of an adapter that are those of its attention.
FIELDS = (
    "sequence_axis",
    "batch_axis",
    "head_axis",
    "implementation",
    "exact_bandwidth",
    "exact_keys",
)


def random_features(
    projection: ProjectionLike | None, feature_map: FeatureMapLike, adapter: Any
) -> RandomFeatureMechanism:
    """Returns the random-feature attention of an adapter, without gradients for W."""
    fields = {name: getattr(adapter, name) for name in FIELDS}
    return RandomFeatureMechanism(jax.lax.stop_gradient(projection), feature_map, **fields)


def blend(
    projections: Sequence[ProjectionLike | None],
    *,
    feature_maps: Sequence[FeatureMapLike],
    bandwidth: int,
    near_logit: jax.Array,
    far_logits: jax.Array,
    num_heads: int,
    sequence_axis: str | tuple[str, ...] | None,
) -> Blend:
    """Returns FMM attention with gradients for its weights, but not for W.

    Args:
      projections: One W for each feature map.
      feature_maps: Feature maps of the far field.
      bandwidth: Bandwidth of the near field.
      near_logit: ``[K]``, the weight of the near field before the sigmoid.
      far_logits: ``[L, K]``, the weights of the feature maps before the sigmoid.
      num_heads: Number N of query heads.
      sequence_axis: Mesh axes that shard the length.
    """
    groups = num_heads // near_logit.shape[-1]
    near, far = (
        jnp.repeat(jax.nn.sigmoid(logits), groups, axis=-1) for logits in (near_logit, far_logits)
    )
    fields = tuple(
        RandomFeatureMechanism(jax.lax.stop_gradient(w), feature_map, sequence_axis=sequence_axis)
        for w, feature_map in zip(projections, feature_maps, strict=True)
    )
    return Blend(Band(bandwidth, sequence_axis=sequence_axis), fields, near, far)


class Request(NamedTuple):
    """A call by Flax, and the parts of its mask that attention cannot take.

    Attributes:
      call: The call, with NaN in place of queries that are not real.
      real: ``[..., T, N, 1]``, False where a factored mask hides all keys from a query; or None.
      valid: Booleans, False for each sequence and head whose traced mask has values that would
        raise an error if they were known; they broadcast with the output.
    """

    call: Call
    real: Mask | None
    valid: tuple[Mask, ...]

    def is_valid(self) -> jax.Array:
        """Returns False if some traced mask has values that would raise an error."""
        return jnp.all(jnp.stack([jnp.asarray(True), *map(jnp.all, self.valid)]))

    def finish(self, out: jax.Array) -> jax.Array:
        """Returns the output with zeros for queries that see no key, and NaN where not valid."""
        if self.real is not None:
            out = jnp.where(self.real, out, 0)
        for valid in self.valid:
            # Attention has accepted the mask: axes beyond those of the output have size 1.
            out = jnp.where(jnp.reshape(valid, valid.shape[-out.ndim :]), out, jnp.nan)
        return out


class AttentionFn:
    """An ``attention_fn`` of either API, which answers or refuses the calls of Flax's attention.

    Subclasses have the fields ``is_causal``, ``masks``, ``decode``, ``shared`` and
    ``sequence_axis``.
    """

    is_causal: bool
    masks: Masks
    decode: bool
    shared: bool
    sequence_axis: AxisNames

    @abc.abstractmethod
    def _mechanism(self, num_heads: int, num_key_heads: int, head_dim: int) -> Mechanism:
        """Returns the attention, with its arrays."""

    @abc.abstractmethod
    def _step(self, mechanism: Mechanism, request: Request) -> jax.Array:
        """Attends to the tokens in the cache and those of a call, and updates the cache."""

    def _check_sizes(self, num_key_heads: int, head_dim: int) -> None:
        """Checks the sizes of a call against those of the adapter, if it has its own."""

    def _observe(self, request: Request, mechanism: Any) -> None:
        """Records a call for ``calibrate``, ``distillation_loss`` or ``attention_report``."""

    # Flax's attention passes only keywords that appear in this signature, and drops others.
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
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        r"""Returns the attention of queries to keys, as Flax's ``dot_product_attention`` does.

        Keywords that linear attention cannot honor are refused.

        Args:
          query: ``[..., T, N, H]``.
          key: ``[..., S, K, H]``.
          value: ``[..., S, K, D]``.
          mask: Booleans, or zeros and ones, broadcastable to ``[..., N, T, S]``; of the kind that
            the field ``masks`` names. Other values raise if they are known. Under ``jit`` they turn
            the output of their sequence and head into NaN, and the logger ``simrf_jax`` explains
            why.
          bias: Added to the logits; see ``simrf_jax.random_feature_attention``.
          scale: Multiplies the logits; by default :math:`1/\sqrt H`.
          is_causal: True lets query t attend only to keys s <= t, even if the field is False.
          query_seq_lengths: Integers of the batch shape; outputs from there on are zero.
          key_value_seq_lengths: Integers of the batch shape; keys from there on are hidden.
          segment_ids: Integers ``[..., T]`` of packed sequences; not with ``decode``.
          dropout_rng: Not used: there is no dropout.
          dropout_rate: Refused unless it is 0 or the call is deterministic.
          broadcast_dropout: Not used: there is no dropout.
          deterministic: True turns dropout off.
          dtype: Computation dtype; by default the common dtype of query, key and value.
          precision: Any ``jax.lax.Precision``; all give the same result, because float32 products
            always have the highest. An algorithm for the products is refused.
          module: Refused unless it is None: there are no attention weights to sow.
          force_fp32_for_softmax: Not used: exponentials are at least float32.
          qk_attn_weights_einsum: Refused unless it is None: there are no attention weights.
          attn_weights_value_einsum: Refused unless it is None: there are no attention weights.

        Returns:
          ``[..., T, N, D]``.
        """
        del dropout_rng, broadcast_dropout, force_fp32_for_softmax
        check_fields(self)  # They may have been set after creation.
        self._check_sizes(*key.shape[-2:])
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise ValueError(
                "qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls replace contractions "
                "that random-feature attention does not make."
            )
        is_causal = checks.boolean("is_causal", is_causal) or self.is_causal or self.decode
        _check_precision(precision)
        _check_dropout(dropout_rate, checks.boolean("deterministic", deterministic))
        check_sowing(module is not None)
        query, key, value = promote_dtype(query, key, value, dtype=dtype)
        real, valid = None, []
        if mask is not None:
            logits = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
            mask, is_mask, factors = self._read_mask(
                mask, logits, is_causal=is_causal, has_segment_ids=segment_ids is not None
            )
            if is_mask is not None:
                valid.append(_heads_last(is_mask))
            if factors is not None:
                mask, real = factors.keys, _heads_last(factors.queries)
                if factors.segment_ids is not None:
                    segment_ids = factors.segment_ids
                valid.append(_heads_last(factors.is_product))
                # Attention replaces a query that is not finite by a real one, which keeps the
                # contents of padding out of feature maps and gradients.
                query = jnp.where(real, query, jnp.nan)
        call = Call.of(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            segment_ids=segment_ids,
        )
        request = Request(call, real, tuple(valid))
        mechanism = self._mechanism(query.shape[-2], *key.shape[-2:])
        self._observe(request, mechanism)
        return self._step(mechanism, request) if self.decode else attend(mechanism, request)

    def _read_mask(
        self, mask: Any, target: tuple[int, ...], *, is_causal: bool, has_segment_ids: bool
    ) -> tuple[Mask, Mask | None, flax_masks.Factors | None]:
        """Returns a mask in booleans, whether its values are, if they are traced, and its factors.

        There are no factors for a mask of the keys.
        """
        no_segments = flax_masks.why_no_segments(
            target,
            packed=self.masks == "packed",
            decode=self.decode,
            has_segment_ids=has_segment_ids,
        )
        if no_segments is None and flax_masks.is_segment_ids(mask, target):
            axes = checks.axis_names("sequence_axis", self.sequence_axis)
            factors = flax_masks.factors_of_ids(mask, target, axes)
            return factors.keys, None, factors
        mask, is_mask = flax_masks.as_boolean(mask, no_segments)
        if self.masks == "keys" and not (is_causal and differs_between_queries(mask)):
            return mask, is_mask, None
        factored = flax_masks.factor(mask, target, is_causal=is_causal, no_segments=no_segments)
        return mask, is_mask, factored


def _check_dropout(rate: float, deterministic: bool) -> None:
    """Raises ``ValueError`` if attention weights are to be dropped out."""
    if rate != 0 and not deterministic:
        raise ValueError(
            f"dropout_rate={rate}: random-feature attention never forms the attention weights, so "
            "it cannot drop them out. Set the attention's dropout_rate to 0, and drop out what it "
            f"returns: y = nn.Dropout({rate})(y, deterministic=not train) in Linen, "
            f"y = nnx.Dropout({rate}, rngs=rngs)(y) in NNX."
        )


def check_sowing(sow_weights: bool) -> None:
    """Raises ``ValueError`` if a layer is to sow its attention weights."""
    if sow_weights:
        raise ValueError(
            "sow_weights=True: random-feature attention never forms the attention weights, so "
            "there are none to sow."
        )


def _heads_last(x: Mask) -> Mask:
    """Turns ``[..., heads, T, 1]`` into ``[..., T, heads, 1]``."""
    return x.swapaxes(-3, -2)


def _check_precision(precision: PrecisionLike) -> None:
    """Accepts each ``jax.lax.Precision``: the products of attention are at least as precise."""
    for each in precision if isinstance(precision, tuple | list) else (precision,):
        try:
            jax.lax.Precision(each)
        except ValueError:
            raise ValueError(
                "precision must be None or one of jax.lax.Precision, got "
                f"{precision!r}: random-feature attention supports no other algorithm for its "
                "products. Its float32 products always have the highest precision."
            ) from None


def attend(mechanism: Mechanism, request: Request) -> jax.Array:
    """Returns the attention of all tokens."""
    call = request.call
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    if length != key_length and mechanism.in_order(call) and not _is_whole(mechanism, call):
        raise ValueError(
            "A causal adapter and one with a near field or an exact band need equal numbers of "
            "queries and keys, because the positions of both count from 0, got "
            f"{key_length} keys for {length} queries. If they are in the cache of Flax's "
            "attention, turn its decode off and the adapter's on."
        )
    return request.finish(mechanism.attend_to(call))


def _is_whole(mechanism: Mechanism, call: Call) -> bool:
    """Returns True if an exact band has all tokens, so that positions do not matter."""
    bandwidth = getattr(mechanism, "exact_bandwidth", None)
    length = max(call.query.shape[-3], call.key.shape[-3])
    return bandwidth is not None and bandwidth >= length and not call.in_order()


def step(mechanism: Mechanism, state: Any, request: Request) -> tuple[jax.Array, Any]:
    """Returns the attention of new tokens that follow a state, and the new state."""
    call = request.call
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    if length != key_length:
        raise ValueError(
            "decode=True takes the keys of the new tokens, one for each query, got "
            f"{key_length} keys for {length} queries. Turn off decode in Flax's attention, which "
            "passes all keys of its own cache, and in adapters of cross-attention."
        )
    out, state = mechanism.step_to(state, call)
    return request.finish(out), state


def check_fields(adapter: Any) -> None:
    """Checks the fields that all adapters have."""
    for name in ("shared", "is_causal", "decode"):
        checks.boolean(name, getattr(adapter, name))
    checks.one_of("masks", adapter.masks, get_args(Masks))
    checks.axis_names("sequence_axis", adapter.sequence_axis)


def check_options(adapter: type, options: Mapping[str, Any], where: Any) -> None:
    """Raises ``TypeError`` if an adapter has no such option, or ``where`` is not callable."""
    if where is not None and not callable(where):
        raise TypeError(f"where must be a function of a path and a layer, got {where!r}.")
    parameters = inspect.signature(vars(adapter)["__init__"]).parameters
    known = parameters.keys() - {"self", "parent", "name"}
    for name in options:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            instead = f"; did you mean {nearest[0]}?" if nearest else "."
            raise TypeError(
                f"{adapter.__name__} got an unexpected keyword argument {name!r}{instead}"
            )


def check_exact_keys(exact_keys: int | ExactKeys | tuple[int, ...] | None) -> None:
    """Accepts a number of keys, with or without a rule, or a tuple of their positions."""
    # An array of positions would be model state.
    if isinstance(exact_keys, ExactKeys):
        return
    for one in exact_keys if isinstance(exact_keys, tuple) else (exact_keys,):
        if one is not None:
            checks.integer("exact_keys, or each of its positions,", one)
