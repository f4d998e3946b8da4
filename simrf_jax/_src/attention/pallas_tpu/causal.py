"""The Pallas kernel of causal attention: tiles of tokens in order, each after the state before it.

A query reads the state of earlier tiles by features, and the keys of its tile one by one, up to its
own position. The module ``weights`` says how. Keys and values that are not finite are left out of
all sums, and the queries that see them get NaN at the end.

With ``is_reversed`` the tiles, and the tokens of each, come in the reverse order: a query reads the
keys from its own position on. ``read_sums`` returns the sums that queries read of one part of their
keys, which can be added to the sums over other parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from simrf_jax._src.attention.pallas_tpu.blocks import Grid, call, cost, result
from simrf_jax._src.attention.pallas_tpu.heads import (
    Links,
    Refs,
    Shape,
    divide,
    interleave,
    query_products,
    with_offsets,
)
from simrf_jax._src.attention.pallas_tpu.sums import ROWS, Sums, rows_of_sums
from simrf_jax._src.attention.pallas_tpu.tiles import (
    Tile,
    begin,
    load,
    pass_on,
    poison_of,
    sum_keys,
    tile_scratch,
)
from simrf_jax._src.attention.pallas_tpu.weights import (
    Exponents,
    Weights,
    in_common_units,
    in_units_of_halves,
)


def forward(shape: Shape, operands: Refs) -> jax.Array:
    """Returns the outputs ``[B, N, D, T]``.

    Args:
      shape: Sizes of the kernel.
      operands: Arrays, as ``Refs`` describes their blocks, with equal numbers of keys and queries.
    """
    return _call(shape, operands, False)[0]


def read_sums(shape: Shape, operands: Refs) -> Sums:
    """Returns sums that queries read, before the division; see ``forward`` for the arguments."""
    return Sums(*_call(shape, operands, True))


def _call(shape: Shape, operands: Refs, gives_sums: bool) -> Any:
    batch, num_heads, *_ = operands.query.shape
    grid = Grid.in_order(shape, operands, is_reversed=shape.is_reversed)
    sizes = [(shape.value_dim, shape.dtype)] + [(ROWS, jnp.float32)] * gives_sums
    tree = jax.tree.structure(operands)
    return call(
        functools.partial(_kernel, shape, tree, grid.key_tile, gives_sums),
        shape,
        operands,
        grid.operands(),
        [
            result((batch, num_heads, width, shape.num_queries), dtype, operands)
            for width, dtype in sizes
        ],
        [grid.of_queries(width) for width, _ in sizes],
        grid=grid.sizes,
        scratch_shapes=tile_scratch(shape, operands),
        name=name_of(shape, gives_sums=gives_sums),
        **cost(shape, operands),
    )


def name_of(shape: Shape, *, gives_sums: bool) -> str:
    """Returns the name of the forward kernel, the prefix of the other kernels' names."""
    what = "sums" if gives_sums else "attention"
    return f"{'reversed' if shape.is_reversed else 'causal'}_random_feature_{what}"


def _kernel(shape: Shape, tree: Any, tile_of: Any, gives_sums: bool, *refs: Any) -> None:
    operands, refs = jax.tree.unflatten(tree, refs[: tree.num_leaves]), refs[tree.num_leaves :]
    out, refs = refs[: 1 + gives_sums], refs[1 + gives_sums :]
    step = pl.program_id(2)
    tile, _ = Tile.of(shape, operands, list(refs))
    begin(tile, step)
    is_rare = load(shape, operands, tile, tile_of(step))
    write = _write_sums if gives_sums else _write_outputs
    in_either_way(shape, is_rare, functools.partial(_attend, shape, operands, tile, write, out))


class QueryHead(NamedTuple):
    """A query head of a program.

    Attributes:
      of_key: Number of its key head.
      group: Its number among the query heads of the key head.
      groups: Number of these.
      passed: Sums that the previous query head has left to this one; a list of at most one.
    """

    of_key: Any
    group: int
    groups: int
    passed: list[Any]

    @property
    def number(self) -> Any:
        """Number of the query head."""
        return self.of_key * self.groups + self.group

    @property
    def is_last(self) -> bool:
        """True for the last query head of its key head."""
        return self.group == self.groups - 1


def in_either_way(shape: Shape, is_rare: jax.Array, attend: Callable[..., Links]) -> None:
    """Lets all heads attend in common units or, if ``is_rare``, in units of halves.

    The rare path visits the heads in a loop, to keep the program short.

    Args:
      shape: Sizes.
      is_rare: Boolean scalar.
      attend: Function of a ``QueryHead`` and of ``is_rare``, True or False.
    """

    def heads(of_key: Any) -> list[QueryHead]:
        passed: list[Any] = []
        return [QueryHead(of_key, group, shape.groups, passed) for group in range(shape.groups)]

    @pl.when(jnp.logical_not(is_rare))
    def _() -> None:
        every = itertools.chain.from_iterable(map(heads, range(shape.num_heads)))
        interleave((attend(head, is_rare=False) for head in every), shape.heads_at_once)

    @pl.when(is_rare)
    def _() -> None:
        def of_key_head(of_key: jax.Array, nothing: None) -> None:
            for head in heads(of_key):
                interleave([attend(head, is_rare=True)])
            return nothing

        jax.lax.fori_loop(0, shape.num_heads, of_key_head, None)


class Readout(NamedTuple):
    """The sums that a query head reads in a tile, and the weights that it uses.

    Attributes:
      weights: The weights of its queries.
      state: Sums over earlier tiles, ``[m, D + TILE]``, in units of the tile's reference.
      finite: ``[1, tile]``, False at queries that are not finite and were replaced by zeros.
      sums: Numerators and denominators, ``[D + TILE, tile]``.
    """

    weights: Weights
    state: jax.Array
    finite: jax.Array
    sums: jax.Array


def read(
    shape: Shape, refs: Refs, tile: Tile, head: QueryHead, *, is_rare: bool, hides: bool = False
) -> Generator[None, None, Readout]:
    """Reads the earlier tiles, and the keys of the tile up to each query.

    Args:
      shape: Sizes.
      refs: Operands.
      tile: The tile.
      head: The query head.
      is_rare: True if a key of any head needs ``in_units_of_halves``, or is not finite.
      hides: True to replace queries that are not finite by zeros.
    """
    of_key = head.of_key
    finite = finite_queries(refs, head.number)
    products = query_products(shape, refs, of_key, head.number, finite if hides else None)
    yield
    weights = weights_of(shape, refs, tile, of_key, products, is_rare=is_rare)
    yield
    pairs = weights.pairs(shape)
    yield
    state = tile.state[of_key]
    sums = shape.dot(state.astype(shape.dtype), weights.of_state, 0, 0)
    if tile.segments is not None:
        sums = jnp.where(tile.segments.read_state, sums, 0)
    yield
    sums += shape.dot(tile.values[of_key], pairs, 1, 0)
    return Readout(weights, state, finite, sums)


def finite_queries(refs: Refs, number: Any) -> jax.Array:
    """Returns ``[1, tile]``, True at queries whose squares are finite."""
    query = refs.query[0, number].astype(jnp.float32)
    return jnp.sum(jnp.square(query), axis=0, keepdims=True) < jnp.inf


def weights_of(
    shape: Shape, refs: Refs, tile: Tile, of_key: Any, products: jax.Array, *, is_rare: bool
) -> Weights:
    """Returns the weights of a query head of a key head, from the products with its rows."""
    find = in_units_of_halves if is_rare else in_common_units
    of_tile = (tile.logits, tile.values, tile.reference, tile.of_queries)
    keys, values, reference, of_queries = (x[of_key] for x in of_tile)
    queries = shape.exponents(products, with_offsets(refs, of_key, jnp.zeros((1, 1))))
    return find(shape, Exponents(queries, keys, values, reference, of_queries, tile.segments))


def _attend(
    shape: Shape,
    refs: Refs,
    tile: Tile,
    write: Callable[..., None],
    out: Any,
    head: QueryHead,
    *,
    is_rare: bool,
) -> Links:
    """Writes the results of the queries of a head, and adds its keys to the state."""
    hides = write is _write_sums
    found = yield from read(shape, refs, tile, head, is_rare=is_rare, hides=hides)
    more = sum_keys(shape, tile, head.of_key, found.weights) if head.is_last else None
    yield
    poisoned = poison_of(shape, tile, head.of_key, is_rare=is_rare)
    write(shape, found, poisoned, head.number, *out)
    yield
    if more is not None:
        pass_on(shape, tile, head.of_key, found.state, more, is_rare=is_rare)


def _write_outputs(
    shape: Shape, found: Readout, poisoned: jax.Array, number: Any, out: Any
) -> None:
    outputs, _ = divide(shape, found.sums)
    out[0, number] = (outputs + poisoned).astype(out.dtype)


def _write_sums(
    shape: Shape, found: Readout, poisoned: jax.Array, number: Any, numerators: Any, rows: Any
) -> None:
    numerators[0, number] = found.sums[: shape.value_dim].astype(numerators.dtype)
    denominators = found.sums[shape.value_dim : shape.value_dim + 1]
    is_poisoned = (poisoned != 0) | ~found.finite
    rows[0, number] = rows_of_sums(denominators, found.weights.shift, is_poisoned)
