"""Attention for both Flax APIs: functions that read and answer a call of an ``attention_fn``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
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

    def finish(self, out: jax.Array) -> jax.Array:
        """Returns the output with zeros for queries that see no key, and NaN where not valid."""
        if self.real is not None:
            out = jnp.where(self.real, out, 0)
        for valid in self.valid:
            # Attention has accepted the mask: axes beyond those of the output have size 1.
            out = jnp.where(jnp.reshape(valid, valid.shape[-out.ndim :]), out, jnp.nan)
        return out


def read(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    adapter: Any,
    *,
    is_causal: bool,
    mask: ArrayLike | None,
    segment_ids: ArrayLike | None,
    dropout_rate: float,
    deterministic: bool,
    dtype: DTypeLike | None,
    precision: PrecisionLike,
    module: Any,
    **options: Any,
) -> Request:
    """Reads a call of an adapter, and refuses what linear attention cannot do.

    The ``options`` are passed on to ``Call`` unchanged.
    """
    is_causal = checks.boolean("is_causal", is_causal) or adapter.is_causal or adapter.decode
    _check_precision(precision)
    deterministic = checks.boolean("deterministic", deterministic)
    if dropout_rate != 0 and not deterministic:
        raise ValueError(
            f"dropout_rate={dropout_rate}: random-feature attention never forms the attention "
            "weights, so it cannot drop them out. Set the attention's dropout_rate to 0, and drop "
            f"out what it returns: y = nn.Dropout({dropout_rate})(y, deterministic=not train) in "
            f"Linen, y = nnx.Dropout({dropout_rate}, rngs=rngs)(y) in NNX."
        )
    check_sowing(module is not None)
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    real, valid = None, []
    if mask is not None:
        target = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        no_segments = flax_masks.why_no_segments(
            target,
            packed=adapter.masks == "packed",
            decode=adapter.decode,
            has_segment_ids=segment_ids is not None,
        )
        if no_segments is None and flax_masks.is_segment_ids(mask, target):
            factors = flax_masks.factors_of_ids(
                mask, target, checks.axis_names("sequence_axis", adapter.sequence_axis)
            )
        else:
            mask, is_mask = flax_masks.as_boolean(mask, no_segments)
            factors = None
            if is_mask is not None:
                valid.append(_heads_last(is_mask))
            if adapter.masks != "keys" or (is_causal and differs_between_queries(mask)):
                factors = flax_masks.factor(
                    mask, target, is_causal=is_causal, no_segments=no_segments
                )
        if factors is not None:
            mask, real = factors.keys, _heads_last(factors.queries)
            if factors.segment_ids is not None:
                segment_ids = factors.segment_ids
            valid.append(_heads_last(factors.is_product))
            # Attention replaces a query that is not finite by a real one, which keeps the contents
            # of padding out of feature maps and gradients.
            query = jnp.where(real, query, jnp.nan)
    call = Call.of(
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        segment_ids=segment_ids,
        **options,
    )
    return Request(call, real, tuple(valid))


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
    if mechanism.in_order(call) and length != key_length:
        raise ValueError(
            "A causal adapter and one with a near field or an exact band need equal numbers of "
            "queries and keys, because the positions of both count from 0, got "
            f"{key_length} keys for {length} queries. If they are in the cache of Flax's "
            "attention, turn its decode off and the adapter's on."
        )
    return request.finish(mechanism.attend_to(call))


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
