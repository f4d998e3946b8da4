"""The features that estimate attention: W, the feature map, and the layout of a call for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from simrf_jax._src import checks, one_line
from simrf_jax._src.attention.inputs.call import Axes, Call, Inputs, repeat_heads
from simrf_jax._src.attention.inputs.masks import Shape
from simrf_jax._src.attention.inputs.sharding import MeshAxes
from simrf_jax._src.features import (
    FeatureMap,
    LogFeatures,
    calls_function,
)
from simrf_jax._src.features.folded import Folded
from simrf_jax._src.projections import StructuredProjection

ONE_DEVICE = MeshAxes()
CHUNK_SIZE = 64  # Default number of keys per chunk of causal and packed attention.

# A number of keys, or positions of keys.
ExactKeysLike: TypeAlias = SupportsIndex | Sequence[int] | Integer[ArrayLike, "*batch g"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(
    function: Function, feature_map: FeatureMap, *static: str, inline: bool = True
) -> Function:
    """Returns a compiled function, or the function itself if the map is a user's function.

    There is one program for each shape and feature map, even without jit around the call. User
    functions are not cached: they may be impure.

    Args:
      function: A function of arrays and feature maps, of a module.
      feature_map: The feature map that it is called with.
      *static: Names of static arguments.
      inline: False for a function that a computation calls several times, so that it is traced
        once.
    """
    return function if calls_function(feature_map) else _program(function, static, inline)


@functools.cache
def _program(function: Function, static: tuple[str, ...], inline: bool) -> Function:
    return cast(Function, jax.jit(function, static_argnames=static, inline=inline))


class KeyFeatures(NamedTuple):
    """Features of keys, with all their scales in the exponent.

    Attributes:
      features: Log features of ``[B, S, K]`` keys. Exponents are minus infinity where a key is
        hidden or has no finite features.
      nonfinite: ``[B, S, K]``, True where a visible key or its features are not finite: a query
        that sees it gets NaN.
    """

    features: LogFeatures
    nonfinite: Bool[Array, "B S K"]


class QueryFeatures(NamedTuple):
    """Features of queries.

    Attributes:
      features: Log features of ``[B, T, K, G]`` queries; zeros where they are not finite.
      poisoned: ``[B, T, K, G]``, True at these queries; they get NaN.
    """

    features: LogFeatures
    poisoned: Bool[Array, "B T K G"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["projection", "feature_map"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class HeadMaps:
    """The feature map and W, which compute the features of the queries and keys of all heads.

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
        """Shards the arrays of each head by the explicit mesh axes that shard the key heads."""
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
        keys = self.feature_map.log_features_of_heads(key, self.projection, side="key")
        finite = keys.log_scale[..., 0] < jnp.inf  # Scales may overflow.
        if not self.feature_map.is_finite:
            keys, nonfinite = _split_nonfinite(keys)
            finite = ~nonfinite & (keys.log_scale[..., 0] < jnp.inf)
        visible = ((log_weights > -jnp.inf) & finite)[..., None]  # NaN is not above -inf.
        # One number for each key: a select for each feature would take a pass over all of them.
        shift = jnp.where(visible, keys.log_scale + log_weights[..., None], -jnp.inf)
        exponent = keys.exponent + shift
        features = LogFeatures(exponent, jnp.zeros_like(keys.log_scale), keys.values)
        return KeyFeatures(features, (log_weights != -jnp.inf) & ~visible[..., 0])

    @jax.named_scope("query_features")
    def queries(self, query: Float[Array, "B T K G H"] | LogFeatures) -> QueryFeatures:
        """Returns the features of queries ``[B, T, K, G, H]``."""
        phi = self.feature_map.log_features_of_heads(query, self.projection, side="query")
        if self.feature_map.is_finite:
            return QueryFeatures(phi, jnp.zeros_like(phi.exponent[..., 0], bool))
        return QueryFeatures(*_split_nonfinite(phi))


def _split_nonfinite(
    phi: LogFeatures,
) -> tuple[LogFeatures, Bool[Array, "B length K *rest"]]:
    """Returns the features, with zeros where a vector is not finite, and a mask of such vectors.

    Maps with ``is_finite`` skip the check: it would stop XLA from fusing the exponential into the
    product.
    """
    finite = (phi.exponent < jnp.inf) & jnp.isfinite(phi.log_scale)  # NaN is not below infinity.
    if phi.values is not None:
        finite &= jnp.all(jnp.isfinite(phi.values), axis=-1, keepdims=True)
    finite = jnp.all(finite, axis=-1, keepdims=True)
    values = None if phi.values is None else jnp.where(finite, phi.values, 0)
    exponent = jnp.where(finite, phi.exponent, -jnp.inf)
    return LogFeatures(exponent, jnp.where(finite, phi.log_scale, 0), values), ~finite[..., 0]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["positions"], meta_fields=["count"]
)
@dataclasses.dataclass(frozen=True, eq=False)
class KeyChoice:
    """A choice of keys that all queries see exactly.

    Attributes:
      count: Number of keys to choose, by the largest estimated mass; 0 with positions.
      positions: ``[..., g]``, positions of the keys, counted from the end if negative; or None.
    """

    count: int
    positions: Integer[Array, "*batch g"] | None = None

    def __repr__(self) -> str:
        return one_line.representation(self)

    @classmethod
    def of(cls, exact_keys: ExactKeysLike | KeyChoice) -> KeyChoice:
        """Returns the choice of a number of keys, or of an array of positions.

        Raises:
          TypeError: If the choice is neither an integer nor an array of integers.
          ValueError: If the number is below 1, or the positions are empty.
        """
        if isinstance(exact_keys, KeyChoice):
            return exact_keys
        given: Any = exact_keys
        if np.ndim(given) == 0:
            return cls(checks.positive_int("exact_keys", given))
        positions = jnp.asarray(given)
        if positions.shape[-1] == 0:
            raise ValueError(f"exact_keys must have a position, got shape {positions.shape}.")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(
                "exact_keys must be a number of keys, or integers, their positions, got "
                f"{positions.dtype.name}."
            )
        return cls(0, positions.astype(jnp.int32))  # Narrow types cannot hold all lengths.

    def check(self, feature_map: FeatureMap, *, is_causal: bool, is_packed: bool = False) -> None:
        """Raises ``ValueError`` if a feature map or a mode of attention cannot use such keys."""
        check_estimates_softmax("exact_keys", feature_map)
        if self.positions is None and (is_causal or is_packed):
            reached = (
                "later tokens would reach earlier outputs of causal attention"
                if is_causal
                else "the tokens of one packed segment would reach the outputs of another"
            )
            raise ValueError(
                f"exact_keys={self.count} chooses keys by all queries, so {reached}; pass "
                "positions, such as the first four: exact_keys=(0, 1, 2, 3)."
            )

    def check_batch(self, batch: Shape) -> None:
        """Raises ``ValueError`` if there are positions for other sequences."""
        if self.positions is not None and self.positions.shape[:-1] not in ((), batch):
            raise ValueError(
                f"exact_keys must be a number, [g] or [*batch, g] with the batch shape {batch}, "
                f"got shape {self.positions.shape}."
            )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["projection", "feature_map", "exact_keys"],
    meta_fields=["chunk_size", "exact_bandwidth", "sequence_axes", "mesh_axes"],
)
@dataclasses.dataclass(frozen=True)
class Estimator:
    """Random-feature attention with its checked fields.

    Attributes:
      projection: W, for all heads or one for each key head; None for a map that needs none.
      feature_map: The feature map.
      chunk_size: Number of keys per chunk of causal and packed attention, a power of two.
      exact_bandwidth: Distance over which a query sees keys exactly; None for no band.
      sequence_axes: Mesh axes that shard the length, as the caller named them.
      mesh_axes: Mesh axes of batch and heads, for kernels.
      exact_keys: Keys that all queries see exactly; None for none.
    """

    projection: Float[Array, "*K num_features H"] | StructuredProjection | None
    feature_map: FeatureMap
    chunk_size: int = CHUNK_SIZE
    exact_bandwidth: int | None = None
    sequence_axes: Axes = ()
    mesh_axes: MeshAxes = ONE_DEVICE
    exact_keys: KeyChoice | None = None

    def lay_out(self, call: Call, *, scaled: bool | None = None) -> tuple[Inputs, HeadMaps]:
        """Lays a call out for random features, with a W for each head.

        Args:
          call: Queries, keys and values.
          scaled: True to multiply queries and keys by the square root of the scale each; None to do
            so unless there is a band, whose logits are scaled.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not match, or the call asks for something unsupported.
        """
        w, feature_map = self.projection, self.feature_map
        self.check_heads(call)
        if self.exact_keys is not None:
            is_packed = call.segment_ids is not None
            self.exact_keys.check(feature_map, is_causal=call.is_causal, is_packed=is_packed)
            self.exact_keys.check_batch(call.query.shape[:-3])
        inputs = call.lay_out(
            dtype=None if w is None else w.dtype,
            scaled=self.exact_bandwidth is None if scaled is None else scaled,
            fill_with_tokens=not feature_map.is_finite,
        )
        groups = inputs.key.shape[2] // call.key.shape[-2]
        if groups > 1:  # Each query head gets its own copy of the keys.
            feature_map = _repeat_heads(feature_map, groups)
            if w is not None and w.ndim == 3:
                w = jax.tree.map(functools.partial(repeat_heads, groups=groups, axis=0), w)
        features = HeadMaps(w, feature_map)
        if feature_map.multiplies_rows and _is_worth_folding(features, inputs):
            features = HeadMaps(None, Folded.of(feature_map, w))
        return inputs, features.sharded_as(inputs.key)

    def check_heads(self, call: Call) -> None:
        """Raises ``ValueError`` if the feature map or W does not fit the heads of the keys."""
        num_key_heads, dim = call.key.shape[-2:]
        projection, feature_map = self.projection, self.feature_map
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
                f"projection must be [num_features, {dim}] or [{num_key_heads}, num_features, "
                f"{dim}] for heads of dim {dim}, got shape {projection.shape}."
            )
        if projection.ndim == 3 and projection.shape[0] != num_key_heads:
            raise ValueError(
                f"projection must have one W for each of the {num_key_heads} key heads, "
                f"got shape {projection.shape}."
            )


def check_band(bandwidth: SupportsIndex, feature_map: FeatureMap) -> int:
    """Returns the bandwidth as an integer, if the feature map can be used with a band.

    Raises:
      TypeError: If the bandwidth is not an integer.
      ValueError: If it is negative, or the feature map estimates a different kernel from that of
        the keys in the band.
    """
    check_estimates_softmax("exact_bandwidth", feature_map)
    return checks.integer("exact_bandwidth", bandwidth, least=0)


def check_estimates_softmax(name: str, feature_map: FeatureMap) -> None:
    """Raises ``ValueError`` if features cannot share a normalizer with exact keys."""
    if not feature_map.estimates_softmax:
        raise ValueError(
            f"{name} takes a feature map that estimates exp(x . y), the kernel of the exact keys, "
            f"got {feature_map!r}, which estimates another kernel or none."
        )


def _is_worth_folding(features: HeadMaps, inputs: Inputs) -> bool:
    """Returns True if W has fewer rows to multiply than there are vectors."""
    if not getattr(features.projection, "is_dense", True):
        return False
    of_keys = functools.partial(type(features.feature_map).exponential_forms, side="key")
    form = jax.eval_shape(of_keys, features.feature_map, features.projection)
    # Symbolic sizes, of jax.export, are at least one.
    known = [size for size in inputs.query.shape[:2] if isinstance(size, int)]
    return form is not None and form.rows.shape[-2] < math.prod(known)


def _repeat_heads(feature_map: FeatureMap, groups: int) -> FeatureMap:
    """Repeats the arrays that a feature map holds for each key head."""

    def repeat(axis: int | None, leaf: Any) -> Any:
        return leaf if axis is None else repeat_heads(jnp.asarray(leaf), groups, axis=0)

    axes = feature_map.head_axes()
    if axes is None:
        return feature_map
    return jax.tree.map(repeat, axes, feature_map, is_leaf=lambda axis: axis is None)


def hide(features: LogFeatures, visible: Bool[Array, "*batch length"]) -> LogFeatures:
    """Returns features that are zero where ``visible``, ``[B, length]``, is False."""
    shape = visible.shape + (1,) * (features.exponent.ndim - visible.ndim)
    exponent = jnp.where(visible.reshape(shape), features.exponent, -jnp.inf)
    return features._replace(exponent=exponent)
