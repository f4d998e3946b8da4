r"""Random-feature attention in fused kernels: two softmax attentions, and their gradients.

Exponential features have the logarithms :math:`w_i \cdot x + b_i`, up to a term that all features
of a vector share. So the rows of W first attend to all keys by softmax, and the queries then attend
by softmax to the rows, whose values are the outputs of the first pass, and whose log-sum-exps are
added to the logits (``RandomFeatureMechanism.virtual_tokens``). All logits are to base 2.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call, repeat_heads
from simrf_jax._src.attention.pallas_gpu import chunks, chunks_gradient, flash, gradient
from simrf_jax._src.attention.pallas_gpu.gradient import side_of
from simrf_jax._src.attention.pallas_gpu.kernels import Side
from simrf_jax._src.attention.pallas_gpu.tiles import TILE
from simrf_jax._src.attention.pallas_inputs import (
    LOG2E,
    form_of,
    repeated,
    root_and_sign,
    to_base_2,
    without_gradient,
)
from simrf_jax._src.attention.random_features import xla
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.log_space import SIDES

ROWS = 8  # Of a swizzled tile: TMA wants whole ones.
LEAST_TERM = -1e29  # A finite term hides no key.
LARGEST = 1e15  # Larger components of a key count as not finite; their squares are close to LEAST.


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
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    query_rows: jax.Array
    key_rows: jax.Array
    key_terms: jax.Array
    row_terms: jax.Array


def attend(estimator: Estimator, call: Call, *, interpret: Any) -> Float[Array, "*batch T N D"]:
    """Lets each query attend to all keys, or to those up to its own.

    Args:
      estimator: W and the feature map.
      call: A call that the kernels can take.
      interpret: Parameters of the interpreter, or None to compile.
    """
    if call.is_causal:
        out = _attend_causally(interpret, estimator, call)
    else:
        out = _attend(interpret, lay_out(estimator, call))
    out = out[:, : call.query.shape[-3]]
    if call.query_seq_lengths is not None:
        out = jnp.where(call.with_batch_axis().real_queries(), out, 0)
    return out.reshape(*call.query.shape[:-1], out.shape[-1])


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
    padding = -key.shape[1] % ROWS
    terms = jnp.pad(terms, [(0, 0), (0, 0), (0, padding)], constant_values=-jnp.inf)
    query, key, value = (
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROWS), (0, 0), (0, 0)]) for x in (query, key, value)
    )
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
    )


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(interpret: Any, operands: Operands) -> jax.Array:
    """Returns ``[B, T, N, D]``."""
    return _passes(interpret, operands)[1].out


def _passes(interpret: Any, operands: Operands) -> tuple[flash.Read, flash.Read]:
    """Returns what the rows read of the keys, and what the queries read of the rows."""
    query, key, value = operands[:3]
    keys = Side(True, (key, value), (operands.key_terms,), (-math.inf,))
    rows = Side(False, _split(operands.key_rows))
    of_rows = flash.attend(rows, keys, key.shape[2], interpret)
    lse = of_rows.lse + _row_terms(operands)
    of_rows = flash.Read(of_rows.out, lse)
    rows = Side(False, (*_split(operands.query_rows), of_rows.out), (lse,), (-math.inf,))
    return of_rows, flash.attend(Side(True, (query,)), rows, query.shape[2], interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_causally(interpret: Any, estimator: Estimator, call: Call) -> jax.Array:
    """Returns ``[B, T, N, D]``."""
    return chunks.attend(_causal_operands(lay_out(estimator, call)), interpret).out


def _causal_operands(operands: Operands) -> chunks.Operands:
    """Returns the operands of causal attention."""
    is_finite = jnp.all(jnp.isfinite(operands.value), axis=-1)
    marks = jnp.swapaxes(jnp.where(is_finite, jnp.float32(0), jnp.nan), 1, 2)
    terms = jnp.where(operands.key_terms == -jnp.inf, -jnp.inf, operands.key_terms + marks)
    keys = Side(True, (operands.key, operands.value), (terms,), (-math.inf,))
    query_rows, key_rows = (
        _split(x, chunks.ROWS) for x in (operands.query_rows, operands.key_rows)
    )
    row_terms = _row_terms(operands, chunks.ROWS)
    return chunks.Operands(operands.query, keys, query_rows, key_rows, row_terms)


def _forward_causally(interpret: Any, estimator: Any, call: Any) -> tuple[jax.Array, Any]:
    is_learned = any(x.perturbed for x in jax.tree.leaves(estimator))
    estimator, call = jax.tree.map(lambda x: x.value, (estimator, call))

    def attend(estimator: Estimator, call: Call) -> flash.Read:
        return chunks.attend(_causal_operands(lay_out(estimator, call)), interpret)

    found = without_gradient(attend, estimator, call)
    return found.out, (estimator, call, None if is_learned else found)


def _backward_causally(interpret: Any, kept: Any, of_out: jax.Array) -> Any:
    estimator, call, found = kept
    if found is None:  # No kernel has gradients of the rows.
        _, pull_back = jax.vjp(xla.attend, estimator, call)
        shape = call.query.shape[:-1]
        return pull_back(of_out[:, : shape[-2]].reshape(*shape, of_out.shape[-1]))
    operands, pull_back = jax.vjp(lay_out, estimator, call)

    def gradients(operands: Operands, found: flash.Read, of_out: jax.Array) -> Any:
        arrays = _causal_operands(operands)
        return chunks_gradient.gradients(arrays, found, of_out, interpret)

    of_tokens = without_gradient(gradients, operands, found, of_out)
    of_terms = of_tokens.terms[..., : operands.key.shape[1]]
    of_operands = jax.tree.map(jnp.zeros_like, operands)
    of_operands = of_operands._replace(
        query=of_tokens.query,
        key=of_tokens.key.astype(operands.key.dtype),
        value=of_tokens.value.astype(operands.value.dtype),
        key_terms=of_terms,
    )
    return pull_back(of_operands)


_attend_causally.defvjp(_forward_causally, _backward_causally, symbolic_zeros=True)


def _split(rows: jax.Array, multiple: int = TILE) -> tuple[jax.Array, jax.Array]:
    """Returns two parts of rows, whose products with bfloat16 keep 16 bits of the rows."""
    padding = -rows.shape[1] % multiple
    rows = jnp.pad(rows, [(0, 0), (0, padding), (0, 0)])[None]
    high = rows.astype(jnp.bfloat16)
    return high, (rows - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _row_terms(operands: Operands, multiple: int = TILE) -> jax.Array:
    """Returns ``[1, 1 or K, m]``, the terms of the rows, minus infinity for rows that are added."""
    padding = -operands.row_terms.shape[-1] % multiple
    return jnp.pad(operands.row_terms, [(0, 0), (0, padding)], constant_values=-jnp.inf)[None]


def _forward(interpret: Any, operands: Operands) -> tuple[jax.Array, Any]:
    passes = functools.partial(_passes, interpret)
    of_rows, of_queries = without_gradient(passes, operands)
    return of_queries.out, (operands, of_rows, of_queries)


def _backward(interpret: Any, kept: Any, of_out: jax.Array) -> tuple[Operands]:
    return (without_gradient(functools.partial(_gradients, interpret), *kept, of_out),)


_attend.defvjp(_forward, _backward)


def _gradients(
    interpret: Any,
    operands: Operands,
    of_rows: flash.Read,
    of_queries: flash.Read,
    of_out: jax.Array,
) -> Operands:
    """Returns the gradients of the operands, through both passes in the reverse order."""
    batch, length, num_heads, _ = operands.query.shape
    num_key_heads, num_rows = operands.key.shape[2], operands.key_rows.shape[1]
    # Rows without keys, and all that is not finite, have no weights.
    lse = jnp.where(jnp.isfinite(of_rows.lse), of_rows.lse, -jnp.inf)
    state = jnp.where((lse > -jnp.inf)[..., None], of_rows.out, 0)
    of_query = _without_nan(of_queries.lse)
    good = jnp.swapaxes(of_query[..., :length], 1, 2)[..., None] > -jnp.inf
    query = jnp.where(good, operands.query, 0)
    products = jnp.where(good, of_out.astype(jnp.float32) * of_queries.out, 0)
    means = jnp.swapaxes(jnp.sum(products, axis=-1), 1, 2)
    of_out = jnp.where(good, of_out, 0)
    query_side = side_of(True, (query,), of_out, of_query, means)
    row_side = side_of(False, _split(operands.query_rows), state, lse)
    run = functools.partial(gradient.gradients, interpret=interpret)
    (of_query_vectors,) = run(query_side, row_side, num_heads, others=False, terms=False)
    # Query heads share the rows and the state of their key head.
    of_query_rows, of_state, of_lse = (
        jnp.sum(x.reshape(batch, num_key_heads, -1, *x.shape[2:]), axis=2)
        for x in run(row_side, query_side, num_heads, others=True, terms=True)
    )
    # The first pass.
    own = jnp.where(lse == -jnp.inf, -jnp.inf, _row_terms(operands) - lse)
    of_state = of_state.astype(jnp.bfloat16)
    # The mean of the gradients of a row's weights, less the gradient of its log-sum-exp.
    means = jnp.sum(of_state.astype(jnp.float32) * state, axis=-1) - of_lse
    row_side = side_of(False, _split(operands.key_rows), of_state, own, means)
    terms = jnp.where(jnp.isnan(operands.key_terms), -jnp.inf, operands.key_terms)
    key_side = side_of(True, (operands.key,), operands.value, terms)
    of_key, of_value, of_key_terms = run(key_side, row_side, num_key_heads, others=True, terms=True)
    (of_key_rows,) = run(row_side, key_side, num_key_heads, others=False, terms=False)
    # 0 * NaN is not 0, so a key that is not finite reaches the gradients of its head's rows.
    poisoned = jnp.isnan(of_rows.lse).any(axis=-1)[..., None, None]
    of_key_rows = jnp.where(poisoned, 0, of_key_rows)

    def summed(x: jax.Array, like: jax.Array) -> jax.Array:
        x = jnp.sum(x[:, :, :num_rows], axis=0)
        return x if like.shape[0] > 1 else jnp.sum(x, axis=0, keepdims=True)

    return Operands(
        of_query_vectors,
        of_key,
        of_value,
        summed(of_query_rows, operands.query_rows),
        summed(of_key_rows, operands.key_rows),
        of_key_terms[..., : operands.key.shape[1]] * gradient.LN2,
        summed(of_lse, operands.row_terms) * gradient.LN2,
    )


def _without_nan(lse: jax.Array) -> jax.Array:
    """Returns minus the log-sum-exp, minus infinity where it is not finite."""
    return jnp.where(jnp.isfinite(lse), -lse, -jnp.inf)
