"""The arrays of a call in the layout of the kernels for GPUs."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call, repeat_heads
from simrf_jax._src.attention.pallas_gpu.tiles import TILE
from simrf_jax._src.attention.pallas_inputs import (
    LOG2E,
    bfloat16_parts,
    form_of,
    query_factors,
    repeated,
    root_and_sign,
    to_base_2,
)
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.log_space import SIDES

MULTIPLE = 8  # Rows of a swizzled tile: TMA wants whole ones.
NO_SEGMENT = -1.0
LEAST_TERM = -1e29  # A finite term hides no key.
LARGEST = 1e15  # Larger components of a key count as not finite; their squares are close to LEAST.


class Near(NamedTuple):
    """The arrays of exact attention to the keys of a band.

    Attributes:
      query: Queries whose products with keys are logits to base 2, ``[B, T, N, H]`` in float32.
      key_terms: Terms to add to the logits, ``[B, K, S]``; minus infinity hides a key, and NaN
        marks one that is not finite.
      query_factors: Logarithms to base 2 of what multiplies the weights of features, ``[B, N, T]``.
    """

    query: jax.Array
    key_terms: jax.Array
    query_factors: jax.Array


class Operands(NamedTuple):
    """The arrays of a call, K key heads with the same number of query heads each.

    Attributes:
      query: ``[B, T, N, H]``.
      key: ``[B, S, K, H]``.
      value: ``[B, S, K, D]``.
      query_rows: W of queries, times the root of the scale, to base 2, ``[1 or K, m, H]``.
      key_rows: W of keys, in the same layout.
      key_terms: Logarithms to base 2 of what multiplies all features of a key, ``[B, K, S]``; minus
        infinity hides it, and NaN marks one that is not finite.
      row_terms: Logarithms of what multiplies the features of a row, ``[1 or K, m]``.
      near: Arrays of exact attention, or None without a band.
      segments: Numbers of the segments of packed sequences, ``[B, 1, S]`` in float32, or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_rows: jax.Array
    key_rows: jax.Array
    key_terms: jax.Array
    row_terms: jax.Array
    near: Near | None = None
    segments: jax.Array | None = None


def lay_out(estimator: Estimator, call: Call) -> Operands:
    """Returns the operands, whose gradients lead to those of all arrays of the call.

    Tokens are padded to whole rows of a swizzled tile, with keys that are hidden.
    """
    query, key, value = (
        x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
        for x in (call.query, call.key, call.value)
    )
    of_queries, of_keys = (
        form_of(estimator.feature_map, estimator.projection, side).unpaired() for side in SIDES
    )
    log_weights, groups = call.log_weights_per_key(), query.shape[2] // key.shape[2]
    if log_weights is not None:
        if log_weights.shape[-2] not in (1, key.shape[2]):
            # Heads that share keys but not a mask cannot share a state.
            key, value = (repeat_heads(x, groups, axis=2) for x in (key, value))
            of_queries, of_keys = (repeated(form, groups) for form in (of_queries, of_keys))
        log_weights = to_base_2(log_weights, hidden=-jnp.inf, least=LEAST_TERM)
        # 0 * NaN is not 0.
        visible = (jnp.swapaxes(log_weights, 1, 2) != -jnp.inf)[..., None]
        key, value = (jnp.where(visible, x, 0) for x in (key, value))
    root, sign = root_and_sign(call)
    terms = _key_terms(of_keys, key, root, log_weights)
    query, key, value = (_padded(x, 1) for x in (query, key, value))
    near = None
    if estimator.exact_bandwidth is not None:
        weights = 0 if log_weights is None else log_weights
        near = Near(
            query.astype(jnp.float32) * (sign * jnp.square(root) * LOG2E),
            _padded(jnp.where(jnp.isfinite(terms), weights, terms), 2, -jnp.inf),
            _padded(query_factors(estimator, call), 2),
        )
    terms, segments = _padded(terms, 2, -jnp.inf), call.with_batch_axis().segments()
    if segments is not None:
        segments = _padded(segments.astype(jnp.float32)[:, None], 2, NO_SEGMENT)
    offsets = [form.offsets for form in (of_queries, of_keys) if form.offsets is not None]
    num_rows = of_keys.rows.shape[-2]
    return Operands(
        query,
        key,
        value,
        of_queries.rows * (sign * root * LOG2E),
        of_keys.rows * (root * LOG2E),
        terms,
        sum(offsets, jnp.zeros((1, num_rows), jnp.float32)) * LOG2E,
        near,
        segments,
    )


def _padded(x: jax.Array, axis: int, fill: float = 0) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % MULTIPLE)
    return jnp.pad(x, padding, constant_values=fill)


def _key_terms(
    form: ExponentialForm, key: jax.Array, root: jax.Array, log_weights: jax.Array | None
) -> jax.Array:
    """Returns ``[B, K, S]``, the terms of the keys."""
    key = key.astype(jnp.float32)
    # Components that are not finite become zeros, because 0 * NaN would reach a gradient.
    is_finite = jnp.abs(key) <= LARGEST
    stretched = jnp.where(is_finite, key, 0) * root
    if form.stretch is not None:
        num_heads, dim = key.shape[-2:]
        stretch = jnp.broadcast_to(form.stretch, (num_heads, dim, dim))
        stretched = jnp.einsum("bskh,kih->bski", stretched, stretch, precision="highest")
    if form.center is not None:
        stretched -= form.center[None, None]
    # One sum, because each costs as much time as the keys take to be read.
    squares = jnp.where(is_finite, jnp.square(stretched), jnp.nan)
    terms = jnp.maximum(jnp.sum(squares, axis=-1) * (-0.5 * LOG2E), LEAST_TERM)
    terms = jnp.swapaxes(terms, 1, 2)
    return terms if log_weights is None else terms + log_weights


def split_rows(rows: jax.Array, multiple: int = TILE) -> tuple[jax.Array, ...]:
    """Returns two parts of rows, whose products with bfloat16 keep 16 bits of the rows."""
    padding = -rows.shape[1] % multiple
    return bfloat16_parts(jnp.pad(rows, [(0, 0), (0, padding), (0, 0)])[None], 2)


def row_terms_of(operands: Operands, multiple: int = TILE) -> jax.Array:
    """Returns ``[1, 1 or K, m]``, the terms of the rows, minus infinity for rows that are added."""
    padding = -operands.row_terms.shape[-1] % multiple
    return jnp.pad(operands.row_terms, [(0, 0), (0, padding)], constant_values=-jnp.inf)[None]
