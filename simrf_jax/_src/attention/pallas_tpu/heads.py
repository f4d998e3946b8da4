r"""The steps of attention of one head inside a Pallas kernel, and of its gradient.

Tokens lie along the lanes, the minor axis of a TPU's registers, and features or dimensions along
the sublanes. Exponents are logarithms to base 2, because a TPU computes powers of 2.

Each head is a generator that yields between dependent matrix products, the links of its chain. If
heads ran one after the other, each would wait for the latency of every product. ``interleave``
starts each head one link after the head before it, so that the matrix unit works on one while
another waits.

Bidirectional attention does not check for numbers that are not finite, or whose squares are not.
They become NaN where attention must return NaN: a key or a value in the sums of its head, a query
in its own column. Only the gradient must keep them from other tokens. Causal attention hides such
keys and values, and poisons the queries that see them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# In another module from jax 0.11 on.
_reciprocal: Any = getattr(pltpu, "reciprocal", None) or pl.reciprocal
# Exponent of hidden keys: below all others, and finite, because infinities would make NaN.
HIDDEN = -1e30
# Scales of visible keys are at least this, even for keys so long that their squares overflow.
LEAST = 0.25 * HIDDEN
# Values from here on count as not finite, because their sums might not be.
LARGEST_VALUE = float(jnp.finfo(jnp.float32).max) / 2**24
LN2 = math.log(2)
# Rows of a tile of bfloat16; blocks of rows must begin at a multiple of this.
TILE = 16
# Up to this tile length, links are so short that three heads begin together, or two with paired
# rows, which are in registers twice. With several tiles, two heads begin together up to
# ``LONG_TILE``.
SHORT_TILE = 256
LONG_TILE = 512

Links = Generator[None, None, None]


def interleave(heads: Iterable[Links], at_once: int = 1) -> None:
    """Runs the links of all heads, each head one link behind the heads that began before it.

    Args:
      heads: Generators, one for each head.
      at_once: Number of heads that begin together: more where links are too short to overlap.
    """
    active: collections.deque[Links] = collections.deque()
    for group in _in_groups(heads, at_once):
        _advance(active)
        active.extend(group)
        for head in group:
            next(head)
    while active:
        _advance(active)


def _in_groups(heads: Iterable[Links], size: int) -> Iterator[list[Links]]:
    iterator = iter(heads)
    while group := list(itertools.islice(iterator, size)):
        yield group


def _advance(active: collections.deque[Links]) -> None:
    for head in list(active):
        if next(head, head) is head:  # It has no more links.
            active.remove(head)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a kernel, which must be known before it is compiled.

    Attributes:
      num_heads: Key heads of a program.
      groups: Query heads of each key head.
      dim: Width H of queries and keys, a multiple of ``TILE``.
      value_dim: Width D of values, a multiple of ``TILE``.
      num_features: Number m of features.
      is_paired: True if half of the features are those of the negatives of the rows.
      num_queries: Length T.
      num_keys: Length S.
      query_tile: Number of queries per tile, a multiple of 128.
      key_tile: Number of keys per tile, a multiple of 128.
      passes: Number of parts that W is split into, so that bfloat16 products keep the digits of W.
      is_stretched: True if the keys have a stretch, whose rows are stacked above those of W.
      dtype: Contraction dtype, that of queries, keys and values.
      interpret: True to run without a TPU.
      is_reversed: True if queries see the keys from their own position on, in causal kernels.
      is_moved: True if keys were moved to other positions there.
    """

    num_heads: int
    groups: int
    dim: int
    value_dim: int
    num_features: int
    is_paired: bool
    num_queries: int
    num_keys: int
    query_tile: int
    key_tile: int
    passes: int
    is_stretched: bool
    dtype: Any
    interpret: bool
    is_reversed: bool = False
    is_moved: bool = False

    @property
    def is_tiled(self) -> bool:
        """True unless one tile holds all keys, and one all queries."""
        return self.key_tiles > 1 or self.query_tiles > 1

    @property
    def heads_at_once(self) -> int:
        """Number of heads that begin together."""
        if self.key_tile <= SHORT_TILE:
            return 2 if self.is_paired else 3
        return 2 if self.is_tiled and self.key_tile <= LONG_TILE else 1

    @property
    def query_tiles(self) -> int:
        """Number of tiles of the queries."""
        return pl.cdiv(self.num_queries, self.query_tile)

    @property
    def key_tiles(self) -> int:
        """Number of tiles of the keys."""
        return pl.cdiv(self.num_keys, self.key_tile)

    @property
    def rows(self) -> slice:
        """Rows of W among those that keys are multiplied by."""
        return slice(self.dim if self.is_stretched else 0, None)

    @property
    def columns(self) -> int:
        """Rows of values with the one that sums the denominator, padded to a tile."""
        return self.value_dim + TILE

    def dot(self, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
        """Contracts an axis of each of two matrices, in ``dtype`` with sums in float32."""
        if self.interpret:  # XLA's CPU backend has no bfloat16 x bfloat16 = float32.
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        is_exact = self.dtype == jnp.float32 or self.interpret
        return jax.lax.dot_general(
            a,
            b,
            (((axis_a,), (axis_b,)), ((), ())),
            # Not None, which JAX would replace by jax_default_matmul_precision.
            precision=jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    def project(self, rows: jax.Array, x: jax.Array) -> jax.Array:
        """Multiplies rows, whose parts are side by side, by tokens ``[H, length]``."""
        return self.dot(rows, jnp.concatenate([x] * self.passes, axis=0), 1, 0)

    def project_back(self, rows: jax.Array, of_products: jax.Array) -> jax.Array:
        """Returns the gradient of tokens, given that of products of base 2, ``[rows, length]``."""
        return LN2 * self.dot(rows[:, : self.dim], of_products.astype(self.dtype), 0, 0)

    def exponents(self, products: jax.Array, plus: jax.Array) -> jax.Array:
        """Returns the exponents of all features, ``[m, length]``.

        Args:
          products: Products with the rows, ``[rows, length]``.
          plus: Exponents to add to those of the products, ``[1 or m, 1 or length]``.
        """
        if not self.is_paired:
            return products + plus
        half = products.shape[0]
        above, below = (plus, plus) if plus.shape[0] == 1 else (plus[:half], plus[half:])
        return jnp.concatenate([above + products, below - products], axis=0)

    def of_products(self, of_exponents: jax.Array) -> jax.Array:
        """Returns the gradient of the products with the rows, given that of ``exponents``."""
        if not self.is_paired:
            return of_exponents
        half = self.num_features // 2
        return of_exponents[:half] - of_exponents[half:]


class Refs(NamedTuple):
    """The blocks that a kernel reads; their leading axes are of size 1.

    Attributes:
      query: ``[1, heads, H, tile]``.
      key: ``[1, key heads, H, tile]``.
      value: ``[1, key heads, D, tile]``.
      query_rows: W of queries in units of the exponents, ``[1 or key heads, rows, passes * H]``,
        its parts side by side.
      key_rows: Rows for keys, in the same layout: if the map has a stretch, its H rows; then W.
      offsets: Exponents of the features, ``[1 or key heads, m, 1]``, twice as many as rows if these
        are paired; or None.
      center: Mean that is subtracted from stretched keys, ``[1 or key heads, H, 1]``, or None.
      factor: Factor of the squared norms of keys without a stretch, ``[1, 1]``; twice, ``[1, 2]``,
        if rows are paired.
      log_weights: ``[1, 1 or key heads, 1, tile]``, or None.
      segments: ``[1, 1, SEGMENT_ROWS, tile]``, the rows of ``segments.Segments``, or None.
    """

    query: Any
    key: Any
    value: Any
    query_rows: Any
    key_rows: Any
    offsets: Any
    center: Any
    factor: Any
    log_weights: Any
    segments: Any = None


def of_head(ref: Any, head: Any) -> jax.Array:
    """Returns the part of a head; if there is one part, it is for all heads."""
    return ref[head if ref.shape[0] > 1 else 0]


class Keys(NamedTuple):
    """Keys and values of a tile.

    Attributes:
      logits: ``[m, tile]``, the exponents of the features.
      tokens: ``[H, tile]``, zeros where there is no visible key.
      stretched: ``[H, tile]``, or None.
      values: ``[D + TILE, tile]``; row D has ones at visible keys, NaN at keys whose exponents are
        NaN; the rows after it are zeros.
      visible: ``[1, tile]``, True at visible keys.
      nonfinite: ``[1, tile]``, 1 at visible keys that are not finite and were hidden, 0 elsewhere.
    """

    logits: jax.Array
    tokens: jax.Array
    stretched: jax.Array | None
    values: jax.Array
    visible: jax.Array
    nonfinite: jax.Array


def take_keys(
    shape: Shape, refs: Refs, head: int, first: jax.Array | int, *, is_causal: bool = False
) -> Keys:
    """Returns the keys of a head in a tile that begins at the position ``first``.

    Args:
      shape: Sizes.
      refs: Operands.
      head: Number of the key head.
      first: Position of the first key.
      is_causal: True to hide keys and values that are not finite.
    """
    key, value = refs.key[0, head], refs.value[0, head]
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, shape.key_tile), 1)
    visible = first + lanes < shape.num_keys
    log_weights = None
    if refs.log_weights is not None:
        log_weights = of_head(refs.log_weights[0], head)
        visible &= ~(log_weights <= HIDDEN / 2)  # NaN is visible.
    nonfinite = jnp.zeros(())
    if is_causal:
        finite = are_finite(key, value, log_weights)
        nonfinite = jnp.where(visible & ~finite, 1.0, 0.0)
        visible &= finite
    if is_causal or refs.log_weights is not None or shape.num_keys % shape.key_tile:
        key, value = keep(key, visible), keep(value, visible)
    products = shape.project(of_head(refs.key_rows, head), key)
    stretched = None
    if shape.is_stretched:
        stretched = products[: shape.dim] - of_head(refs.center, head)
        scale = -0.5 * jnp.sum(jnp.square(stretched), axis=0, keepdims=True)
    else:
        wide = key.astype(jnp.float32)
        scale = -refs.factor[0, 0] * jnp.sum(jnp.square(wide), axis=0, keepdims=True)
    scale = jnp.where(scale < LEAST, LEAST, scale)  # Keeps NaN.
    if log_weights is not None:
        scale += log_weights
    # A key may be infinite although none of its features is.
    ones = jnp.where(visible, 1 + 0 * scale, 0)
    scale = jnp.where(visible, scale, HIDDEN)
    is_first = jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) == 0
    ones = jnp.where(is_first, ones, 0).astype(shape.dtype)
    values = jnp.concatenate([value, ones], axis=0)
    logits = shape.exponents(products[shape.rows], scale)
    return Keys(logits, key, stretched, values, visible, nonfinite)


def are_finite(key: jax.Array, value: jax.Array, log_weights: jax.Array | None) -> jax.Array:
    """Returns ``[1, tile]``, True where a key, its square, its value and its weight are finite."""
    sums = jnp.sum(jnp.square(key.astype(jnp.float32)), axis=0, keepdims=True)
    sums = sums if log_weights is None else sums + log_weights
    values = jnp.abs(value.astype(jnp.float32))
    return (sums < jnp.inf) & all_true(values < LARGEST_VALUE, axis=0)


def all_true(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Returns whether all entries, along an axis or in total, are True; keeps the axes.

    With jax_enable_x64, Mosaic turns jnp.all into float64 numbers, which it refuses (jax 0.10.2).
    """
    zero, one = jnp.float32(0), jnp.float32(1)
    return jnp.min(jnp.where(x, one, zero), axis=axis, keepdims=True) > 0


def keep(x: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns ``[rows, lanes]`` with zeros where ``visible``, ``[1, lanes]``, is False."""
    if x.dtype != jnp.bfloat16:
        return jnp.where(visible, x, 0)
    # A 32-bit word holds two numbers, so one operation clears both.
    words = pltpu.bitcast(x, jnp.int32)
    return pltpu.bitcast(words & jnp.where(visible, -1, 0), jnp.bfloat16)


def poison_denominator(shape: Shape, state: jax.Array) -> jax.Array:
    """Sets the denominator of a feature to NaN if one of its numerators is not finite.

    Args:
      shape: Sizes.
      state: Sums over keys, ``[D + TILE, m]``.
    """
    numerators = state[: shape.value_dim]
    poisoned = 0 * jnp.sum(numerators, axis=0, keepdims=True)
    return jnp.concatenate([numerators, state[shape.value_dim :] + poisoned], axis=0)


def divide(shape: Shape, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs ``[D, tile]`` of sums ``[D + TILE, tile]``, and one over the denominators.

    Both are zeros where no key is visible.
    """
    denominator = sums[shape.value_dim : shape.value_dim + 1]
    nothing = denominator == 0
    inverse = jnp.where(nothing, 0, _reciprocal(jnp.where(nothing, 1, denominator)))
    return sums[: shape.value_dim] * inverse, inverse


def with_offsets(refs: Refs, head: Any, maxima: jax.Array) -> jax.Array:
    """Adds the offsets of a head to maxima, ``[m, 1]``, or to zero, ``[1, 1]``."""
    if refs.offsets is None:
        return maxima
    return maxima + of_head(refs.offsets, head)


def query_products(
    shape: Shape, refs: Refs, of_key: Any, head: Any, visible: jax.Array | None = None
) -> jax.Array:
    """Returns the products of queries with their rows, ``[rows, tile]``.

    Args:
      shape: Sizes.
      refs: Operands.
      of_key: Number of the key head.
      head: Number of the query head.
      visible: ``[1, tile]``, False at queries that are replaced by zeros; None for all.
    """
    rows, query = of_head(refs.query_rows, of_key), refs.query[0, head]
    return shape.project(rows, query if visible is None else keep(query, visible))


def query_features(shape: Shape, products: jax.Array, maxima: jax.Array) -> jax.Array:
    """Returns features ``[m, tile]`` of queries, for a state in units of the maxima."""
    logits = shape.exponents(products, maxima)
    return jnp.exp2(logits - jnp.max(logits, axis=0, keepdims=True)).astype(shape.dtype)
