"""Attention for both Flax APIs: functions that read a call of an ``attention_fn`` and answer it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import serialization
from flax.linen.dtypes import promote_dtype
from flax.typing import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention import Band, Blend, Mechanism, RandomFeatures
from simrf_jax.attention.inputs.arguments import per_key, shape_of_logits, within_lengths
from simrf_jax.calibration import Moments
from simrf_jax.calibration.api import moments
from simrf_jax.calibration.fit import Balance, Tilt, fit
from simrf_jax.features import (
    BipolarProjection,
    FeatureMapLike,
    as_feature_map,
    draw_bipolar_projection,
)
from simrf_jax.features.calibrated import Calibrated
from simrf_jax.integrations import flax_masks
from simrf_jax.integrations.flax_masks import Mask
from simrf_jax.projections import (
    FIXED_NORMS,
    BlockMode,
    Coupling,
    DrawOptions,
    Norms,
    Projection,
    Rotation,
    WeightedProjection,
)

# A bipolar hybrid has about 4 num_features (num_weights + 1) features.
NUM_WEIGHTS = 8


def random_features(
    projection: Projection | None,
    feature_map: FeatureMapLike,
    sequence_axis: str | tuple[str, ...] | None,
    exact_bandwidth: int | None = None,
) -> RandomFeatures:
    """Returns random-feature attention whose W gets no gradient."""
    w = jax.lax.stop_gradient(projection)
    return RandomFeatures(
        w, feature_map, sequence_axis=sequence_axis, exact_bandwidth=exact_bandwidth
    )


def blend(
    projections: Sequence[Projection | None],
    *,
    feature_maps: Sequence[FeatureMapLike],
    bandwidth: int,
    near_logit: jax.Array,
    far_logits: jax.Array,
    num_heads: int,
    sequence_axis: str | tuple[str, ...] | None,
) -> Blend:
    """Returns FMM attention whose W gets no gradient, and whose weights do.

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
        random_features(w, feature_map, sequence_axis)
        for w, feature_map in zip(projections, feature_maps, strict=True)
    )
    return Blend(Band(bandwidth, sequence_axis=sequence_axis), fields, near, far)


class Call(NamedTuple):
    """The arguments of a call by Flax, as attention takes them.

    Attributes:
      query: ``[..., T, N, H]`` in the type to answer in, like the key and the value.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      mask: Boolean mask of the keys, or None.
      bias: Added to the logits, or None.
      scale: Multiplies the logits, or None.
      query_seq_lengths: Integers of the batch shape, or None.
      key_value_seq_lengths: Integers of the batch shape, or None.
      segment_ids: ``[..., T]``, or None.
      is_causal: True if attention is causal.
      real: ``[..., T, N, 1]``, False where a factored mask hides all keys from a query; or None.
      valid: Booleans, False for each sequence and head whose traced mask has a value or a form that
        was refused had it been known; they broadcast with the output.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: ArrayLike | None
    bias: ArrayLike | None
    scale: ArrayLike | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    segment_ids: ArrayLike | None
    is_causal: bool
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
    *,
    is_causal: bool,
    factored_masks: bool,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    scale: ArrayLike | None,
    query_seq_lengths: ArrayLike | None,
    key_value_seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
    dropout_rate: float,
    deterministic: bool,
    dtype: DTypeLike | None,
    precision: PrecisionLike,
    module: Any,
) -> Call:
    """Reads a call of an ``attention_fn``, and refuses what linear attention cannot do."""
    _check_precision(precision)
    deterministic = checks.boolean("deterministic", deterministic)
    if dropout_rate != 0 and not deterministic:
        raise ValueError(
            f"dropout_rate={dropout_rate}: random-feature attention never forms the attention "
            "weights, so it cannot drop them out. Set the attention's dropout_rate to 0."
        )
    if module is not None:
        raise ValueError(
            "sow_weights=True: random-feature attention never forms the attention weights, so "
            "there are none to sow."
        )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    real, valid = None, []
    if mask is not None:
        mask, is_mask = flax_masks.as_boolean(mask)
        target = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        factors = flax_masks.factor(mask, target, is_causal=is_causal) if factored_masks else None
        if is_mask is not None:
            valid.append(_heads_last(is_mask))
        if factors is not None:
            mask, real = factors.keys, _heads_last(factors.queries)
            valid.append(_heads_last(factors.is_product))
            # Attention puts a real query in the place of one that is not finite, and so keeps
            # whatever padding holds out of feature maps and gradients.
            query = jnp.where(real, query, jnp.nan)
    return Call(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        segment_ids=segment_ids,
        is_causal=is_causal,
        real=real,
        valid=tuple(valid),
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
                f"{precision!r}: random-feature attention takes no other algorithm for its "
                "products. It has float32 products at the highest precision in any case."
            ) from None


def attend(mechanism: Mechanism, call: Call) -> jax.Array:
    """Returns the attention of all tokens."""
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    in_order = call.is_causal or isinstance(mechanism, Blend) or _has_exact_band(mechanism)
    if in_order and length != key_length:
        raise ValueError(
            "A causal adapter and one with a near field or an exact band take as many keys as "
            "queries, since the positions of both count from 0, got "
            f"{key_length} keys for {length} queries. If they are in the cache of Flax's "
            "attention, turn its decode off and the adapter's on."
        )
    out = mechanism.attend(
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        bias=call.bias,
        scale=call.scale,
        is_causal=call.is_causal,
        query_seq_lengths=call.query_seq_lengths,
        key_value_seq_lengths=call.key_value_seq_lengths,
        segment_ids=call.segment_ids,
    )
    return call.finish(out)


def _has_exact_band(mechanism: Mechanism) -> bool:
    return isinstance(mechanism, RandomFeatures) and mechanism.exact_bandwidth is not None


def init(mechanism: Mechanism, call: Call) -> Any:
    """Returns the state before the first token of sequences like those of a call."""
    return mechanism.init(
        batch=call.key.shape[:-3],
        num_key_heads=call.key.shape[-2],
        head_dim=call.key.shape[-1],
        value_dim=call.value.shape[-1],
        dtype=call.key.dtype,
    )


def step(mechanism: Mechanism, state: Any, call: Call) -> tuple[jax.Array, Any]:
    """Returns the attention of the tokens after those of a state, and the state with them."""
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    if length != key_length:
        raise ValueError(
            "decode=True takes the keys of the new tokens, as many as queries, got "
            f"{key_length} keys for {length} queries. Turn the decode of Flax's attention off, "
            "which hands its own cache of all keys over, and that of adapters in cross-attention."
        )
    if call.segment_ids is not None:
        raise ValueError(
            "segment_ids are for whole sequences: with decode=True the cache holds one sequence "
            "in each row of the batch."
        )
    out, state = mechanism.step(
        state,
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        bias=call.bias,
        scale=call.scale,
        query_seq_lengths=call.query_seq_lengths,
        key_value_seq_lengths=call.key_value_seq_lengths,
    )
    return call.finish(out), state


def adapter_map(feature_map: FeatureMapLike, num_key_heads: int, head_dim: int) -> FeatureMapLike:
    """Returns the feature map of an adapter, without a calibration for ``"calibrated"``."""
    if isinstance(feature_map, str) and feature_map == "calibrated":
        return Calibrated.identity(num_key_heads, head_dim)
    return feature_map


def no_moments(calibrated: Calibrated) -> tuple[Moments, Moments]:
    """Returns the moments of no queries and keys, for the heads of a map or of a stack of them."""
    *lead, num_heads, dim = calibrated.query_mean.shape
    empty = Moments.empty(num_heads, dim, calibrated.query_mean.dtype)
    stack = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*lead, *leaf.shape)), empty)
    return stack, stack


def add_moments(sums: tuple[Moments, Moments], call: Call) -> tuple[Moments, Moments]:
    """Returns the moments with the queries and keys of a call, as attention scales them.

    Padding does not count: keys that no head sees, queries beyond their lengths and those that a
    factored mask hides. If a call says nothing about queries and has as many of them as keys, it is
    taken for self-attention, and queries at hidden keys do not count either.
    """
    query, key = jax.lax.stop_gradient((call.query, call.key))
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    queries, keys = moments(query, key, scale, *_real_tokens(call))
    return sums[0].merge(queries), sums[1].merge(keys)


def _real_tokens(call: Call) -> tuple[jax.Array, jax.Array]:
    """Returns ``[..., T]`` and ``[..., S]``, False at queries and keys that are padding."""
    batch, length = call.query.shape[:-3], call.query.shape[-3]
    key_length = call.key.shape[-3]
    keys = jnp.ones((*batch, key_length), bool)
    if call.mask is not None:
        keys &= _seen_by_some_head(jnp.asarray(call.mask), call)
    if call.bias is not None:
        keys &= _seen_by_some_head(jnp.asarray(call.bias) > -jnp.inf, call)
    if call.key_value_seq_lengths is not None:
        lengths = jnp.asarray(call.key_value_seq_lengths)
        keys &= within_lengths("key_value_seq_lengths", lengths, batch, key_length)
    if call.real is not None:
        queries = jnp.any(call.real[..., 0], axis=-1)
    elif call.query_seq_lengths is not None:
        lengths = jnp.asarray(call.query_seq_lengths)
        queries = within_lengths("query_seq_lengths", lengths, batch, length)
    else:
        queries = keys if length == key_length else jnp.ones((*batch, length), bool)
    return jnp.broadcast_to(queries, (*batch, length)), keys


def _seen_by_some_head(visible: jax.Array, call: Call) -> jax.Array:
    """Returns ``[..., S]`` of a mask that is the same for all queries."""
    seen = jnp.any(per_key(visible, shape_of_logits(call.query, call.key)), axis=-2)
    return seen.reshape(seen.shape[max(0, seen.ndim - (call.key.ndim - 2)) :])


def fit_stack(
    sums: tuple[Moments, Moments], *, center: bool, balance: Balance, tilt: Tilt | None
) -> Calibrated:
    """Returns the calibration for the moments of an adapter, or of a stack of them.

    Raises:
      ValueError: If the adapter has seen no tokens, or some that were not finite. Values that are
        traced are not known.
    """
    _check_sums(*sums)
    lead = sums[0].mean.shape[:-1]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) :]), sums)
    fitted = _fit(*flat, center=center, balance=balance, tilt=tilt)
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), fitted)


_fit = jax.jit(fit, static_argnames=("center", "balance", "tilt"))


def _check_sums(queries: Moments, keys: Moments) -> None:
    """Raises ``ValueError`` for moments that are known to be of no tokens or not finite."""
    sums = (queries, keys)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(sums)):
        return
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(sums)):
        raise ValueError("Queries or keys of the batches are not finite, so nothing can be fitted.")
    if not bool(jnp.all(queries.num_vectors > 0) & jnp.all(keys.num_vectors > 0)):
        raise ValueError(
            "An adapter has seen no tokens, so nothing can be fitted: give batches, and call the "
            "whole model. A lifted transformation around the adapter must hand its moments on: "
            "nn.scan and nn.vmap by calibration_moments in their variable_axes, nnx.scan and "
            "nnx.vmap by an axis of the layers that is not None."
        )


def check_tilt(tilt: Tilt | None, options: DrawOptions | None) -> None:
    """Raises ``ValueError`` if W was drawn with norms that leave no room for a tilt."""
    if tilt is not None and options is not None and options.norms in FIXED_NORMS:
        raise ValueError(
            f"tilt={tilt!r} needs rows whose norms are chi variables, got an adapter with norms="
            f"{options.norms!r}; take tilt=None, or other norms."
        )


def check_fields(
    *,
    is_causal: bool,
    factored_masks: bool,
    decode: bool,
    sequence_axis: str | tuple[str, ...] | None,
) -> None:
    """Accepts the fields that adapters of all methods have."""
    switches = {"is_causal": is_causal, "factored_masks": factored_masks, "decode": decode}
    for name, switch in switches.items():
        checks.boolean(name, switch)
    checks.axis_names("sequence_axis", sequence_axis)


def check_feature_maps(feature_maps: Sequence[FeatureMapLike], *, num_weights: int | None) -> None:
    """Accepts feature maps whose W the adapters can draw."""
    if not isinstance(feature_maps, (tuple, list)) or not feature_maps:
        raise TypeError(f"feature_maps must be a tuple of feature maps, got {feature_maps!r}.")
    kinds = [as_feature_map(feature_map).projection_type for feature_map in feature_maps]
    for feature_map, kind in zip(feature_maps, kinds, strict=True):
        if kind not in (jax.Array, BipolarProjection):
            raise ValueError(
                f"feature_map={feature_map!r} takes a {kind.__name__}, which the adapters cannot "
                "draw: a ClusteredProjection takes the centres of clusters of queries and keys, "
                "for example. Call simrf_jax.random_feature_attention with it."
            )
    if num_weights is not None and BipolarProjection not in kinds:
        raise ValueError(
            "num_weights is for angular_hybrid and gaussian_hybrid, got "
            f"{num_weights} for {', '.join(map(repr, feature_maps))}."
        )


def draw_options(
    feature_map: FeatureMapLike,
    *,
    coupling: Coupling | None,
    block: BlockMode,
    rotation: Rotation,
    norms: Norms,
) -> DrawOptions:
    """Returns the options that the W of a feature map is drawn by.

    Args:
      feature_map: Feature map, by name or as an object.
      coupling: Coupling of the rows; None for the feature map's.
      block: Row-block mode.
      rotation: Distribution of the rotations.
      norms: Law of the row norms.

    Raises:
      ValueError: If a name is unknown, the coupling does not have the rows that ``norms`` couples,
        or the feature map needs norms that are chi variables.
    """
    feature_map = as_feature_map(feature_map)
    if feature_map.needs_chi_norms and norms in FIXED_NORMS:
        raise ValueError(
            f"norms={norms!r} fixes the norms of the rows, with which "
            f"{type(feature_map).__name__} estimates another kernel; it needs norms that are chi "
            "variables, such as norms='chi'."
        )
    return DrawOptions(
        feature_map.coupling if coupling is None else coupling, block, rotation, norms
    )


def draw_heads(
    key: jax.Array,
    num_heads: int | None,
    num_features: int | None,
    dim: int,
    *,
    feature_map: FeatureMapLike,
    num_weights: int | None,
    options: DrawOptions,
) -> Projection | None:
    """Draws the W of a feature map, one for each head.

    Args:
      key: A typed PRNG key.
      num_heads: Number of heads, the leading axis of the result; None draws one W without it.
      num_features: Number of random features; None draws nothing.
      dim: Width of a head.
      feature_map: Feature map, by name or as an object.
      num_weights: Number of random vectors that estimate the weight of a hybrid; None for 8.
      options: Options to draw by.
    """
    if num_features is None:
        return None
    dim = checks.positive_int("head_dim", dim)

    def draw(key: jax.Array) -> Projection:
        if as_feature_map(feature_map).projection_type is not BipolarProjection:
            return options.draw(key, num_features, dim)
        return draw_bipolar_projection(
            key,
            num_features,
            NUM_WEIGHTS if num_weights is None else num_weights,
            dim,
            coupling=options.coupling,
            block=options.block,
            rotation=options.rotation,
            norms=options.norms,
            num_sweeps=options.num_sweeps,
        )

    return draw(key) if num_heads is None else jax.vmap(draw)(jax.random.split(key, num_heads))


def draw_maps(
    key: jax.Array,
    num_heads: int | None,
    num_features: int | Sequence[int | None] | None,
    dim: int,
    *,
    feature_maps: Sequence[FeatureMapLike],
    num_weights: int | None,
    options: Sequence[DrawOptions],
) -> tuple[Projection | None, ...]:
    """Draws the projections of several feature maps.

    Args:
      key: A typed PRNG key.
      num_heads: Number of heads, the leading axis of each W; None draws them without it.
      num_features: Number of random features, or one number for each feature map.
      dim: Width of a head.
      feature_maps: Feature maps, by name or as objects.
      num_weights: Number of random vectors that estimate the weight of a hybrid; None for 8.
      options: Options to draw by, one record for each feature map.

    Raises:
      ValueError: If there is not one number of features for each feature map.
    """
    count = len(feature_maps)
    each = num_features if isinstance(num_features, (tuple, list)) else (num_features,) * count
    if len(each) != count:
        raise ValueError(
            "num_features must be one number, or one for each feature map, got "
            f"{len(each)} for {count}."
        )
    return tuple(
        draw_heads(
            one,
            num_heads,
            number,
            dim,
            feature_map=feature_map,
            num_weights=num_weights,
            options=its_options,
        )
        for one, number, feature_map, its_options in zip(
            jax.random.split(key, count), each, feature_maps, options, strict=True
        )
    )


def _register_serialization(cls: type[Any], parts: tuple[str, ...]) -> None:
    """Lets ``flax.serialization`` write and read the parts of a dataclass."""

    def to_state_dict(record: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(record, name)) for name in parts}

    def from_state_dict(record: Any, state: dict[str, Any]) -> Any:
        read = {
            name: serialization.from_state_dict(getattr(record, name), state[name], name=name)
            for name in parts
        }
        return dataclasses.replace(record, **read)

    serialization.register_serialization_state(cls, to_state_dict, from_state_dict)


_register_serialization(BipolarProjection, ("hyperbolic", "trigonometric", "weights"))
_register_serialization(WeightedProjection, ("rows", "log_weights"))
_register_serialization(Calibrated, tuple(field.name for field in dataclasses.fields(Calibrated)))
