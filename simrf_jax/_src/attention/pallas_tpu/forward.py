"""The Pallas kernel of the forward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.blocks import Grid, call, cost, result
from simrf_jax._src.attention.pallas_tpu.heads import (
    HIDDEN,
    Links,
    Refs,
    Shape,
    divide,
    interleave,
    poison_denominator,
    query_features,
    query_products,
    take_keys,
    with_offsets,
)


def forward(shape: Shape, operands: Refs) -> jax.Array:
    """Returns the outputs ``[B, N, D, T]``.

    Args:
      shape: Sizes of the kernel.
      operands: Arrays, as ``Refs`` describes their blocks.
    """
    batch, num_heads, *_ = operands.query.shape
    grid = Grid.keys_first(shape, operands, is_gradient=False)
    return call(
        functools.partial(_kernel, shape, jax.tree.structure(operands)),
        shape,
        operands,
        grid.operands(),
        result((batch, num_heads, shape.value_dim, shape.num_queries), shape.dtype, operands),
        grid.of_queries(shape.value_dim),
        grid=grid.sizes,
        scratch_shapes=state_scratch(shape) if shape.is_tiled else (),
        name="random_feature_attention",
        **cost(shape, operands),
    )


def _kernel(shape: Shape, tree: Any, *refs: Any) -> None:
    *inputs, out = refs[: tree.num_leaves + 1]
    operands = jax.tree.unflatten(tree, inputs)
    if not shape.is_tiled:
        interleave(attend(shape, operands, out), shape.heads_at_once)
        return
    state, step = State(*refs[tree.num_leaves + 1 :]), pl.program_id(2)
    sum_keys(shape, operands, state, step)

    @pl.when(step >= shape.key_tiles)
    def _() -> None:
        interleave(read(shape, operands, state, out), shape.heads_at_once)


def attend(shape: Shape, refs: Refs, out: Any) -> Iterator[Links]:
    """Returns the steps of the heads where one tile holds all keys, and one all queries."""
    states: dict[int, tuple[jax.Array, jax.Array]] = {}

    def head(number: int) -> Links:
        of_key = number // shape.groups
        keys = take_keys(shape, refs, of_key, 0) if number % shape.groups == 0 else None
        products = query_products(shape, refs, of_key, number)
        yield
        if keys is not None:
            maxima = jnp.max(keys.logits, axis=1, keepdims=True)
            phi = jnp.exp2(keys.logits - maxima).astype(shape.dtype)
            states[of_key] = with_offsets(refs, of_key, maxima), phi
        psi = query_features(shape, products, states[of_key][0])
        yield
        if keys is not None:
            maxima, phi = states[of_key]
            sums = poison_denominator(shape, shape.dot(keys.values, phi, 1, 1))
            states[of_key] = maxima, sums.astype(shape.dtype)
        yield
        outputs, _ = divide(shape, shape.dot(states[of_key][1], psi, 1, 0))
        out[0, number] = outputs.astype(out.dtype)

    return map(head, range(shape.num_heads * shape.groups))


class State(NamedTuple):
    """Sums over keys that are kept from tile to tile.

    Attributes:
      maxima: ``[key heads, m, 1]``, without the offsets.
      running: ``[key heads, m, D + TILE]`` in units of the maxima.
      sums: ``[key heads, D + TILE, m]``, written at the end in the contraction dtype.
    """

    maxima: Any
    running: Any
    sums: Any


def state_scratch(shape: Shape) -> State:
    """Returns the memory of a ``State``."""
    n, m = shape.num_heads, shape.num_features
    return State(
        pltpu.VMEM((n, m, 1), jnp.float32),
        pltpu.VMEM((n, m, shape.columns), jnp.float32),
        pltpu.VMEM((n, shape.columns, m), shape.dtype),
    )


def sum_keys(shape: Shape, refs: Refs, state: State, step: jax.Array) -> None:
    """Adds the keys of a tile to the state, in the first steps of a program."""

    @pl.when(step == 0)
    def _() -> None:
        state.maxima[...] = jnp.full_like(state.maxima, 2 * HIDDEN)
        state.running[...] = jnp.zeros_like(state.running)

    @pl.when(step < shape.key_tiles)
    def _() -> None:
        interleave(_add_keys(shape, refs, state, step * shape.key_tile), shape.heads_at_once)

    @pl.when(step == shape.key_tiles - 1)
    def _() -> None:
        for head in range(shape.num_heads):
            sums = poison_denominator(shape, state.running[head].T)
            state.sums[head] = sums.astype(shape.dtype)


def _add_keys(shape: Shape, refs: Refs, state: State, first: jax.Array) -> Iterator[Links]:
    def head(number: int) -> Links:
        keys = take_keys(shape, refs, number, first)
        yield
        before = state.maxima[number]
        maxima = jnp.maximum(before, jnp.max(keys.logits, axis=1, keepdims=True))
        state.maxima[number] = maxima
        phi = jnp.exp2(keys.logits - maxima).astype(shape.dtype)
        yield
        more = shape.dot(phi, keys.values, 1, 1)
        state.running[number] = state.running[number] * jnp.exp2(before - maxima) + more

    return map(head, range(shape.num_heads))


def read(shape: Shape, refs: Refs, state: State, out: Any) -> Iterator[Links]:
    """Returns the steps of the heads for a tile of queries, once the state is complete."""

    def head(number: int) -> Links:
        of_key = number // shape.groups
        products = query_products(shape, refs, of_key, number)
        yield
        psi = query_features(shape, products, with_offsets(refs, of_key, state.maxima[of_key]))
        yield
        outputs, _ = divide(shape, shape.dot(state.sums[of_key], psi, 1, 0))
        out[0, number] = outputs.astype(out.dtype)

    return map(head, range(shape.num_heads * shape.groups))
