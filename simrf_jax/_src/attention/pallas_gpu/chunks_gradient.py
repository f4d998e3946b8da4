r"""The gradient of causal random-feature attention in Mosaic GPU kernels.

A query t gives a key s the weight ``p = sum_r exp2(x_tr + y_sr)``, where x are the exponents of the
query, less the log-sum-exp of its logits, and y those of the key. With the gradient ``u_t`` of its
output and ``c_t = u_t . out_t``, the sums over what a token sees,

- ``sum_s exp2(x_tr + y_sr) (u_t . v_s - c_t)`` and the same over t, are the gradients of x and y,
- ``sum_t p u_t`` is that of the value.

So both go through the chunks as ``chunks.Attention`` does: queries forward, with the means that the
rows have read of the values, and keys backward, with the means of the gradients u and of c.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from simrf_jax._src.attention.pallas_gpu.chunks import CHUNK, LIMIT, Operands, Program, Scan
from simrf_jax._src.attention.pallas_gpu.flash import Read
from simrf_jax._src.attention.pallas_gpu.gradient import LN2, OfOutputs, side_of
from simrf_jax._src.attention.pallas_gpu.kernels import Tile
from simrf_jax._src.attention.pallas_gpu.tiles import (
    TILE,
    add_weighted,
    along,
    products,
    read,
    zeros,
)


class Gradients(NamedTuple):
    """Gradients of an attention.

    Attributes:
      query: In the layout of the queries, as are those of keys and values.
      key: In float32.
      value: In float32.
      terms: Gradients of the terms of the keys, ``[B, K, S]``.
      query_terms: Gradients of terms of the queries, ``[B, N, T]``.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    terms: jax.Array
    query_terms: jax.Array


def gradients(
    operands: Operands, found: Read, of_out: jax.Array, interpret: Any, *, is_reversed: bool
) -> Gradients:
    """Returns the gradients of all but the rows.

    Args:
      operands: The arrays.
      found: Outputs and log-sum-exps of all that the queries read, by ``chunks.attend`` or also of
        other keys.
      of_out: Gradient of the outputs.
      interpret: Parameters of the interpreter, or None to compile.
      is_reversed: True to attend to the keys from that in the query's place on.
    """
    queries, keys, rows = operands
    _, *of_queries, of_out = OfOutputs.of(*found, of_out)
    terms, *segments = keys.numbers
    terms = jnp.where(jnp.isnan(terms), -jnp.inf, terms)
    keys = keys._replace(numbers=(terms, *segments))
    side = side_of(True, queries.vectors, of_out, *of_queries)
    numbers, fills = side.numbers + queries.numbers, side.fills + queries.fills
    queries = side._replace(numbers=numbers, fills=fills)
    scan = Scan(queries, keys, rows, 1, is_reversed, operands.is_packed)
    of_query, of_query_terms = scan.run(OfQueries, interpret)
    rows = rows._replace(vectors=rows.vectors[2:] + rows.vectors[:2])
    scan = Scan(keys, queries, rows, 1, not is_reversed, operands.is_packed)
    of_keys = summed(scan.run(OfKeys, interpret), keys.vectors[0].shape[2])
    return Gradients(of_query, *of_keys, of_query_terms * LN2)


def summed(
    of_keys: tuple[jax.Array, ...], num_key_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns sums over the query heads that share a key head, in float32.

    Args:
      of_keys: Gradients of keys, values and terms, of the terms to base 2.
      num_key_heads: Number of key heads.
    """

    def of(x: jax.Array, axis: int) -> jax.Array:
        shape = (*x.shape[:axis], num_key_heads, -1, *x.shape[axis + 1 :])
        return jnp.sum(x.reshape(shape), axis=axis + 1, dtype=jnp.float32)

    of_key, of_value, of_terms = of_keys
    return of(of_key, 2), of(of_value, 2), of(of_terms, 1) * LN2


class _Gradient(Program):
    """The sums of exponents that queries and keys have in common."""

    def exponents_of_own(self, own: Tile) -> jax.Array:
        """Returns the exponents of the features of the own tokens, ``[TILE, rows]``."""
        logits = products(own.vectors[:1], self.own_rows)
        terms = along(read(own.numbers[0], 0), 0, logits.shape)
        return jnp.where(terms > -jnp.inf, logits + terms, -jnp.inf)

    def of_weights(self, own: Tile, others: Tile, start: int) -> jax.Array:
        """Returns the gradients of the weights of others from ``start`` on, ``[TILE, TILE]``."""
        chunk = others
        others = Tile(*([x.at[pl.ds(start, TILE)] for x in refs] for refs in others))
        found = products(own.vectors[1:], others.vectors[1:2])
        found -= self.offset(own, others, found.shape)
        return jnp.where(self.is_visible(own, chunk, start, TILE), found, 0.0)

    def of_state_weights(self, own: Tile) -> jax.Array:
        """Returns the gradients of the weights of the state, ``[TILE, rows]``."""
        found = products(own.vectors[1:], [self.means])
        return found - self.offset(own, Tile([], [None, self.offsets]), found.shape)

    def offset(self, own: Tile, others: Tile, shape: tuple[int, ...]) -> jax.Array:
        """Returns what the gradients of weights have less than products."""
        if self.num_vectors > 1:  # The others are queries.
            return along(read(others.numbers[1], 1), 1, shape)
        return along(read(own.numbers[1], 0), 0, shape)

    def in_units(self, own: Tile, others: Tile) -> None:
        of_exponents = self.of_state_weights(own)
        of_state = along(read(self.weights, 1), 1, of_exponents.shape)
        of_state = self.if_in_segment(own, of_state, 0.0)
        of_exponents *= of_state
        for start in range(0, CHUNK, TILE):
            of_weights = self.of_weights(own, others, start)
            features = self.features.at[:, pl.ds(start, TILE)].transpose((1, 0))
            of_exponents = add_weighted(of_exponents, of_weights, features, self.interpret)
        exponents = self.exponents_of_own(own)
        exponents += along(read(self.units, 1), 1, exponents.shape)
        # Larger ones are of tokens that see nothing.
        weights = jnp.exp2(jnp.minimum(exponents, LIMIT))
        of_exponents = jnp.where(weights > 0, weights * of_exponents, 0.0)
        of_value = None
        if self.num_vectors > 1:
            of_value = zeros(TILE, self.means.shape[-1])
            of_value = add_weighted(of_value, weights * of_state, self.means, self.interpret)
            weights = weights.astype(jnp.bfloat16)
            for start in range(0, CHUNK, TILE):
                others_of_step = pl.ds(start, TILE)
                features = self.features.at[:, others_of_step]
                pairs = add_weighted(zeros(TILE, TILE), weights, features, self.interpret)
                of_value = self.add_visible(of_value, pairs, own, others, start)
        self.write(own, of_exponents, of_value)

    def by_pairs(self, own: Tile, others: Tile) -> None:
        exponents = self.exponents_of_own(own)
        weights = exponents + along(read(self.exponents, 1), 1, exponents.shape)
        weights = self.if_in_segment(own, jnp.exp2(jnp.minimum(weights, LIMIT)), 0.0)
        of_value = None
        if self.num_vectors > 1:
            of_value = zeros(TILE, self.means.shape[-1])
            of_value = add_weighted(of_value, weights, self.means, self.interpret)
        of_exponents = jnp.where(weights > 0, weights * self.of_state_weights(own), 0.0)
        exponents += along(read(self.row_terms, 1), 1, exponents.shape)
        for start in range(0, CHUNK, TILE):
            of_weights = self.of_weights(own, others, start)

            def add(
                is_other: jax.Array, of_other: jax.Array, sums: Any, found: Any = of_weights
            ) -> Any:
                of_exponents, pairs = sums
                weights = exponents + along(of_other, 1, exponents.shape)
                weights = jnp.exp2(jnp.minimum(weights, 0.0))
                of_weight = jnp.where(is_other, found, 0.0).sum(axis=1)
                of_weight = along(of_weight, 0, weights.shape)
                of_exponents += jnp.where(weights > 0, weights * of_weight, 0.0)
                if pairs is not None:
                    pairs = jnp.where(is_other, along(weights.sum(axis=1), 0, pairs.shape), pairs)
                return of_exponents, pairs

            chunk = pl.ds(start, TILE)
            of_others = self.exponents_of(others.vectors[0].at[chunk], others.numbers[0].at[chunk])
            pairs = None if of_value is None else zeros(TILE, TILE)
            of_exponents, pairs = self.one_by_one(of_others, (of_exponents, pairs), add)
            if pairs is not None:
                of_value = self.add_visible(of_value, pairs, own, others, start)
        self.write(own, of_exponents, of_value)

    def add_visible(
        self, total: Any, pairs: jax.Array, own: Tile, others: Tile, start: int
    ) -> jax.Array:
        """Adds the sums of the others' vectors with the weights of pairs."""
        pairs = jnp.where(self.is_visible(own, others, start, TILE), pairs, 0.0)
        return add_weighted(total, pairs, others.vectors[1].at[pl.ds(start, TILE)], self.interpret)

    def write(self, own: Tile, of_exponents: jax.Array, of_value: jax.Array | None) -> None:
        """Writes the gradients in the place of the tokens."""
        # The first part of W is as exact as the weights.
        of_vectors = zeros(TILE, own.vectors[0].shape[-1])
        of_vectors = add_weighted(of_vectors, of_exponents, self.own_rows[0], self.interpret)
        own.vectors[0][...] = (of_vectors * LN2).astype(jnp.bfloat16)
        if of_value is not None:
            own.vectors[1][...] = of_value.astype(jnp.bfloat16)
        self.found.at[self.group][...] = of_exponents.sum(axis=1)


class OfQueries(_Gradient):
    """The gradients of queries."""

    name = "causal_queries_pass"


class OfKeys(_Gradient):
    """The gradients of keys, of values and of the terms of keys."""

    name = "causal_keys_pass"
    num_vectors = 2
