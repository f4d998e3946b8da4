"""What both Flax APIs share: how a call of an ``attention_fn`` is read, and the answer to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from flax.linen.dtypes import promote_dtype
from jax.typing import ArrayLike, DTypeLike

from simrf_jax.attention import decoding, fmm_attention, random_feature_attention
from simrf_jax.features import (
    BipolarProjection,
    FeatureMap,
    draw_bipolar_projection,
    projection_type,
)
from simrf_jax.integrations.flax_masks import factor
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
        options |= with_weights(query)
        return decoding.fmm_step(state, query, *arrays, **options)

    init_state = functools.partial(decoding.init_fmm_state, bandwidth=bandwidth, **held)
    return Method(attention, init_state, step, in_order=True)


class Call(NamedTuple):
    """What Flax asks for.

    Attributes:
      query: ``[..., T, N, H]`` in the type to answer in, and so the others.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      per_key: The mask and the bias, the same for all queries.
      is_causal: Whether attention is causal.
      finish: What is left to do with an output.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    per_key: dict[str, ArrayLike | None]
    is_causal: bool
    finish: Callable[[jax.Array], jax.Array]


def read(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    is_causal: bool,
    factored_masks: bool,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    module: Any = None,
) -> Call:
    """Reads a call of an ``attention_fn``, and refuses what linear attention cannot do."""
    if dropout_rate > 0 and not deterministic:
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
    finish: Callable[[jax.Array], jax.Array] = _unchanged
    if mask is not None:  # Flax makes float masks by default.
        mask = mask.astype(bool) if isinstance(mask, np.ndarray) else jnp.asarray(mask, bool)
        target = (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
        factors = factor(mask, target, is_causal=is_causal) if factored_masks else None
        if factors is not None:
            mask = factors.keys
            # From [..., heads, T, 1] to [..., T, heads, 1].
            real, valid = (jnp.swapaxes(x, -3, -2) for x in factors[1:])
            # Padding may hold anything, NaN too: it must not reach the gradients.
            query = jnp.where(real, query, 0)
            finish = functools.partial(_finish, real, valid)
    return Call(query, key, value, {"mask": mask, "bias": bias}, is_causal, finish)


def _unchanged(out: jax.Array) -> jax.Array:
    return out


def _finish(real: jax.Array, valid: jax.Array, out: jax.Array) -> jax.Array:
    """Zeros for queries that see no key, NaN for all if the mask was no product."""
    return jnp.where(valid, jnp.where(real, out, 0), jnp.nan)


def attend(method: Method, call: Call) -> jax.Array:
    """The attention of all tokens."""
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    if (call.is_causal or method.in_order) and length != key_length:
        raise ValueError(
            "A causal adapter and one with a near field take as many keys as queries, since the "
            f"positions of both count from 0, got {key_length} keys for {length} queries. If they "
            "are in the cache of Flax's attention, turn its decode off and the adapter's on."
        )
    out = method.attention(*call[:3], **call.per_key, is_causal=call.is_causal)
    return call.finish(out)


def init_state(method: Method, call: Call) -> Any:
    """The state before the first token of sequences like those of a call."""
    return method.init_state(
        batch=call.key.shape[:-3],
        num_key_heads=call.key.shape[-2],
        head_dim=call.key.shape[-1],
        value_dim=call.value.shape[-1],
        dtype=call.key.dtype,
    )


def step(method: Method, state: Any, call: Call) -> tuple[jax.Array, Any]:
    """The attention of the tokens after those of a state, and the state with them."""
    length, key_length = call.query.shape[-3], call.key.shape[-3]
    if length != key_length:
        raise ValueError(
            "decode=True takes the keys of the new tokens, as many as queries, got "
            f"{key_length} keys for {length} queries. Turn the decode of Flax's attention off, "
            "which hands its own cache of all keys over, and that of adapters in cross-attention."
        )
    out, state = method.step(state, *call[:3], **call.per_key)
    return call.finish(out), state


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
