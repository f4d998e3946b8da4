"""Features of queries and keys, and the running sums over keys, which nothing can overflow.

Attention is a monoid: the states of two sets of keys merge into the state of both, and what a query
reads from two states adds up to what it reads from their merger. Bidirectional, causal and
step-by-step attention, and attention over many devices, are ways to bracket one product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float

from simrf_jax import one_line
from simrf_jax.attention.inputs.arguments import Arguments, Inputs, contract, quotient, repeat_heads
from simrf_jax.features import (
    FeatureMap,
    FeatureMapLike,
    LogFeatures,
    as_feature_map,
)
from simrf_jax.features.folded import Folded
from simrf_jax.projections import ProjectionLike, StructuredProjection, as_projection


class KeyFeatures(NamedTuple):
    """Features of keys, with all that scales them in the exponent.

    Attributes:
      features: Log features of ``[B, S, K]`` keys. Exponents are minus infinity where a key is
        hidden or has no finite features.
      spoils: ``[B, S, K]``, True where a visible key or its features are not finite: whoever sees
        it gets NaN.
    """

    features: LogFeatures
    spoils: Bool[Array, "B S K"]

    @classmethod
    def of(
        cls, phi: LogFeatures, log_weights: Float[Array, "B S K"], *, is_finite: bool
    ) -> KeyFeatures:
        """Returns the features of keys with log weights ``[B, S, K]``.

        Args:
          phi: Features as a map makes them.
          log_weights: ``Inputs.key_log_weights``, or a chunk of it.
          is_finite: True if the map says that its features are finite.
        """
        keys, spoiled = _split_spoiled(phi, is_finite)
        finite = ~spoiled & (keys.log_scale[..., 0] < jnp.inf)  # Scales may overflow.
        visible = ((log_weights > -jnp.inf) & finite)[..., None]  # NaN is not above -inf.
        # One number for each key: a choice for each feature would take a pass over all of them.
        shift = jnp.where(visible, keys.log_scale + log_weights[..., None], -jnp.inf)
        exponent = keys.exponent + shift
        features = LogFeatures(exponent, jnp.zeros_like(keys.log_scale), keys.values)
        return cls(features, (log_weights != -jnp.inf) & ~visible[..., 0])

    def only(self, visible: Bool[Array, "B S"]) -> KeyFeatures:
        """Hides the keys where ``visible``, ``[B, S]``, is False."""
        return KeyFeatures(hide(self.features, visible), self.spoils & visible[..., None])


class QueryFeatures(NamedTuple):
    """Features of queries.

    Attributes:
      features: Log features of ``[B, T, K, G]`` queries; zeros where a query has none that are
        finite.
      spoiled: ``[B, T, K, G]``, True at these; they get NaN.
    """

    features: LogFeatures
    spoiled: Bool[Array, "B T K G"]

    @classmethod
    def of(cls, phi: LogFeatures, *, is_finite: bool) -> QueryFeatures:
        """Returns the features of queries; see ``KeyFeatures.of`` for the arguments."""
        return cls(*_split_spoiled(phi, is_finite))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["projection", "feature_map"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class HeadMaps:
    """The feature map and W, which make features of the queries and keys of all heads.

    Attributes:
      projection: W of all heads, or ``[K, num_features, H]``, one for each key head; None for a map
        that needs none.
      feature_map: The feature map, whose fields may hold one array for each key head.
    """

    projection: Float[Array, "*K num_features H"] | StructuredProjection | None
    feature_map: FeatureMap

    def head_axes(self) -> HeadMaps:
        """Returns the axis of key heads of each part, 0 or None, as ``in_axes`` of ``jax.vmap``."""
        own = self.projection is not None and self.projection.ndim == 3
        axes: Any = (0 if own else None, self.feature_map.head_axes())
        return HeadMaps(*axes)

    def sharded_as(self, key: Float[Array, "B S K H"]) -> HeadMaps:
        """Returns what each head has, sharded by the explicit mesh axes of the heads of keys."""
        sharding = jax.typeof(key).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return self
        of_heads = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[2]))

        def place(axis: int | None, part: Any) -> Any:
            return part if axis is None else jax.sharding.reshard(part, of_heads)

        return jax.tree.map(place, self.head_axes(), self, is_leaf=lambda axis: axis is None)

    @jax.named_scope("key_features")
    def keys(
        self, key: Float[Array, "B S K H"] | LogFeatures, log_weights: Float[Array, "B S K"]
    ) -> KeyFeatures:
        """Returns the features of keys ``[B, S, K, H]`` with log weights ``[B, S, K]``."""
        phi = self.feature_map.log_features_of_heads(key, self.projection, side="key")
        return KeyFeatures.of(phi, log_weights, is_finite=self.feature_map.is_finite)

    @jax.named_scope("query_features")
    def queries(self, query: Float[Array, "B T K G H"] | LogFeatures) -> QueryFeatures:
        """Returns the features of queries ``[B, T, K, G, H]``."""
        phi = self.feature_map.log_features_of_heads(query, self.projection, side="query")
        return QueryFeatures.of(phi, is_finite=self.feature_map.is_finite)


def _split_spoiled(
    phi: LogFeatures, is_finite: bool
) -> tuple[LogFeatures, Bool[Array, "B length K *rest"]]:
    """Returns features, zeros where a vector has none that are finite, and where that is so.

    Nothing looks at the features of a map that says that they are finite: XLA could not fuse the
    look with the product that makes them, and would keep them in memory for it.
    """
    if is_finite:
        return phi, jnp.zeros_like(phi.exponent[..., 0], bool)
    finite = (phi.exponent < jnp.inf) & jnp.isfinite(phi.log_scale)  # NaN is not below infinity.
    if phi.values is not None:
        finite &= jnp.all(jnp.isfinite(phi.values), axis=-1, keepdims=True)
    finite = jnp.all(finite, axis=-1, keepdims=True)
    values = None if phi.values is None else jnp.where(finite, phi.values, 0)
    exponent = jnp.where(finite, phi.exponent, -jnp.inf)
    return LogFeatures(exponent, jnp.where(finite, phi.log_scale, 0), values), ~finite[..., 0]


class Readout(NamedTuple):
    """The sums that queries read from a state, in units of e^shift.

    Attributes:
      sums: ``[..., D + 1]``, numerator and denominator.
      shift: ``[..., 1]``; minus infinity where nothing was read.
    """

    sums: Float[Array, "*queries D+1"]
    shift: Float[Array, "*queries 1"]

    def add(self, other: Readout) -> Readout:
        """Returns what is read from two states together."""
        shift = jnp.maximum(self.shift, other.shift)
        sums = self._in_units_of(shift) + other._in_units_of(shift)
        return Readout(sums, shift)

    def _in_units_of(self, shift: Float[Array, "*queries 1"]) -> Float[Array, "*queries columns"]:
        return self.sums * jnp.exp(self.shift - or_zero(shift))

    def outputs(self) -> Float[Array, "*queries D"]:
        """Returns numerator over denominator, ``[..., D]``; zeros where no key is visible."""
        numerator, denominator = self.sums[..., :-1], self.sums[..., -1:]
        nothing = denominator == 0  # Exactly: no key is visible, or no feature is active.
        return jnp.where(nothing, 0, quotient(numerator, jnp.where(nothing, 1, denominator)))


class AttentionState(NamedTuple):
    r"""Running sums over keys, for each feature in units of its largest key.

    .. math:: c_i = \max_s \kappa_{si}, \qquad S_i = \sum_s e^{\kappa_{si} - c_i} (v_s, 1)

    with :math:`\kappa` the log features of the keys; values of signed maps stand as factors before
    the exponentials. Its size does not depend on the number of keys. The sums of a head are NaN
    once it has seen a key that was not finite.

    Attributes:
      sums: ``[B, K, num_features, D + 1]``; the last column sums the denominator.
      maxima: ``[B, K, num_features]``, or ``[B, K, 1]`` of a map whose features share an exponent;
        minus infinity where no key was seen.
    """

    sums: Float[Array, "*batch K num_features D+1"]
    maxima: Float[Array, "*batch K #num_features"]

    def __repr__(self) -> str:
        return one_line.representation(self)

    @classmethod
    def of(cls, keys: LogFeatures, value: Float[Array, "B S K columns"]) -> AttentionState:
        """Returns the state of keys ``[B, S, K, ...]`` with values ``[B, S, K, D + 1]``."""
        maxima = jnp.squeeze(largest(keys.exponent, axis=1), 1)
        return cls(contract("bskm,bskd->bkmd", in_units_of(maxima, keys), value), maxima)

    @classmethod
    def empty(cls, inputs: Inputs, features: HeadMaps) -> AttentionState:
        """Returns the state of no keys, for keys like those of the inputs."""
        keys = features.keys(inputs.key[:, :0], inputs.key_log_weights[:, :0]).features
        return cls.of_none(keys, with_ones(inputs.value[:, :0]))

    @classmethod
    def of_none(cls, keys: LogFeatures, value: Float[Array, "B 0 K columns"]) -> AttentionState:
        """Returns the state of keys ``[B, 0, K, ...]``."""
        phi = signed_exp(keys.exponent, keys.values)[..., None]
        # Unlike AttentionState.of, because an einsum of nothing fails in shard_map without jit
        # (jax 0.10.2).
        sums = jnp.sum(phi * value[:, :, :, None], axis=1)
        return cls(sums, jnp.squeeze(largest(keys.exponent, axis=1), 1))

    def merge(self, other: AttentionState) -> AttentionState:
        """Returns the state of the keys of both."""
        maxima = jnp.maximum(self.maxima, other.maxima)
        return AttentionState(self.in_units_of(maxima) + other.in_units_of(maxima), maxima)

    def in_units_of(
        self, maxima: Float[Array, "B K #num_features"]
    ) -> Float[Array, "B K num_features columns"]:
        """Returns the sums relative to other maxima, at least as large."""
        return self.sums * jnp.exp(self.maxima - or_zero(maxima))[..., None]

    def where(self, condition: Bool[Array, " B"]) -> AttentionState:
        """Returns the state where ``condition``, ``[B]``, is True, and an empty one elsewhere."""
        condition = condition[:, None, None]
        return AttentionState(
            jnp.where(condition[..., None], self.sums, 0),
            jnp.where(condition, self.maxima, -jnp.inf),
        )

    def spoil(self, condition: Bool[Array, "B K"]) -> AttentionState:
        """Returns the state with NaN sums where ``condition``, ``[B, K]``, is True."""
        return self._replace(sums=jnp.where(condition[:, :, None, None], jnp.nan, self.sums))

    def split_spoiled(self) -> tuple[AttentionState, Bool[Array, "B K"]]:
        """Returns a state of finite sums, and where ``spoil`` made them NaN, ``[B, K]``."""
        # The denominators say it. XLA evaluates this while it compiles if the state is empty, which
        # took seconds for all sums.
        spoiled = jnp.any(jnp.isnan(self.sums[..., -1]), axis=-1)
        return self._replace(sums=jnp.where(spoiled[:, :, None, None], 0, self.sums)), spoiled

    def weigh(
        self, queries: LogFeatures
    ) -> tuple[Float[Array, "B T K G num_features"], Float[Array, "B T K G 1"]]:
        """Returns what queries multiply the sums by, in units of e^shift, and the shift."""
        logits = queries.exponent + self.maxima[:, None, :, None, :]
        shift = largest(logits, axis=-1)
        return signed_exp(logits - or_zero(shift), queries.values), shift

    def read(self, queries: LogFeatures, dtype: jnp.dtype) -> Readout:
        """Returns what queries find, ``[B, T, K, G, D + 1]``.

        A query's log_scale cancels in the ratio and is left out. A feature that is zero for all
        keys has a maximum of minus infinity, so it does not set the shift of those that matter.

        Args:
          queries: Features of ``[B, T, K, G]`` queries.
          dtype: Type to contract in.
        """
        features, shift = self.weigh(queries)
        # In this order of axes the product needs no transposed copy of the features.
        sums = contract("btkgm,bkmd->bktgd", features, self.sums.astype(dtype))
        return Readout(jnp.moveaxis(sums, 2, 1), shift)


def state_of(inputs: Inputs, features: HeadMaps) -> AttentionState:
    """Returns the state of all keys."""
    keys, spoils = features.keys(inputs.key, inputs.key_log_weights)
    return AttentionState.of(keys, with_ones(inputs.value)).spoil(jnp.any(spoils, axis=1))


def lay_out(
    arguments: Arguments,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    *,
    scaled: bool = True,
) -> tuple[Inputs, HeadMaps]:
    """Lays the arguments out for random features, and gives each head its W.

    Args:
      arguments: Queries, keys and values.
      projection: W.
      feature_map: The feature map.
      scaled: True to multiply queries and keys by the square root of the scale each.

    Raises:
      TypeError: If a dtype is wrong.
      ValueError: If shapes do not match, or the arguments ask for what cannot be done.
    """
    w = None if projection is None else as_projection(projection)
    inputs = arguments.lay_out(
        dtype=None if w is None else w.dtype,
        scaled=scaled,
        fill_with_tokens=not feature_map.is_finite,
    )
    num_key_heads, dim = arguments.key.shape[-2:]
    groups = inputs.key.shape[2] // num_key_heads
    check_heads(feature_map, w, num_key_heads=num_key_heads, dim=dim)
    if groups > 1:  # Query heads get keys of their own.
        feature_map = _repeat_heads(feature_map, groups)
        if w is not None and w.ndim == 3:
            w = jax.tree.map(functools.partial(repeat_heads, groups=groups, axis=0), w)
    features = HeadMaps(w, feature_map)
    if _is_worth_folding(features, inputs):
        features = HeadMaps(None, Folded.of(feature_map, w))
    return inputs, features.sharded_as(inputs.key)


def _is_worth_folding(features: HeadMaps, inputs: Inputs) -> bool:
    """Returns True for maps that multiply fewer dense rows by matrices than there are vectors."""
    if not features.feature_map.multiplies_rows:
        return False
    if not getattr(features.projection, "is_dense", True):
        return False
    of_keys = functools.partial(type(features.feature_map).exponential_forms, side="key")
    form = jax.eval_shape(of_keys, features.feature_map, features.projection)
    # Symbolic sizes, of jax.export, are at least one.
    known = [size for size in inputs.query.shape[:2] if isinstance(size, int)]
    return form is not None and form.rows.shape[-2] < math.prod(known)


def _repeat_heads(feature_map: FeatureMap, groups: int) -> FeatureMap:
    """Repeats what a feature map holds for each key head."""

    def repeat(axis: int | None, leaf: Any) -> Any:
        return leaf if axis is None else repeat_heads(jnp.asarray(leaf), groups, axis=0)

    axes = feature_map.head_axes()
    if axes is None:
        return feature_map
    return jax.tree.map(repeat, axes, feature_map, is_leaf=lambda axis: axis is None)


def as_map_and_projection(
    feature_map: FeatureMapLike,
    projection: Float[ArrayLike, " ..."] | StructuredProjection | None,
) -> tuple[FeatureMap, Float[Array, " ..."] | StructuredProjection | None]:
    """Returns a feature map as an object and W as an array, whose values suit each other.

    Raises:
      TypeError: If either is of a wrong type.
      ValueError: If the name of a map is unknown, or the norms of the rows do not suit the map.
    """
    feature_map = as_feature_map(feature_map)
    w = None if projection is None else as_projection(projection)
    feature_map.check_norms(w)
    return feature_map, w


def check_heads(
    feature_map: FeatureMap,
    projection: Float[Array, " ..."] | StructuredProjection | None,
    *,
    num_key_heads: int,
    dim: int,
) -> None:
    """Raises ``ValueError`` if a feature map or W is for other heads than those of the keys."""
    name = type(feature_map).__name__
    if feature_map.head_dim not in (None, dim):
        raise ValueError(
            f"feature_map must be for heads of dim {dim}, got a {name} of dim "
            f"{feature_map.head_dim}."
        )

    def check(axis: int | None, leaf: Any) -> None:
        if axis is not None and jnp.shape(leaf)[0] != num_key_heads:
            raise ValueError(
                f"{name} must hold one array for all heads, or one for each of the "
                f"{num_key_heads} key heads, got shape {jnp.shape(leaf)}."
            )

    axes = feature_map.head_axes()
    if axes is not None:
        jax.tree.map(check, axes, feature_map, is_leaf=lambda axis: axis is None)
    if projection is None:
        return
    if projection.ndim not in (2, 3) or projection.shape[-1] != dim:
        raise ValueError(
            f"projection must be [num_features, {dim}] or [{num_key_heads}, num_features, {dim}] "
            f"for heads of dim {dim}, got shape {projection.shape}."
        )
    if projection.ndim == 3 and projection.shape[0] != num_key_heads:
        raise ValueError(
            f"projection must have one W for each of the {num_key_heads} key heads, "
            f"got shape {projection.shape}."
        )


def with_ones(value: Float[Array, "*batch D"]) -> Float[Array, "*batch D+1"]:
    """Appends a column of ones to values, which sums the denominator along with the numerator."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def hide(features: LogFeatures, visible: Bool[Array, "*batch length"]) -> LogFeatures:
    """Returns features that are zero where ``visible``, ``[B, length]``, is False."""
    shape = visible.shape + (1,) * (features.exponent.ndim - visible.ndim)
    exponent = jnp.where(visible.reshape(shape), features.exponent, -jnp.inf)
    return features._replace(exponent=exponent)


def largest(x: Float[Array, "*shape"], axis: int | tuple[int, ...]) -> Float[Array, " ..."]:
    """Returns a maximum as a shift, through which no gradient has to flow; -inf of nothing."""
    return jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf))


def or_zero(shift: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns a shift, or 0 where it is minus infinity, so that subtracting it makes no NaN."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def in_units_of(
    maxima: Float[Array, "B K #num_features"], keys: LogFeatures
) -> Float[Array, "B S K num_features"]:
    """Returns the features of keys, each in units of its maximum."""
    return signed_exp(keys.exponent - or_zero(maxima)[:, None], keys.values)


def signed_exp(
    exponent: Float[Array, " ..."],
    values: Float[Array, " ..."] | None,
) -> Float[Array, " ..."]:
    """Returns features of their shifted exponents and their values."""
    phi = jnp.exp(exponent)
    return phi if values is None else phi * values
