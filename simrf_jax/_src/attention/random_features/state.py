"""Running sums over keys that cannot overflow.

Attention is a monoid: the states of two sets of keys merge into the state of both, and what a query
reads from two states adds up to what it reads from their merger. Bidirectional, causal and
step-by-step attention, and attention over many devices, are ways to bracket one product.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer, Shaped

from simrf_jax._src import one_line
from simrf_jax._src.attention.estimator import HeadMaps, QueryFeatures
from simrf_jax._src.attention.inputs.call import Inputs, contract, quotient
from simrf_jax._src.attention.inputs.masks import Size
from simrf_jax._src.features import LogFeatures

Tree = TypeVar("Tree")

SUMMARY_CHUNK = 1024  # Number of keys per chunk when only their state is computed.


class Readout(NamedTuple):
    """The sums that queries read from keys, in units of e^shift.

    Attributes:
      sums: ``[..., D + 1]``, numerator and denominator.
      shift: ``[..., 1]``; minus infinity where nothing was read.
      poisoned: ``[...]``, True where a query, or a key that it sees, is not finite; it gets NaN.
    """

    sums: Float[Array, "*queries D+1"]
    shift: Float[Array, "*queries 1"]
    poisoned: Bool[Array, "*queries"]

    def add(self, other: Readout) -> Readout:
        """Returns what is read from both sets of keys together."""
        shift = jnp.maximum(self.shift, other.shift)
        own = self.sums * exp_in_units(self.shift, shift)
        sums = own + other.sums * exp_in_units(other.shift, shift)
        return Readout(sums, shift, self.poisoned | other.poisoned)

    def outputs(self) -> Float[Array, "*queries D"]:
        """Returns numerator over denominator, ``[..., D]``; zeros where no key is visible."""
        numerator, denominator = self.sums[..., :-1], self.sums[..., -1:]
        nothing = denominator == 0  # Exactly: no key is visible, or no feature is active.
        out = jnp.where(nothing, 0, quotient(numerator, jnp.where(nothing, 1, denominator)))
        # Last, because an earlier NaN would reach the gradients of W: 0 * NaN is not 0.
        return jnp.where(self.poisoned[..., None], jnp.nan, out)


class AttentionState(NamedTuple):
    r"""Running sums over keys, for each feature in units of its largest key.

    .. math:: c_i = \max_s \kappa_{si}, \qquad S_i = \sum_s e^{\kappa_{si} - c_i} (v_s, 1)

    with :math:`\kappa` the log features of the keys; values of signed maps stand as factors before
    the exponentials. Its size does not depend on the number of keys. The sums of a head become NaN
    once it sees a key that is not finite.

    Attributes:
      sums: ``[B, K, num_features, D + 1]``; the last column sums the denominator.
      maxima: ``[B, K, num_features]``, or ``[B, K, 1]`` if the features of the map share an
        exponent; minus infinity where no key was seen.
    """

    sums: Float[Array, "*batch K num_features D+1"]
    maxima: Float[Array, "*batch K #num_features"]

    def __repr__(self) -> str:
        return one_line.representation(self)

    @classmethod
    def empty(cls, keys: Inputs | Keys, features: HeadMaps) -> AttentionState:
        """Returns the state of no keys, for keys like these."""
        phi, _ = features.keys(keys.key[:, :0], keys.key_log_weights[:, :0])
        # Not a contraction, because an empty einsum fails in shard_map without jit (jax
        # 0.10.2).
        shift = jnp.zeros((), phi.exponent.dtype)  # Without a dtype, float64 under x64.
        weights = exp_in_units(phi.exponent, shift, phi.values)[..., None]
        value = with_ones(keys.value[:, :0]).astype(weights.dtype)
        sums = jnp.sum(weights * value[:, :, :, None], axis=1)
        return cls(sums, jnp.squeeze(largest(phi.exponent, axis=1), 1))

    def add_keys(self, keys: LogFeatures, value: Float[Array, "B S K columns"]) -> AttentionState:
        """Returns the state with keys ``[B, S, K, ...]`` of values ``[B, S, K, D + 1]``."""
        maxima = jnp.maximum(self.maxima, jnp.squeeze(largest(keys.exponent, axis=1), 1))
        weights = exp_in_units(keys.exponent, maxima[:, None], keys.values)
        more = contract("bskm,bskd->bkmd", weights, value)
        return AttentionState(self.in_units_of(maxima) + more, maxima)

    def merge(self, other: AttentionState) -> AttentionState:
        """Returns the state of the keys of both."""
        maxima = jnp.maximum(self.maxima, other.maxima)
        return AttentionState(self.in_units_of(maxima) + other.in_units_of(maxima), maxima)

    def in_units_of(
        self, maxima: Float[Array, "B K #num_features"]
    ) -> Float[Array, "B K num_features columns"]:
        """Returns the sums relative to other maxima, at least as large."""
        return self.sums * exp_in_units(self.maxima, maxima)[..., None]

    def where(self, condition: Bool[Array, " B"]) -> AttentionState:
        """Returns the state where ``condition``, ``[B]``, is True, and an empty one elsewhere."""
        condition = condition[:, None, None]
        return AttentionState(
            jnp.where(condition[..., None], self.sums, 0),
            jnp.where(condition, self.maxima, -jnp.inf),
        )

    def poison(self, condition: Bool[Array, "B K"]) -> AttentionState:
        """Returns the state with NaN sums where ``condition``, ``[B, K]``, is True."""
        return self._replace(sums=jnp.where(condition[:, :, None, None], jnp.nan, self.sums))

    def split_poisoned(self) -> tuple[AttentionState, Bool[Array, "B K"]]:
        """Returns a state of finite sums, and a mask, ``[B, K]``, of the poisoned heads."""
        # Check the denominators only: if the state is empty, XLA folds this constant while it
        # compiles, which took seconds for all sums.
        poisoned = jnp.any(jnp.isnan(self.sums[..., -1]), axis=-1)
        return self._replace(sums=jnp.where(poisoned[:, :, None, None], 0, self.sums)), poisoned

    def read(
        self, queries: QueryFeatures, poisoned: Bool[Array, "B K"], dtype: jnp.dtype
    ) -> Readout:
        """Returns the sums that queries read, ``[B, T, K, G, D + 1]``.

        A query's log_scale cancels in the ratio and is left out. A feature that is zero for all
        keys has a maximum of minus infinity, so it does not set the shift of those that matter.

        Args:
          queries: Features of ``[B, T, K, G]`` queries.
          poisoned: ``[B, K]``, True at heads that saw a key that is not finite.
          dtype: Contraction dtype.
        """
        features, shift = weigh(queries.features, self.maxima[:, None, :, None])
        # With this order of axes the product needs no transposed copy of the features.
        sums = contract("btkgm,bkmd->bktgd", features, self.sums.astype(dtype))
        poisoned = queries.poisoned | poisoned[:, None, :, None]
        return Readout(jnp.moveaxis(sums, 2, 1), shift, poisoned)


class Keys(NamedTuple):
    """Keys in chunks, or one chunk of them, which has no first axis.

    Attributes:
      key: ``[chunks, B, S, K, H]``.
      value: ``[chunks, B, S, K, D]``.
      key_log_weights: ``[chunks, B, S, K]``.
    """

    key: Float[Array, "*chunks B S K H"]
    value: Float[Array, "*chunks B S K D"]
    key_log_weights: Float[Array, "*chunks B S K"]

    @classmethod
    def of(cls, inputs: Inputs, size: int | None = None) -> Keys:
        """Returns the keys in chunks; in one, if there is no size or the length is symbolic."""
        key, value, log_weights = inputs.key, inputs.value, inputs.key_log_weights
        length = key.shape[1]
        if size is None or not isinstance(length, int) or length <= size:
            return cls(key[None], value[None], log_weights[None])
        return cls(
            split_length(key, size, None),
            split_length(value, size, 0),
            split_length(log_weights, size, -jnp.inf),
        )


def state_of(inputs: Inputs, features: HeadMaps) -> AttentionState:
    """Returns the state of all keys, with the features of one chunk in memory at a time."""
    state, poisoned = sum_keys(Keys.of(inputs, SUMMARY_CHUNK), features)
    return state.poison(poisoned)


def sum_keys(keys: Keys, features: HeadMaps) -> tuple[AttentionState, Bool[Array, "B K"]]:
    """Returns the state of keys in chunks, with finite sums, and a mask of heads that saw NaN.

    The features of a chunk are discarded after use, and the backward pass recomputes them.
    """

    def add(state: AttentionState | None, chunk: Keys) -> tuple[AttentionState, Bool[Array, "B K"]]:
        phi, nonfinite = features.keys(chunk.key, chunk.key_log_weights)
        maxima = jnp.squeeze(largest(phi.exponent, axis=1), 1)
        maxima = maxima if state is None else jnp.maximum(state.maxima, maxima)
        weights = exp_in_units(phi.exponent, maxima[:, None], phi.values)
        # Heads first, because XLA on a GPU would transpose the exponents in float32 otherwise.
        by_head = (jnp.moveaxis(x, 1, 2) for x in (weights, chunk.value))
        numerators = contract("bksm,bksd->bkmd", *by_head)
        # Rounded to the type of the values, so that both sums have the same weights; not by a
        # conversion and its inverse, which XLA for GPUs leaves out.
        if weights.dtype != chunk.value.dtype:
            bits = jnp.finfo(chunk.value.dtype)
            weights = jax.lax.reduce_precision(weights, bits.nexp, bits.nmant)
        # XLA on a GPU would compute the sum while it concatenates, ten times as slowly.
        total = jax.lax.optimization_barrier(jnp.sum(weights, axis=1))
        sums = jnp.concatenate([numerators, total[..., None]], axis=-1)
        sums = sums if state is None else state.in_units_of(maxima) + sums
        return AttentionState(sums, maxima), jnp.any(nonfinite, axis=1)

    num_chunks, _, size = keys.key.shape[:3]
    first = jax.tree.map(lambda x: x[0], keys)
    if num_chunks == 1 and size != 0:
        return add(None, first)
    empty = AttentionState.empty(first, features)
    state, poisoned = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), empty, keys)
    return state, jnp.any(poisoned, axis=0)


def take_keys(
    x: Shaped[Array, "B S K *rest"], position: Integer[Array, "B g K"]
) -> Shaped[Array, "B g K *rest"]:
    """Returns ``[B, g, K, ...]``, the entries at positions, which are clipped to the length."""
    index = position.reshape(*position.shape, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, index, axis=1, mode="clip")


def with_ones(value: Float[Array, "*batch D"]) -> Float[Array, "*batch D+1"]:
    """Appends a column of ones to values, which sums the denominator along with the numerator."""
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def largest(x: Float[Array, "*shape"], axis: int | tuple[int, ...]) -> Float[Array, " ..."]:
    """Returns a maximum for use as a shift, without a gradient; -inf if there are no entries."""
    return jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf))


def exp_in_units(
    exponent: Float[Array, " ..."],
    shift: Float[Array, " ..."],
    values: Float[Array, " ..."] | None = None,
) -> Float[Array, " ..."]:
    """Returns ``values * e^exponent`` in units of e^shift; in units of 1 where that is zero."""
    phi = jnp.exp(exponent - or_zero(shift))
    return phi if values is None else phi * values


def or_zero(shift: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns a shift, or 0 where it is minus infinity, so that subtracting it makes no NaN."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def weigh(
    queries: LogFeatures, units: Float[Array, " B #T K #G #num_features"]
) -> tuple[Float[Array, "B T K G num_features"], Float[Array, "B T K G 1"]]:
    """Returns the weights of each feature for queries, in units of e^shift, and the shift.

    Args:
      queries: Features of the queries.
      units: Logarithms of the units in which the sums or keys are given, such as the maxima of a
        state.
    """
    logits = queries.exponent + units
    shift = largest(logits, axis=-1)
    return exp_in_units(logits, shift, queries.values), shift


def pad(
    x: Shaped[Array, "B length *rest"], before: int, after: Size, fill: float | None
) -> Shaped[Array, "B padded *rest"]:
    """Adds positions of ``fill`` at both ends, or copies of the outermost positions if None.

    A user's feature map sees padding too. On copies of a real key it is as finite as on the key
    itself, which does not hold for zeros.
    """
    if not before and not after:
        return x
    if fill is not None:
        padding = [(0, 0), (before, after)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding, constant_values=fill)
    # jnp.pad(mode="edge") fails if an Explicit mesh axis shards another axis (jax 0.10.2).
    ends = jnp.repeat(x[:, :1], before, axis=1), jnp.repeat(x[:, -1:], after, axis=1)
    return jnp.concatenate([ends[0], x, ends[1]], axis=1)


def split_length(tree: Tree, size: int, fill: float | None) -> Tree:
    """Splits arrays ``[B, length, ...]`` into the fewest chunks of at most ``size`` positions.

    The chunks, ``[chunks, B, positions, ...]``, have equal sizes. If there are several, ``pad``
    makes these multiples of 8, the rows of a tile on a TPU.
    """

    def split(x: Shaped[Array, "B length *rest"]) -> Shaped[Array, "chunks B size *rest"]:
        length, chunk = x.shape[1], size
        if isinstance(length, int):  # Not symbolic, of jax.export.
            count = -(-length // size)
            chunk = max(length, 1) if count <= 1 else min(size, 8 * -(-length // (8 * count)))
        count = -(-length // chunk)
        x = pad(x, 0, count * chunk - length, fill)
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def join_length(tree: Tree, length: Size) -> Tree:
    """Joins the chunks that ``split_length`` made of arrays ``[B, length, ...]``."""

    def join(x: Shaped[Array, "chunks B size *rest"]) -> Shaped[Array, "B T *rest"]:
        x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])
        if isinstance(length, int):
            return x[:, :length]
        # x[:, :length] has the length only if jax.export knows that it is the shorter one.
        beyond = [(0, 0, 0), (0, length - x.shape[1], 0)] + [(0, 0, 0)] * (x.ndim - 2)
        return jax.lax.pad(x, jnp.zeros((), x.dtype), beyond)

    return jax.tree.map(join, tree)
