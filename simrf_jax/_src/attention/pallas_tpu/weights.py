"""The weights of the keys of a tile for the queries of the same tile, up to their own positions.

A weight is a sum over features of products of exponentials, ``sum_i exp2(x_it + l_is)``, of a query
t and a key s. It is computed as a matrix product of features of queries and of keys, and each
feature is divided by a power of two, its unit, on one side and multiplied by it on the other. The
unit may depend only on keys that all readers see. Otherwise later keys would reach earlier outputs
through rounding or overflow.

Nearly always one unit for each feature suffices for a tile: ``in_common_units`` takes the largest
exponent of all earlier tiles or, without any earlier key, that of the first visible key of the
tile, before which queries see nothing. A later key may be larger by a factor up to ``2**LARGEST``:
floating-point numbers keep their precision, and a query's sum is at least 1 in its own units, so
nothing that counts is lost below the smallest number. Beyond that factor, ``in_units_of_halves``
halves the tile again and again, and the right half of each stretch reads the left half in units of
the left half's maxima. For very large values it begins at a lower factor, so that their sums cannot
overflow.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.heads import HIDDEN, Shape
from simrf_jax._src.attention.pallas_tpu.segments import Segments

# A query's feature below 2**-126 becomes 0. Times a key's feature of at most 2**80 it would have
# added at most 2**-46 to a sum of at least 1.
LARGEST = 80.0
# Key features times values stay below 2**112, so that sums over a tile and all features are finite.
LARGE_VALUE = 2.0**30
LARGEST_BESIDE = 8.0


def limits(values: jax.Array) -> jax.Array:
    """Returns ``[1, tile]``, by how many powers of two keys may exceed the common units.

    Args:
      values: Values of the keys, ``[D + TILE, tile]``.
    """
    largest = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=0, keepdims=True)
    return jnp.where(largest < LARGE_VALUE, LARGEST, min(LARGEST, LARGEST_BESIDE))


class Product(NamedTuple):
    """Features whose products are the weights of some pairs of a key and a query.

    Attributes:
      keys: ``[m, tile]``.
      queries: ``[m, tile]``.
      holds: ``[tile, tile]``, True for the pairs, keys first.
    """

    keys: jax.Array
    queries: jax.Array
    holds: jax.Array

    def times_keys(self, shape: Shape, x: jax.Array) -> jax.Array:
        """Sums the keys with the weights ``x``, ``[tile, tile]``, for each query."""
        return shape.dot(self.keys, self._held(shape, x), 1, 0)

    def times_queries(self, shape: Shape, x: jax.Array) -> jax.Array:
        """Sums the queries with the weights ``x``, ``[tile, tile]``, for each key."""
        return shape.dot(self.queries, self._held(shape, x), 1, 1)

    def _held(self, shape: Shape, x: jax.Array) -> jax.Array:
        return jnp.where(self.holds, x, 0).astype(shape.dtype)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Features of the queries of a tile, and of its keys, in the contraction dtype.

    Attributes:
      of_state: Queries' features to read the state with, ``[m, tile]``.
      shift: Exponents of the units of the sums that queries read, ``[1, tile]``.
      products: Products that together cover each pair of a query and a key it sees exactly once.
    """

    of_state: jax.Array
    shift: jax.Array
    products: list[Product]

    @property
    def of_keys(self) -> jax.Array:
        """Keys' features in units of the reference, ``[m, tile]``."""
        return self.products[0].keys

    def pairs(self, shape: Shape) -> jax.Array:
        """Returns the weights, keys first, ``[tile, tile]``; zeros at keys after the query."""
        total = jnp.zeros((), jnp.float32)
        for product in self.products:
            found = shape.dot(product.keys, product.queries, 0, 0)
            total = jnp.where(product.holds, found, total)
        return total.astype(shape.dtype)

    def of_queries(self, shape: Shape, of_psi: jax.Array, of_pairs: jax.Array) -> jax.Array:
        """Returns the gradient of the exponents of the queries, ``[m, tile]``.

        Args:
          shape: Sizes.
          of_psi: Gradient of ``of_state``, ``[m, tile]``.
          of_pairs: Gradient of ``pairs``, ``[tile, tile]``.
        """
        first, *others = self.products
        total = self.of_state * (of_psi + first.times_keys(shape, of_pairs))
        for product in others:
            total += product.queries * product.times_keys(shape, of_pairs)
        return total

    def of_logits(self, shape: Shape, of_pairs: jax.Array) -> jax.Array:
        """Returns the gradient of the exponents of the keys, ``[m, tile]``, through ``pairs``.

        Args:
          shape: Sizes.
          of_pairs: Gradient of ``pairs``, ``[tile, tile]``.
        """
        first, *others = self.products
        total = first.keys * first.times_queries(shape, of_pairs)
        for product in others:
            total += product.keys * product.times_queries(shape, of_pairs)
        return total


def places(shape: Shape, size: tuple[int, int], axis: int) -> jax.Array:
    """Returns positions in a tile along an axis, in the order in which queries see its keys."""
    place = jax.lax.broadcasted_iota(jnp.int32, size, axis)
    return shape.key_tile - 1 - place if shape.is_reversed else place


def pairs_of(shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Returns the positions of keys and of queries in a tile, ``[tile, tile]`` each."""
    square = (shape.key_tile, shape.key_tile)
    return places(shape, square, 0), places(shape, square, 1)


def _visible(shape: Shape, segments: Segments | None) -> jax.Array:
    """Returns ``[tile, tile]``, True where a query sees a key, keys first."""
    of_keys, of_queries = pairs_of(shape)
    visible = of_keys <= of_queries
    return visible if segments is None else visible & segments.same


def at_or_before(shape: Shape, flags: jax.Array, segments: Segments | None) -> jax.Array:
    """Returns ``[1, tile]``, True at queries that see a key whose flag is 1.

    Args:
      shape: Sizes.
      flags: ``[1, tile]``, 1 or 0.
      segments: The segments, or None.
    """
    seen = jnp.where(_visible(shape, segments), 1.0, 0.0).astype(shape.dtype)
    flags = jnp.broadcast_to(flags, (16, shape.key_tile)).astype(shape.dtype)
    return shape.dot(flags, seen, 1, 0)[:1] > 0


class Exponents(NamedTuple):
    """Exponents and values from which the weights of a tile follow.

    Attributes:
      queries: Exponents of the features of queries with the offsets, ``[m, tile]``.
      keys: Exponents of those of keys, ``[m, tile]``.
      values: Values of the keys, ``[D + TILE, tile]``, which only ``in_units_of_halves`` needs.
      reference: Units of the features of keys, ``[m, tile]``, the same for keys of one segment.
      of_queries: Units of the features of queries, in the same layout.
      segments: The segments, or None.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    reference: jax.Array
    of_queries: jax.Array
    segments: Segments | None


def in_common_units(shape: Shape, exponents: Exponents) -> Weights:
    """Returns the weights where no key exceeds the reference by more than its limit."""
    logits = exponents.queries + exponents.of_queries
    shift = jnp.max(logits, axis=0, keepdims=True)
    psi = _features(shape, logits, shift)
    phi = _features(shape, exponents.keys, exponents.reference)
    return Weights(psi, shift, [Product(phi, psi, _visible(shape, exponents.segments))])


def in_units_of_halves(shape: Shape, exponents: Exponents) -> Weights:
    """Returns the weights whatever the exponents.

    Queries that see no key above its limit get the bits of ``in_common_units``, because whether a
    later key is above its limit must not change them.
    """
    queries, keys, values, reference, units_of_queries, segments = exponents
    length = shape.key_tile
    of_keys, of_queries = pairs_of(shape)
    lanes = places(shape, (1, length), 1)
    relative = keys - reference
    is_large = jnp.max(relative, axis=0, keepdims=True) > limits(values)
    changed = at_or_before(shape, jnp.where(is_large, 1.0, 0.0), segments)
    logits = queries + units_of_queries
    own_key = jnp.max(queries + keys, axis=0, keepdims=True)
    sees_own = changed
    if segments is not None:
        sees_own &= segments.of_queries == segments.of_keys
        own_key = jnp.where(sees_own, own_key, 2 * HIDDEN)
    largest, halves, half = own_key, Halves.of_one(keys, segments), 1
    # For each halving: the halves themselves and, at queries of a right half, the left half.
    units: list[tuple[int, Halves, Halves, jax.Array]] = []
    while half < length:
        is_right = lanes & half != 0
        left = halves.moved(length - half if shape.is_reversed else half)
        reads = is_right if segments is None else is_right & (left.ends == segments.of_queries)
        units.append((half, halves, left, reads & changed))
        found = jnp.max(queries + left.maxima, axis=0, keepdims=True)
        largest = jnp.where(reads, jnp.maximum(largest, found), largest)
        right = halves.moved(half if shape.is_reversed else length - half)
        halves = halves.joined(left, right, is_right)
        half *= 2
    shift = jnp.max(logits, axis=0, keepdims=True)
    shift = jnp.where(changed, jnp.maximum(shift, largest), shift)
    psi = _features(shape, logits, shift)
    phi = _features(shape, jnp.minimum(relative, LARGEST), 0)
    products = [Product(phi, psi, _visible(shape, segments) & ~changed)]
    # The features of other queries might overflow.
    own = jnp.where(sees_own, _features(shape, queries + keys, shift), 0)
    products.append(Product(jnp.ones_like(own), own, (of_keys == of_queries) & changed))
    for half, of_half, left, reads in units:
        differing = of_keys ^ of_queries
        features = _features(shape, keys, of_half.maxima)
        if segments is not None:
            features = jnp.where(of_half.ends == segments.of_keys, features, 0)
        products.append(
            Product(
                features,
                jnp.where(reads, _features(shape, queries + left.maxima, shift), 0),
                (differing >= half) & (differing < 2 * half) & reads,
            )
        )
    return Weights(psi, shift, products)


class Halves(NamedTuple):
    """The largest exponents of each stretch of a tile, repeated along the stretch.

    Attributes:
      maxima: ``[m, tile]``, of the keys of the segment of the last key of a stretch. Others reach
        no query after the stretch.
      ends: ``[1, tile]``, the segment of the last key, or None without segments.
    """

    maxima: jax.Array
    ends: jax.Array | None

    @classmethod
    def of_one(cls, keys: jax.Array, segments: Segments | None) -> Halves:
        """Returns stretches of one key."""
        return cls(keys, None if segments is None else segments.of_keys)

    def moved(self, by: int) -> Halves:
        """Returns the stretches that lie ``by`` lanes earlier, wrapping around."""
        return jax.tree.map(lambda x: pltpu.roll(x, by, 1), self)

    def joined(self, left: Halves, right: Halves, is_right: jax.Array) -> Halves:
        """Returns stretches of twice the length.

        Args:
          left: The left halves, at the positions of the right halves.
          right: The right halves, at the positions of the left halves.
          is_right: ``[1, tile]``, True at positions in right halves.
        """
        other = jnp.where(is_right, left.maxima, right.maxima)
        both = jnp.maximum(self.maxima, other)
        if self.ends is None or left.ends is None or right.ends is None:
            return Halves(both, None)
        ends = jnp.where(is_right, self.ends, right.ends)
        same = jnp.where(is_right, left.ends, self.ends) == ends
        alone = jnp.where(is_right, self.maxima, right.maxima)
        return Halves(jnp.where(same, both, alone), ends)


def _features(shape: Shape, exponents: jax.Array, units: jax.Array | float) -> jax.Array:
    return jnp.exp2(exponents - units).astype(shape.dtype)
