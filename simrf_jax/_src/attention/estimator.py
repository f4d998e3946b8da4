"""The features that estimate attention: W, the feature map, and the layout of a call for them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Literal,
    NamedTuple,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from simrf_jax._src import checks, one_line
from simrf_jax._src.attention.inputs.call import Axes, Call, Inputs, repeat_heads
from simrf_jax._src.attention.inputs.masks import Shape, to_int32
from simrf_jax._src.attention.inputs.sharding import MeshAxes
from simrf_jax._src.features import (
    FeatureMap,
    LogFeatures,
    calls_function,
)
from simrf_jax._src.features.folded import Folded
from simrf_jax._src.projections import StructuredProjection

# Default numbers of keys per chunk of causal and packed attention. On an H200 shorter chunks cost
# more launches, and longer ones more pairs.
CHUNK_SIZE, CHUNK_SIZE_ON_GPUS = 64, 256

KeyRule: TypeAlias = Literal["mass", "score"]


@dataclasses.dataclass(frozen=True)
class ExactKeys:
    r"""A number of exact keys and the rule that chooses them, for ``exact_keys`` of attention.

    ``"mass"`` is the rule of a plain number: keys with the largest sums, over all queries of the
    sequence, of the attention weights that the features imply. ``"score"`` looks at no queries and
    not at W, so estimates stay unbiased. It takes the keys y with the largest logarithm of a mean
    attention weight, plus their bias,

    .. math:: \log E_x \frac{e^{x \cdot y}}{E_{y'} e^{x \cdot y'}}, \qquad
        x \sim N(b_x, C_x), \quad y' \sim N(b_y, C_y),

    with the means and the covariances of the queries and keys to which ``calibrate`` fitted the
    feature map. Without a fit both are standard normal, and the longest keys have the best scores.
    The covariances are computed from the map's tilt. With a map of ``calibrate(..., tilt=None)`` or
    ``fit_mixture``, fewer of the chosen keys are therefore among the best, and with
    ``center=False`` hardly any: measure the error, or choose by ``"mass"``.

    Causal attention accepts only ``"score"``, and packed attention only if it is causal. Query t
    then sees the ``count`` best of the keys up to its own position exactly. With an exact band
    these are the best of the keys before the band. A key that a better one displaces moves into the
    running sums and never returns. So no later key affects an output, and the state of decoding has
    a fixed size: the running sums, and ``count`` keys and values with their scores.

    Attributes:
      count: Number of keys of each key head, and of each segment. By score, each query head chooses
        its own if a mask or a bias has an axis of query heads.
      by: ``"mass"`` or ``"score"``.

    Example:
      >>> import jax, simrf_jax
      >>> q, k, v = 2 * jax.random.normal(jax.random.key(0), (3, 100, 8, 64))
      >>> mechanism = simrf_jax.RandomFeatureMechanism(
      ...     simrf_jax.draw_projection(jax.random.key(1), 112, 64),
      ...     simrf_jax.calibrate(q, k),
      ...     exact_keys=simrf_jax.ExactKeys(16, by="score"),
      ... )
      >>> whole = mechanism.attend(q, k, v, is_causal=True)
      >>> state = mechanism.init(num_key_heads=8, head_dim=64, value_dim=64)
      >>> prompt, state = mechanism.step(state, q[:99], k[:99], v[:99])
      >>> token, state = mechanism.step(state, q[99:], k[99:], v[99:])
      >>> bool(abs(token - whole[99:]).max() < 1e-4)
      True

    References:
      McDermott et al., LoLA: Low-Rank Linear Attention With Sparse Caching (2025),
      https://arxiv.org/abs/2505.23666, also keep some keys next to running sums, and add to the
      sums what leaves.
      Zhang et al., H2O: Heavy-Hitter Oracle (NeurIPS 2023), https://arxiv.org/abs/2306.14048, and
      Xiao et al., Efficient Streaming Language Models with Attention Sinks (ICLR 2024),
      https://arxiv.org/abs/2309.17453, keep some keys and drop the others.
    """

    count: SupportsIndex
    by: KeyRule = "mass"

    def __post_init__(self) -> None:
        """Checks the fields."""
        object.__setattr__(self, "count", checks.positive_int("count", self.count))
        checks.one_of("by", self.by, get_args(KeyRule))


# A number of keys, a number and a rule, or positions of keys.
ExactKeysLike: TypeAlias = (
    SupportsIndex | ExactKeys | Sequence[int] | Integer[ArrayLike, "*batch g"]
)

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
    if calls_function(feature_map):
        return function
    return cast(Function, _program(function, static_argnames=static, inline=inline))


_program: Any = functools.cache(jax.jit)  # One for each function and its options.


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadMaps:
    """The feature map and W, which compute the features of the queries and keys of all heads.

    Attributes:
      projection: W of all heads, or ``[K, num_features, H]``, one for each key head; None for a map
        that needs none.
      feature_map: The feature map, whose fields may hold one array for each key head.
      scorer: The map before it was merged with W, which scores keys; None if nothing is scored.
    """

    projection: Float[Array, "*K num_features H"] | StructuredProjection | None
    feature_map: FeatureMap
    scorer: FeatureMap | None = None

    def head_axes(self) -> HeadMaps:
        """Returns the axis of key heads of each part, 0 or None, as ``in_axes`` of ``jax.vmap``."""
        own = self.projection is not None and self.projection.ndim == 3
        scorer = None if self.scorer is None else self.scorer.head_axes()
        axes: Any = (0 if own else None, self.feature_map.head_axes(), scorer)
        return HeadMaps(*axes)

    def map_heads(self, function: Callable[[Any], Any]) -> HeadMaps:
        """Returns the maps with ``function`` of each array that has an axis of key heads."""

        def apply(axis: int | None, part: Any) -> Any:
            return part if axis is None else jax.tree.map(function, part)

        return jax.tree.map(apply, self.head_axes(), self, is_leaf=lambda axis: axis is None)

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

    def key_scores(
        self, key: Float[Array, "B S K H"], log_weights: Float[Array, "B S K"]
    ) -> Float[Array, "B S K"]:
        """Returns scores of keys, their log weights included, without gradients.

        They are minus infinity at keys that are hidden or not finite, and finite at all others.
        """
        scorer, key, log_weights = jax.lax.stop_gradient((self.scorer, key, log_weights))
        if scorer is None:
            raise TypeError("Keys are scored only for an Estimator that chooses keys by score.")
        axes, of_head = scorer.head_axes(), type(scorer).key_scores
        if jax.tree.leaves(axes):
            scores = jax.vmap(of_head, in_axes=(axes, 2), out_axes=2)(scorer, key)
        else:
            scores = of_head(scorer, key)
        scores, most = scores + log_weights, float(jnp.finfo(key.dtype).max)
        scores = jnp.nan_to_num(scores, nan=most, posinf=most, neginf=-most)
        return jnp.where(log_weights > -jnp.inf, scores, -jnp.inf)  # NaN is not above -inf.


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KeyChoice:
    """A choice of keys that queries see exactly.

    Attributes:
      count: Number of keys to choose; 0 with positions.
      positions: ``[..., g]``, positions of the keys, counted from the end if negative; or None.
      by: The rule that chooses a number of keys.
    """

    count: int = dataclasses.field(metadata={"static": True})
    positions: Integer[Array, "*batch g"] | None = None
    by: KeyRule = dataclasses.field(default="mass", metadata={"static": True})

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
        if isinstance(exact_keys, ExactKeys):
            return cls(int(exact_keys.count), by=exact_keys.by)
        given: Any = exact_keys
        if np.ndim(given) == 0:
            return cls(checks.positive_int("exact_keys", given))
        positions = given if isinstance(given, jax.Array) else np.asarray(given)
        if positions.shape[-1] == 0:
            raise ValueError(f"exact_keys must have a position, got shape {positions.shape}.")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(
                "exact_keys must be a number of keys, or integers, their positions, got "
                f"{positions.dtype.name}."
            )
        return cls(0, to_int32(positions))  # Narrow types cannot hold all lengths.

    def check(self, feature_map: FeatureMap, *, is_causal: bool, is_packed: bool = False) -> None:
        """Raises ``ValueError`` if a feature map or a mode of attention cannot use such keys."""
        check_estimates_softmax("exact_keys", feature_map)
        if self.by == "score" and is_packed and not is_causal:
            raise ValueError(
                f"exact_keys={self.count} by score are for each segment, so their number in packed "
                "attention is not known; set is_causal=True, or pass positions."
            )
        if self.positions is None and self.by == "mass" and (is_causal or is_packed):
            reached = (
                "later tokens would reach earlier outputs of causal attention"
                if is_causal
                else "the tokens of one packed segment would reach the outputs of another"
            )
            raise ValueError(
                f"exact_keys={self.count} chooses keys by all queries, so {reached}; choose them "
                f'by scores of the keys, exact_keys=ExactKeys({self.count}, by="score"), or pass '
                "positions, such as the first four: exact_keys=(0, 1, 2, 3)."
            )

    def keeps(self, *, is_causal: bool) -> bool:
        """Returns whether the keys that queries see exactly change with the position."""
        return is_causal and self.positions is None

    def check_batch(self, batch: Shape) -> None:
        """Raises ``ValueError`` if there are positions for other sequences."""
        if self.positions is not None and self.positions.shape[:-1] not in ((), batch):
            raise ValueError(
                f"exact_keys must be a number, [g] or [*batch, g] with the batch shape {batch}, "
                f"got shape {self.positions.shape}."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Estimator:
    """The checked fields of ``RandomFeatureMechanism``, and the layout of a call for them.

    Implementations read these fields. They are described in ``RandomFeatureMechanism``, which
    derives from this class and chooses an implementation.
    """

    projection: Float[Array, "*K num_features H"] | StructuredProjection | None
    feature_map: FeatureMap
    chunk_size: int
    sequence_axis: Axes | None
    batch_axis: Axes | None
    head_axis: Axes | None
    implementation: tuple[str, ...] | None
    exact_bandwidth: int | None
    exact_keys: KeyChoice | None

    def __repr__(self) -> str:
        return one_line.representation(self)

    @property
    def mesh_axes(self) -> MeshAxes:
        """Mesh axes of batch and heads, for kernels."""
        return MeshAxes(self.batch_axis or (), self.head_axis or ())

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
            dtype=jnp.float32 if w is None else w.dtype,
            scaled=self.exact_bandwidth is None if scaled is None else scaled,
            fill_with_tokens=not feature_map.is_finite,
        )
        by_score = self.exact_keys is not None and self.exact_keys.by == "score"
        features = HeadMaps(w, feature_map, feature_map if by_score else None)
        groups = inputs.key.shape[2] // call.key.shape[-2]
        if groups > 1:  # Each query head gets its own copy of the keys.
            features = features.map_heads(lambda x: repeat_heads(jnp.asarray(x), groups, axis=0))
        if feature_map.multiplies_rows and _is_worth_folding(features, inputs):
            folded = Folded.of(features.feature_map, features.projection)
            features = HeadMaps(None, folded, features.scorer)
        sharding = jax.typeof(inputs.key).sharding
        if AxisType.Explicit in sharding.mesh.axis_types:
            of_heads = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[2]))
            features = features.map_heads(lambda x: jax.sharding.reshard(x, of_heads))
        return inputs, features

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


def hide(features: LogFeatures, visible: Bool[Array, "*batch length"]) -> LogFeatures:
    """Returns features that are zero where ``visible``, ``[B, length]``, is False."""
    shape = visible.shape + (1,) * (features.exponent.ndim - visible.ndim)
    exponent = jnp.where(visible.reshape(shape), features.exponent, -jnp.inf)
    return features._replace(exponent=exponent)
