"""The Pallas kernel of the gradient, which recomputes the features."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.blocks import Grid, call, cost, result
from simrf_jax._src.attention.pallas_tpu.forward import State, state_scratch, sum_keys
from simrf_jax._src.attention.pallas_tpu.heads import (
    LN2,
    TILE,
    Keys,
    Links,
    Refs,
    Shape,
    all_true,
    divide,
    interleave,
    of_head,
    poison_denominator,
    query_features,
    query_products,
    take_keys,
    with_offsets,
)


class Gradients(NamedTuple):
    """Gradients of the loss.

    Attributes:
      query: ``[B, N, H, T]``.
      key: ``[B, K, H, S]``.
      value: ``[B, K, D, S]``.
    """

    query: Any
    key: Any
    value: Any


def backward(shape: Shape, operands: Refs, of_outputs: jax.Array) -> Gradients:
    """Returns the gradients of queries, keys and values.

    Args:
      shape: Sizes of the kernel.
      operands: Arrays of the forward pass.
      of_outputs: Gradient of the outputs, ``[B, N, D, T]``.
    """
    grid = Grid.keys_first(shape, operands, is_gradient=True)
    both = (operands, of_outputs)
    tokens = (operands.query, operands.key, operands.value)
    return Gradients(
        *call(
            functools.partial(_kernel, shape, jax.tree.structure(both)),
            shape,
            both,
            (grid.operands(), grid.of_queries(shape.value_dim)),
            tuple(result(x.shape, x.dtype, both) for x in tokens),
            (
                grid.of_queries(shape.dim),
                grid.of_keys(shape.dim, is_gradient=True),
                grid.of_keys(shape.value_dim, is_gradient=True),
            ),
            grid=grid.sizes,
            scratch_shapes=_scratch(shape) if shape.is_tiled else (),
            name="random_feature_attention_gradient",
            **cost(shape, operands, passes=3),
        )
    )


class Sums(NamedTuple):
    """The state and its gradient, ``[heads, D + TILE, m]``, kept from tile to tile."""

    state: State
    gradient: Any


def _scratch(shape: Shape) -> tuple[Any, ...]:
    gradient = pltpu.VMEM((shape.num_heads, shape.columns, shape.num_features), jnp.float32)
    return (*state_scratch(shape), gradient)


def _kernel(shape: Shape, tree: Any, *refs: Any) -> None:
    operands, of_outputs = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    out = Gradients(*refs[tree.num_leaves : tree.num_leaves + 3])
    if not shape.is_tiled:
        interleave(_of_head(shape, operands, of_outputs, out), shape.heads_at_once)
        return
    *state, gradient = refs[tree.num_leaves + 3 :]
    sums, step = Sums(State(*state), gradient), pl.program_id(2)
    sum_keys(shape, operands, sums.state, step)
    of_keys = step - shape.key_tiles - shape.query_tiles

    @pl.when(step == 0)
    def _() -> None:
        gradient[...] = jnp.zeros_like(gradient)

    @pl.when((step >= shape.key_tiles) & (of_keys < 0))
    def _() -> None:
        first = (step - shape.key_tiles) * shape.query_tile
        interleave(
            _of_queries(shape, operands, of_outputs, sums, out, first),
            shape.heads_at_once,
        )

    @pl.when(of_keys >= 0)
    def _() -> None:
        interleave(
            _of_keys(shape, operands, sums, out, of_keys * shape.key_tile),
            shape.heads_at_once,
        )


def _of_head(shape: Shape, refs: Refs, of_outputs: Any, out: Gradients) -> Iterator[Links]:
    """Returns the steps of the heads where one tile holds all keys, and one all queries."""
    kept: dict[int, tuple[Keys, jax.Array]] = {}
    states: dict[int, tuple[jax.Array, jax.Array]] = {}
    gradients: dict[int, jax.Array] = {}

    def head(number: int) -> Links:
        of_key, group = divmod(number, shape.groups)
        keys = take_keys(shape, refs, of_key, 0) if group == 0 else None
        products = query_products(shape, refs, of_key, number)
        yield
        if keys is not None:
            maxima = jnp.max(keys.logits, axis=1, keepdims=True)
            phi = jnp.exp2(keys.logits - maxima).astype(shape.dtype)
            kept[of_key] = keys, phi
            sums = poison_denominator(shape, shape.dot(keys.values, phi, 1, 1))
            states[of_key] = with_offsets(refs, of_key, maxima), sums.astype(shape.dtype)
        maxima, state = states[of_key]
        psi = query_features(shape, products, maxima)
        yield
        sums = shape.dot(state, psi, 1, 0)
        yield
        of_sums, fine = gradient_of_sums(shape, sums, of_outputs[0, number], 0)
        of_psi = shape.dot(state, of_sums, 0, 0)
        more = shape.dot(of_sums, jnp.where(fine, psi, 0), 1, 1)
        gradients[of_key] = more if group == 0 else gradients[of_key] + more
        yield
        of_logits = jnp.where(fine, psi * of_psi, 0)
        of_query = of_queries(shape, refs, of_logits, of_key)
        out.query[0, number] = of_query.astype(out.query.dtype)
        if group < shape.groups - 1:
            return
        yield
        is_fine = all_true(jnp.abs(state.astype(jnp.float32)) < jnp.inf)
        yield from _of_keys_of_head(
            shape, refs, *kept[of_key], gradients[of_key], is_fine, out, of_key
        )

    return map(head, range(shape.num_heads * shape.groups))


def gradient_of_sums(
    shape: Shape, sums: jax.Array, of_outputs: jax.Array, first: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradient of the sums that queries read.

    Args:
      shape: Sizes.
      sums: Numerators and denominators, ``[D + TILE, tile]``.
      of_outputs: Gradient of the outputs, ``[D, tile]``.
      first: Position of the first query.

    Returns:
      ``[D + TILE, tile]`` in the contraction dtype; and ``[1, tile]``, False in the padding after
      the queries, and where a query is not finite or sees a key that is not.
    """
    lanes = jax.lax.broadcasted_iota(jnp.int32, (1, shape.query_tile), 1)
    denominator = sums[shape.value_dim : shape.value_dim + 1]
    fine = (first + lanes < shape.num_queries) & (jnp.abs(denominator) < jnp.inf)
    outputs, inverse = divide(shape, sums)
    of_numerators = of_outputs.astype(jnp.float32) * inverse
    of_denominator = -jnp.sum(of_numerators * outputs, axis=0, keepdims=True)
    is_first = jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) == 0
    below = jnp.where(is_first & fine, of_denominator, 0)
    of_sums = jnp.concatenate([jnp.where(fine, of_numerators, 0), below], axis=0)
    return of_sums.astype(shape.dtype), fine


def _of_keys_of_head(
    shape: Shape,
    refs: Refs,
    keys: Keys,
    phi: jax.Array,
    of_state: jax.Array,
    is_fine: jax.Array,
    out: Gradients,
    head: Any,
) -> Links:
    """Writes the gradients of keys and values.

    Args:
      shape: Sizes.
      refs: Operands.
      keys: Keys of a tile.
      phi: Their features, ``[m, tile]``.
      of_state: Gradient of the state, ``[D + TILE, m]``.
      is_fine: ``[1, 1]``, False if a key of the head is not finite.
      out: Gradients to write.
      head: Number of the key head.
    """
    of_state = of_state.astype(shape.dtype)
    of_phi = shape.dot(of_state, keys.values, 0, 0)
    of_value = shape.dot(of_state[: shape.value_dim], phi, 1, 0)
    out.value[0, head] = jnp.where(is_fine, of_value, 0).astype(out.value.dtype)
    yield
    squared = keys.tokens if keys.stretched is None else keys.stretched
    of_key = of_tokens(shape, refs, squared, phi * of_phi, head)
    out.key[0, head] = jnp.where(is_fine, of_key, 0).astype(out.key.dtype)


def of_queries(shape: Shape, refs: Refs, of_logits: jax.Array, of_key: Any) -> jax.Array:
    """Returns the gradient of queries, ``[H, tile]``.

    Args:
      shape: Sizes.
      refs: Operands.
      of_logits: Gradient of the exponents of their features, ``[m, tile]``.
      of_key: Number of the key head.
    """
    return shape.project_back(of_head(refs.query_rows, of_key), shape.of_products(of_logits))


def of_tokens(
    shape: Shape,
    refs: Refs,
    squared: jax.Array,
    of_logits: jax.Array,
    head: Any,
) -> jax.Array:
    """Returns the gradient of keys, ``[H, tile]``.

    Args:
      shape: Sizes.
      refs: Operands.
      squared: Stretched keys, or keys themselves without a stretch, ``[H, tile]``.
      of_logits: Gradient of the exponents of their features, ``[m, tile]``.
      head: Number of the key head.
    """
    of_scale = jnp.sum(of_logits, axis=0, keepdims=True)
    of_products = shape.of_products(of_logits)
    if shape.is_stretched:
        of_products = jnp.concatenate([-squared * of_scale, of_products], axis=0)
    of_key = shape.project_back(of_head(refs.key_rows, head), of_products)
    if not shape.is_stretched:
        factor = 2 * LN2 * refs.factor[0, 0]
        of_key -= factor * of_scale * squared.astype(jnp.float32)
    return of_key


def _of_queries(
    shape: Shape,
    refs: Refs,
    of_outputs: Any,
    sums: Sums,
    out: Gradients,
    first: jax.Array,
) -> Iterator[Links]:
    """Returns the steps of the heads for a tile of queries, once the state is complete."""

    def head(number: int) -> Links:
        of_key = number // shape.groups
        products = query_products(shape, refs, of_key, number)
        yield
        maxima = with_offsets(refs, of_key, sums.state.maxima[of_key])
        psi = query_features(shape, products, maxima)
        state = sums.state.sums[of_key]
        read = shape.dot(state, psi, 1, 0)
        yield
        of_sums, fine = gradient_of_sums(shape, read, of_outputs[0, number], first)
        of_psi = shape.dot(state, of_sums, 0, 0)
        sums.gradient[of_key] += shape.dot(of_sums, jnp.where(fine, psi, 0), 1, 1)
        yield
        of_logits = jnp.where(fine, psi * of_psi, 0)
        of_query = of_queries(shape, refs, of_logits, of_key)
        out.query[0, number] = of_query.astype(out.query.dtype)

    return map(head, range(shape.num_heads * shape.groups))


def _of_keys(
    shape: Shape,
    refs: Refs,
    sums: Sums,
    out: Gradients,
    first: jax.Array,
) -> Iterator[Links]:
    """Returns the steps of the heads for a tile of keys, once the state's gradient is complete."""

    def head(number: int) -> Links:
        keys = take_keys(shape, refs, number, first)
        yield
        maxima = sums.state.maxima[number]
        phi = jnp.exp2(keys.logits - maxima)
        state = sums.state.sums[number].astype(jnp.float32)
        is_fine = all_true(jnp.abs(state) < jnp.inf)
        yield from _of_keys_of_head(
            shape,
            refs,
            keys,
            phi.astype(shape.dtype),
            sums.gradient[number],
            is_fine,
            out,
            number,
        )

    return map(head, range(shape.num_heads))
