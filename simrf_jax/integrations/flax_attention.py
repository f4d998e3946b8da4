"""What both Flax APIs share: how a call of an ``attention_fn`` is read, and the answer to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import serialization
from flax.linen.dtypes import promote_dtype
from flax.typing import PrecisionLike
from jax.typing import ArrayLike, DTypeLike

from simrf_jax import checks
from simrf_jax.attention import decoding, fmm_attention, random_feature_attention
from simrf_jax.features import (
    BipolarProjection,
    FeatureMap,
    draw_bipolar_projection,
    projection_type,
)
from simrf_jax.integrations import flax_masks
from simrf_jax.integrations.flax_masks import Mask
from simrf_jax.projections import Projection, draw_projection

# A bipolar hybrid has 4 num_features (num_weights + 1) features, or as good as that.
NUM_WEIGHTS = 8


class Method(NamedTuple):
    """An attention of all tokens at once, and the same token by token, with all it holds bound.

    Attributes:
      attention: Of queries, keys and values.
      init_state: The state before the first token.
      step: Of a state, queries, keys and values.
      in_order: Whether positions matter, causal or not.
    """

    attention: Callable[..., jax.Array]
    init_state: Callable[..., Any]
    step: Callable[..., tuple[jax.Array, Any]]
    in_order: bool


def random_feature_method(
    projection: Projection | None,
    feature_map: FeatureMap,
    sequence_axis: str | tuple[str, ...] | None,
) -> Method:
    """Random-feature attention; W gets no gradient."""
    held: dict[str, Any] = {
        "projection": jax.lax.stop_gradient(projection),
        "feature_map": feature_map,
    }
    return Method(
        functools.partial(random_feature_attention, sequence_axis=sequence_axis, **held),
        functools.partial(decoding.init_state, **held),
        functools.partial(decoding.step, **held),
        in_order=False,
    )


def fmm_method(
    projections: Sequence[Projection | None],
    *,
    feature_maps: Sequence[FeatureMap],
    bandwidth: int,
    near_logit: jax.Array,
    far_logits: jax.Array,
    sequence_axis: str | tuple[str, ...] | None,
) -> Method:
    """FMM attention; W gets no gradient, the weights of the fields do."""
    held: dict[str, Any] = {
        "projections": jax.lax.stop_gradient(tuple(projections)),
        "feature_maps": tuple(feature_maps),
    }

    def with_weights(query: jax.Array) -> dict[str, Any]:
        groups = query.shape[-2] // near_logit.shape[-1]
        near, far = (
            jnp.repeat(jax.nn.sigmoid(logits), groups, axis=-1)
            for logits in (near_logit, far_logits)
        )
        return {**held, "near_weight": near, "far_weights": far}

    def attention(query: jax.Array, *arrays: Any, **options: Any) -> jax.Array:
        options |= with_weights(query) | {"bandwidth": bandwidth, "sequence_axis": sequence_axis}
        return fmm_attention(query, *arrays, **options)

    def step(
        state: decoding.FMMState, query: jax.Array, *arrays: Any, **options: Any
    ) -> tuple[jax.Array, decoding.FMMState]:
        if isinstance(state, decoding.FMMState) and state.near.key.shape[-3] != bandwidth:
            raise ValueError(
                f"The cache is for bandwidth={state.near.key.shape[-3]}, the adapter has "
                f"bandwidth={bandwidth}; make a new cache with it."
            )
        options |= with_weights(query)
        return decoding.fmm_step(state, query, *arrays, **options)

    init_state = functools.partial(decoding.init_fmm_state, bandwidth=bandwidth, **held)
    return Method(attention, init_state, step, in_order=True)


class Call(NamedTuple):
    """What Flax asks for.

    Attributes:
      query: ``[..., T, N, H]`` in the type to answer in, like the key and the value.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      options: The mask, bias, scale and lengths, as ``random_feature_attention`` takes them.
      segment_ids: ``[..., T]``, or None.
      is_causal: Whether attention is causal.
      real: ``[..., T, N, 1]``, False where a factored mask hides all keys from a query; or None.
      valid: Booleans, False for each sequence and head whose traced mask has a value or a form that
        was refused had it been known; they broadcast with the output.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    options: dict[str, ArrayLike | None]
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
    options = {
        "mask": mask,
        "bias": bias,
        "scale": scale,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
    }
    return Call(query, key, value, options, segment_ids, is_causal, real, tuple(valid))


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


def attend(method: Method, call: Call) -> jax.Array:
    """Returns the attention of all tokens."""
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    if (call.is_causal or method.in_order) and length != key_length:
        raise ValueError(
            "A causal adapter and one with a near field take as many keys as queries, since the "
            f"positions of both count from 0, got {key_length} keys for {length} queries. If they "
            "are in the cache of Flax's attention, turn its decode off and the adapter's on."
        )
    out = method.attention(
        call.query,
        call.key,
        call.value,
        is_causal=call.is_causal,
        segment_ids=call.segment_ids,
        **call.options,
    )
    return call.finish(out)


def init_state(method: Method, call: Call) -> Any:
    """Returns the state before the first token of sequences like those of a call."""
    return method.init_state(
        batch=call.key.shape[:-3],
        num_key_heads=call.key.shape[-2],
        head_dim=call.key.shape[-1],
        value_dim=call.value.shape[-1],
        dtype=call.key.dtype,
    )


def step(method: Method, state: Any, call: Call) -> tuple[jax.Array, Any]:
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
    out, state = method.step(state, call.query, call.key, call.value, **call.options)
    return call.finish(out), state


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


def check_feature_maps(feature_maps: Sequence[FeatureMap], *, num_weights: int | None) -> None:
    """Accepts feature maps whose W the adapters can draw."""
    if not isinstance(feature_maps, (tuple, list)) or not feature_maps:
        raise TypeError(f"feature_maps must be a tuple of feature maps, got {feature_maps!r}.")
    kinds = [projection_type(feature_map) for feature_map in feature_maps]
    for feature_map, kind in zip(feature_maps, kinds, strict=True):
        if kind not in (jax.Array, BipolarProjection):
            raise ValueError(
                f"feature_map={feature_map!r} takes the centres of clusters of queries and keys, "
                "which depend on the data, so the adapters cannot draw them; call "
                "simrf_jax.random_feature_attention with it."
            )
    if num_weights is not None and BipolarProjection not in kinds:
        raise ValueError(
            "num_weights is for angular_hybrid and gaussian_hybrid, got "
            f"{num_weights} for {', '.join(map(repr, feature_maps))}."
        )


def draw_heads(
    key: jax.Array,
    num_heads: int | None,
    num_features: int | None,
    dim: int,
    *,
    feature_map: FeatureMap,
    num_weights: int | None,
    **draw_options: Any,
) -> Projection | None:
    """Draws W of a feature map, a stack of ``num_heads`` of them, or one if num_heads is None."""
    if num_features is None:
        return None
    dim = checks.positive_int("head_dim", dim)

    def draw(key: jax.Array) -> Projection:
        if projection_type(feature_map) is not BipolarProjection:
            return draw_projection(key, num_features, dim, **draw_options)
        weights = NUM_WEIGHTS if num_weights is None else num_weights
        return draw_bipolar_projection(key, num_features, weights, dim, **draw_options)

    return draw(key) if num_heads is None else jax.vmap(draw)(jax.random.split(key, num_heads))


def draw_maps(
    key: jax.Array,
    num_heads: int | None,
    num_features: int | Sequence[int | None] | None,
    dim: int,
    *,
    feature_maps: Sequence[FeatureMap],
    **options: Any,
) -> tuple[Projection | None, ...]:
    """Draws the projections of several feature maps."""
    count = len(feature_maps)
    each = num_features if isinstance(num_features, (tuple, list)) else (num_features,) * count
    if len(each) != count:
        raise ValueError(
            "num_features must be one number, or one for each feature map, got "
            f"{len(each)} for {count}."
        )
    return tuple(
        draw_heads(one, num_heads, number, dim, feature_map=feature_map, **options)
        for one, number, feature_map in zip(
            jax.random.split(key, count), each, feature_maps, strict=True
        )
    )


def _parts(projection: BipolarProjection) -> dict[str, Any]:
    return {name: serialization.to_state_dict(part) for name, part in vars(projection).items()}


def _from_parts(projection: BipolarProjection, state: dict[str, Any]) -> BipolarProjection:
    parts = {
        name: serialization.from_state_dict(part, state[name], name=name)
        for name, part in vars(projection).items()
    }
    return BipolarProjection(**parts)


serialization.register_serialization_state(BipolarProjection, _parts, _from_parts)
