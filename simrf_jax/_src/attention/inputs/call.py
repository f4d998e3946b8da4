"""An attention call: the caller's arguments, and their layout for the mechanisms."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real, Shaped

from simrf_jax._src import checks
from simrf_jax._src.attention.inputs.masks import (
    Lengths,
    Mask,
    Shape,
    Unchecked,
    as_array,
    one_row,
    per_key,
    segment_numbers,
    within_lengths,
)

# Names of mesh axes.
Axes: TypeAlias = tuple[str, ...]

# This many numbers can be added without overflow; larger numbers count as not finite.
MOST_TERMS = 2**24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Queries, keys and values by key heads: K key heads with G query heads each.

    All queries, keys and values are finite. Those that were not, and hidden ones, are replaced by
    zeros or by other tokens, because 0 * NaN is not 0, in gradients too.

    Attributes:
      query: ``[B, T, K, G, H]``, in the dtype of the logits.
      key: ``[B, S, K, H]``, in the same dtype.
      value: ``[B, S, K, D]``, in the contraction dtype.
      key_log_weights: ``[B, S, K]`` to add to the logits. Minus infinity hides a key, and NaN marks
        a key that was not finite: a query that sees it gets NaN.
      scale: One number that multiplies the products of queries and keys; 1 if they are scaled
        already.
      segments: ``[B, S]``, the number of the segment that each position belongs to, or None.
      real: ``[1 or B, T, 1, 1]``, False at queries beyond ``query_seq_lengths``.
      finite: ``[B, T, K, G]``, False at queries that were not finite.
      batch: Leading shape of the output.
      is_batched: True if the output has a leading shape; without one, ``batch`` is ``(1,)``.
      dtype: Type of the output.
      copies: Number of times that each key head was repeated, once for each of its query heads; 1
        if it was not.
    """

    query: Float[Array, "B T K G H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K D"]
    key_log_weights: Float[Array, "B S K"]
    scale: Float[Array, ""]
    segments: Integer[Array, "B S"] | None
    real: Bool[Array, "#B T 1 1"]
    finite: Bool[Array, "B T K G"]
    batch: Shape = dataclasses.field(metadata={"static": True})
    is_batched: bool = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    copies: int = dataclasses.field(default=1, metadata={"static": True})

    def clean(self, *, scaled: bool, fill_with_tokens: bool) -> Inputs:
        """Returns inputs with finite tokens in place of hidden and nonfinite ones.

        Args:
          scaled: True to multiply queries and keys by the square root of the scale each.
          fill_with_tokens: True to replace a query or key by another one of its head; False to
            replace it by zeros.
        """
        # The sign goes with the queries, because features estimate exp(x . y) for any x and y.
        root = jnp.sqrt(jnp.abs(self.scale))
        of_queries, of_keys = (jnp.sign(self.scale) * root, root) if scaled else (1, 1)
        key = self.key.astype(self.query.dtype)
        finite = self.finite & _is_finite(self.query * of_queries)
        finite_keys = _is_finite(key * of_keys) & _is_finite(self.value)
        # Above this bound an exponent would overflow.
        finite_keys &= self.key_log_weights <= float(jnp.finfo(self.key_log_weights.dtype).max) / 4
        hidden = self.key_log_weights == -jnp.inf
        log_weights = jnp.where(finite_keys | hidden, self.key_log_weights, jnp.nan)
        visible = log_weights > -jnp.inf
        return dataclasses.replace(
            self,
            # Scaled last, because 0 * NaN would reach the gradient of the scale.
            query=_replace(self.query, self.real & finite, fill_with_tokens) * of_queries,
            key=_replace(key, visible, fill_with_tokens) * of_keys,
            value=_replace(self.value, visible, False),
            key_log_weights=log_weights,
            scale=jnp.ones_like(self.scale) if scaled else self.scale,
            finite=finite,
        )

    def without(self, hidden: Bool[Array, "B S K"]) -> Inputs:
        """Returns inputs whose keys are hidden where ``hidden`` is True."""
        log_weights = jnp.where(hidden, -jnp.inf, self.key_log_weights)
        return dataclasses.replace(self, key_log_weights=log_weights)

    def outputs(
        self, out: Float[Array, "B T K G D"], dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch T N D"]:
        """Reshapes ``[B, T, K, G, D]`` into ``[..., T, N, D]``: the inverse of the layout.

        Args:
          out: The output of the mechanism for each query.
          dtype: Type of the result, that of the caller's query by default.
        """
        out = jnp.where(self.finite[..., None], out, jnp.nan)
        out = jnp.where(self.real[..., None], out, 0)
        # Two reshapes, because a single one fails if explicit mesh axes shard the heads.
        out = out.reshape(*out.shape[:2], out.shape[2] * out.shape[3], out.shape[4])
        out = out.reshape(*self.batch, *out.shape[1:])
        out = out.astype(self.dtype if dtype is None else dtype)
        return out if self.is_batched else out[0]


class KeyOptions(TypedDict, total=False):
    """The keywords that concern keys; see ``Call``."""

    mask: Mask | None
    bias: Float[ArrayLike, " ..."] | None
    scale: Real[ArrayLike, ""] | None
    key_value_seq_lengths: Lengths | None


class StepOptions(KeyOptions, total=False):
    """The keywords of a step of decoding; see ``Call``."""

    query_seq_lengths: Lengths | None


class Options(StepOptions, total=False):
    """The keywords of an attention call; see ``Call``."""

    is_causal: bool | np.bool_
    segment_ids: Integer[ArrayLike, "... T"] | None


def check_keywords(name: str, given: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises ``TypeError`` if a method is given a keyword that it does not take."""
    if unknown := sorted(given.keys() - known):
        raise TypeError(
            f"{name} got an unexpected keyword argument {unknown[0]!r}; its keywords are "
            f"{', '.join(sorted(known))}."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    r"""A call of attention: the arguments of ``jax.nn.dot_product_attention``, and segments.

    Attributes:
      query: ``[..., T, N, H]``.
      key: ``[..., S, K, H]``.
      value: ``[..., S, K, D]``.
      mask: Boolean, broadcastable to ``[..., N, T, S]``, the same for all queries; or None.
      bias: Floating, of the same shapes, added to the logits; or None.
      scale: Multiplies the logits; None for :math:`1/\sqrt H`.
      query_seq_lengths: Integers of the batch shape, or None.
      key_value_seq_lengths: Integers of the batch shape, or None.
      segment_ids: Integers ``[..., T]``, or None.
      is_causal: True if query t sees only keys up to t.
    """

    query: Float[Array, "*batch T N H"]
    key: Float[Array, "*batch S K H"]
    value: Float[Array, "*batch S K D"]
    mask: Bool[ArrayLike, " ..."] | None = None
    bias: Float[ArrayLike, " ..."] | None = None
    scale: Real[ArrayLike, ""] | None = None
    # These may be of any type until lay_out checks them.
    query_seq_lengths: Shaped[Array, " ..."] | None = None
    key_value_seq_lengths: Shaped[Array, " ..."] | None = None
    segment_ids: Shaped[Array, " ..."] | None = None
    is_causal: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def of(
        cls,
        query: Float[ArrayLike, "*batch T N H"],
        key: Float[ArrayLike, "*batch S K H"],
        value: Float[ArrayLike, "*batch S K D"],
        *,
        scale: Real[ArrayLike, ""] | None = None,
        is_causal: bool | np.bool_ = False,
        **arrays: Unchecked | None,
    ) -> Call:
        """Returns the call for a caller's arguments, after the checks that need their values.

        Raises:
          TypeError: If the dtype of query, key, value, mask or bias is wrong, scale is not a
            number, is_causal is neither True nor False, or a keyword is unknown.
          ValueError: If their shapes do not match, the scale is not finite, the mask or the
            bias may differ between queries, or integers do not fit those of JAX.
        """
        if arrays.keys() - Options.__optional_keys__:
            check_keywords("Attention", arrays, Options.__optional_keys__)
        is_causal = checks.boolean("is_causal", is_causal)
        query, key, value = checks.tokens(query, key, value)
        if scale is not None:
            checks.scalar("scale", scale)
            # An integer may be too large for an integer type of JAX.
            scale = float(scale) if isinstance(scale, int) else scale
        read: dict[str, Any] = {
            name: one_row(name, x, shape_of_logits(query, key))
            if name in ("mask", "bias")
            else as_array(name, x)
            for name, x in arrays.items()
            if x is not None
        }
        return cls(query, key, value, scale=scale, is_causal=is_causal, **read)

    @property
    def logit_scale(self) -> Real[ArrayLike, ""]:
        """The number that multiplies the logits."""
        return self.key.shape[-1] ** -0.5 if self.scale is None else self.scale

    def in_order(self, bandwidth: int | None = None) -> bool:
        """Returns whether positions matter, so that queries and keys must be aligned.

        Args:
          bandwidth: Distance within which queries see keys exactly, or None.
        """
        return self.is_causal or self.segment_ids is not None or bandwidth is not None

    def lay_out(
        self,
        *,
        dtype: DTypeLike = jnp.float32,
        scaled: bool = True,
        fill_with_tokens: bool = False,
    ) -> Inputs:
        """Checks the arrays and arranges them by key heads.

        Args:
          dtype: Logits are computed in the widest of this type, the query's and float32.
          scaled: True to multiply queries and keys by the square root of the scale each.
          fill_with_tokens: True to replace a query or key that is hidden or not finite by another
            one of its head; False to replace it by zeros.

        Raises:
          TypeError: If a dtype is wrong.
          ValueError: If shapes do not match.
        """
        compute = np.promote_types(np.promote_types(self.query.dtype, jnp.float32), dtype)
        call = self.with_batch_axis()
        query, key, value, batch = call.query, call.key, call.value, call.query.shape[:-3]
        for name, x in (("query", query), ("key", key), ("value", value)):
            spec = jax.typeof(x).sharding.spec
            if any(spec[1 : len(batch)]):  # No type can express how a merged axis would be sharded.
                raise ValueError(
                    "Of several batch axes, explicit mesh axes may shard only the first, got "
                    f"{spec} of {name}."
                )
        groups, log_weights = query.shape[-2] // key.shape[-2], call._key_log_weights(compute)
        are_apart, copies = log_weights.shape[-2] not in (1, key.shape[-2]), 1
        if groups > 1 and (are_apart or _has_devices_between(query, key)):
            # Heads that share keys but not a mask or a device cannot share a state.
            key, value = (_for_each_head(x, query) for x in (key, value))
            groups, copies = 1, groups
        heads = (query.shape[-2] // groups, groups)
        query = query.reshape(*query.shape[:-2], *heads, query.shape[-1])
        query, key, value, log_weights = (
            jax.lax.collapse(x, 0, len(batch)) for x in (query, key, value, log_weights)
        )
        query, key = query.astype(compute), key.astype(compute)
        narrow = jnp.bfloat16 if self.query.dtype == jnp.bfloat16 else compute
        inputs = Inputs(
            query,
            key,
            value.astype(narrow),
            jnp.broadcast_to(log_weights.mT, key.shape[:-1]),
            jnp.asarray(self.logit_scale, compute),
            call.segments(),
            call.real_queries(),
            jnp.ones(query.shape[:-1], bool),
            batch=batch,
            is_batched=self.query.ndim > 3,
            dtype=self.query.dtype,
            copies=copies,
        )
        return inputs.clean(scaled=scaled, fill_with_tokens=fill_with_tokens)

    def with_batch_axis(self) -> Call:
        """Adds a batch axis to a single sequence; its masks and lengths may already have it."""
        if self.query.ndim > 3:
            return self

        def at_least(ndim: int, x: Shaped[Array, " ..."] | None) -> Shaped[Array, " ..."] | None:
            return None if x is None else jnp.array(x, ndmin=ndim)

        return dataclasses.replace(
            self,
            query=self.query[None],
            key=self.key[None],
            value=self.value[None],
            query_seq_lengths=at_least(1, self.query_seq_lengths),
            key_value_seq_lengths=at_least(1, self.key_value_seq_lengths),
            segment_ids=at_least(2, self.segment_ids),
        )

    def real_queries(self) -> Bool[Array, "#B T 1 1"]:
        """Returns ``[1 or B, T, 1, 1]``, False beyond ``query_seq_lengths``."""
        batch, length = self.query.shape[:-3], self.query.shape[-3]
        if self.query_seq_lengths is None:
            return jnp.ones((1, length, 1, 1), bool)
        real = within_lengths("query_seq_lengths", self.query_seq_lengths, batch, length)
        return real.reshape(math.prod(batch), length, 1, 1)

    def segments(self) -> Integer[Array, "B S"] | None:
        """Returns ``[B, S]``, the number of each position's segment; None without segments."""
        if self.segment_ids is None:
            return None
        batch, length = self.query.shape[:-3], self.key.shape[-3]
        numbers = segment_numbers(self.segment_ids, batch, self.query.shape[-3], length)
        return numbers.reshape(math.prod(batch), length)

    def log_weights_per_key(self) -> Float[Array, "B rows S"] | None:
        """Returns ``[B, 1 or N, S]`` to add to the logits; None if none are given."""
        if all(x is None for x in (self.mask, self.bias, self.key_value_seq_lengths)):
            return None
        log_weights = self.with_batch_axis()._key_log_weights(jnp.dtype(jnp.float32))
        return log_weights.reshape(-1, *log_weights.shape[-2:])

    def _key_log_weights(self, dtype: jnp.dtype) -> Float[Array, "*batch #N S"]:
        """Returns ``[*batch, 1 or N, S]`` to add to the logits; hidden keys have minus infinity."""
        batch, key_length = self.query.shape[:-3], self.key.shape[-3]
        log_weights = jnp.zeros((*(1 for _ in batch), 1, key_length), dtype)
        if self.bias is not None:
            bias = per_key(jnp.asarray(self.bias), shape_of_logits(self.query, self.key))
            log_weights = bias.astype(dtype)
        if self.mask is not None:
            visible = per_key(jnp.asarray(self.mask), shape_of_logits(self.query, self.key))
            log_weights = jnp.where(visible, log_weights, -jnp.inf)
        if self.key_value_seq_lengths is not None:
            visible = within_lengths(
                "key_value_seq_lengths", self.key_value_seq_lengths, batch, key_length
            )
            log_weights = jnp.where(visible[..., None, :], log_weights, -jnp.inf)
        return jnp.broadcast_to(log_weights, (*batch, *log_weights.shape[-2:]))

    def explicit_axes(self, *, in_order: bool) -> Axes:
        """Returns the explicit mesh axes that shard the length.

        Args:
          in_order: True if the positions of queries matter, as in all but bidirectional attention.
        """
        first = (self.key, self.value, self.query) if in_order else (self.key, self.value)
        return next(filter(None, map(axes_of_length, first)), ())


def axes_of_length(x: Float[Array, "*batch length heads dim"]) -> Axes:
    """Returns the explicit mesh axes that shard the length of ``[..., length, heads, dim]``."""
    return tuple(jax.tree.leaves(tuple(jax.typeof(x).sharding.spec)[-3:-2]))


def shape_of_logits(
    query: Float[Array, "*batch T N H"], key: Float[Array, "*batch S K H"]
) -> Shape:
    """Returns ``[*batch, N, T, S]``; as in ``jax.nn``, one sequence is a batch of one."""
    return (*(query.shape[:-3] or (1,)), query.shape[-2], query.shape[-3], key.shape[-3])


def repeat_heads(x: Shaped[Array, " ..."], groups: int, axis: int) -> Shaped[Array, " ..."]:
    """Repeats each entry of an axis of key heads, which explicit mesh axes may shard."""
    # jnp.repeat refuses such an axis inside jax.set_mesh (jax 0.10.2).
    shape, axis = x.shape, axis % x.ndim
    x = jnp.expand_dims(x, axis + 1)
    x = jnp.broadcast_to(x, (*shape[: axis + 1], groups, *shape[axis + 1 :]))
    return x.reshape(*shape[:axis], shape[axis] * groups, *shape[axis + 1 :])


def _has_devices_between(
    query: Float[Array, "*batch T N H"], key: Float[Array, "*batch S K H"]
) -> bool:
    """Returns True if explicit mesh axes split the query heads that share a key head."""
    sharding = jax.typeof(query).sharding
    names, num_key_heads = jax.tree.leaves(sharding.spec[-2]), key.shape[-2]
    return num_key_heads > 1 and num_key_heads % math.prod(map(sharding.mesh.shape.get, names)) > 0


def _for_each_head(
    x: Float[Array, "*batch S K dim"], query: Float[Array, "*batch T N H"]
) -> Float[Array, "*batch S N dim"]:
    """Repeats keys or values for each query head, on the devices that hold the head."""
    x = repeat_heads(x, query.shape[-2] // x.shape[-2], axis=-2)
    spec, of_query = jax.typeof(x).sharding.spec, jax.typeof(query).sharding
    if of_query.spec[-2] is None or spec[-2] is not None:
        return x
    spec = PartitionSpec(*spec[:-2], of_query.spec[-2], spec[-1])
    return jax.sharding.reshard(x, NamedSharding(of_query.mesh, spec))


def unequal_features(of_queries: int, of_keys: int) -> ValueError:
    """Returns the error of a user's feature map with other features for queries than for keys."""
    return ValueError(
        "feature_map must give queries and keys equal numbers of features, got "
        f"{of_queries} and {of_keys}."
    )


def contract(
    spec: str, features: Float[Array, " ..."], values: Float[Array, " ..."]
) -> Float[Array, " ..."]:
    """Contracts in the type of ``values`` and accumulates in the type of ``features``.

    Raises:
      ValueError: If both have an axis m, of features, and not the same number of them.
    """
    axes, axes_of_values, _ = re.split(",|->", spec)
    if "m" in axes and "m" in axes_of_values:
        # jnp.einsum would repeat a single feature.
        numbers = features.shape[axes.index("m")], values.shape[axes_of_values.index("m")]
        if numbers[0] != numbers[1]:
            raise unequal_features(*numbers)
    wide, narrow = features.dtype, values.dtype
    if wide == narrow:
        return jnp.einsum(spec, features, values, precision=jax.lax.Precision.HIGHEST)
    features = features.astype(narrow)

    def mixed(a: Float[Array, " ..."], b: Float[Array, " ..."]) -> Float[Array, " ..."]:
        return jnp.einsum(spec, a, b, preferred_element_type=wide)

    def widened(a: Float[Array, " ..."], b: Float[Array, " ..."]) -> Float[Array, " ..."]:
        return jnp.einsum(spec, a.astype(wide), b.astype(wide))

    # Inside jit, XLA's CPU backend (jaxlib 0.10.2) has no bfloat16 x bfloat16 = float32 product.
    return jax.lax.platform_dependent(features, values, cpu=widened, default=mixed)


@jax.custom_jvp
def quotient(
    numerator: Float[Array, "*#shape"], denominator: Float[Array, "*#shape"]
) -> Float[Array, "*#shape"]:
    """Divides, with a derivative that is finite for denominators of any size.

    JAX's derivative squares the denominator, which overflows long before the quotient.
    """
    return numerator / denominator


@quotient.defjvp
def _jvp_of_quotient(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    out, (of_numerator, of_denominator) = quotient(*primals), tangents
    return out, (of_numerator - out * of_denominator) / primals[1]


def _is_finite(x: Float[Array, "*shape dim"]) -> Bool[Array, "*shape"]:
    """Returns ``[...]``, True where ``[..., dim]`` is finite and sums over it cannot overflow."""
    largest = float(jnp.finfo(x.dtype).max) / MOST_TERMS
    # The sum is one kernel on a CPU, where XLA takes a reduction of Booleans apart.
    too_large = jnp.where(jnp.abs(jax.lax.stop_gradient(x)) <= largest, 0, jnp.ones((), x.dtype))
    return jnp.sum(too_large, axis=-1) == 0


def _replace(
    x: Float[Array, "B length *heads dim"],
    where: Bool[Array, "B length *heads"],
    fill_with_tokens: bool,
) -> Float[Array, "B length *heads dim"]:
    """Returns the vectors ``[B, length, ..., dim]`` where ``where`` is True.

    Elsewhere there are zeros, or copies of the first vector that is kept (ones if none is).
    """
    where = jnp.broadcast_to(where, x.shape[:-1])[..., None]
    if not fill_with_tokens:
        return jnp.where(where, x, 0)
    is_first = where & (jnp.cumsum(where, axis=1) == 1)
    first = jnp.sum(jnp.where(is_first, x, 0), axis=1, keepdims=True)
    some = jnp.any(where, axis=1, keepdims=True)
    return jnp.where(where, x, jax.lax.stop_gradient(jnp.where(some, first, 1)))
