r"""Random-feature attention in fused kernels: two softmax attentions, and their gradients.

Exponential features have the logarithms :math:`w_i \cdot x + b_i`, up to a term that all features
of a vector share. So the rows of W first attend to all keys by softmax, and the queries then attend
by softmax to the rows, whose values are the outputs of the first pass, and whose log-sum-exps are
added to the logits (``RandomFeatureMechanism.virtual_tokens``). All logits are to base 2.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from simrf_jax._src.attention.estimator import Estimator
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_gpu import flash, gradient, in_order
from simrf_jax._src.attention.pallas_gpu.gradient import OfOutputs, side_of
from simrf_jax._src.attention.pallas_gpu.kernels import Side
from simrf_jax._src.attention.pallas_gpu.operands import (
    Operands,
    lay_out,
    row_terms_of,
    split_rows,
)
from simrf_jax._src.attention.pallas_inputs import without_gradient


def attend(estimator: Estimator, call: Call, *, interpret: Any) -> Float[Array, "*batch T N D"]:
    """Lets each query attend to all keys, or to those that it sees.

    Args:
      estimator: W, the feature map and the band.
      call: A call that the kernels can take.
      interpret: Parameters of the interpreter, or None to compile.
    """
    if call.in_order(estimator.exact_bandwidth):
        out = in_order.attend(interpret, estimator, call)
    else:
        out = _attend(interpret, lay_out(estimator, call))
    out = out[:, : call.query.shape[-3]]
    if call.query_seq_lengths is not None:
        out = jnp.where(call.with_batch_axis().real_queries(), out, 0)
    return out.reshape(*call.query.shape[:-1], out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(interpret: Any, operands: Operands) -> jax.Array:
    """Returns ``[B, T, N, D]``."""
    return _passes(interpret, operands)[1].out


def _passes(interpret: Any, operands: Operands) -> tuple[flash.Read, flash.Read]:
    """Returns what the rows read of the keys, and what the queries read of the rows."""
    query, key, value = operands[:3]
    keys = Side(True, (key, value), (operands.key_terms,), (-math.inf,))
    rows = Side(False, split_rows(operands.key_rows))
    of_rows = flash.attend(rows, keys, key.shape[2], interpret)
    lse = of_rows.lse + row_terms_of(operands)
    of_rows = flash.Read(of_rows.out, lse)
    rows = Side(False, (*split_rows(operands.query_rows), of_rows.out), (lse,), (-math.inf,))
    return of_rows, flash.attend(Side(True, (query,)), rows, query.shape[2], interpret)


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
    batch, _, num_heads, _ = operands.query.shape
    num_key_heads, num_rows = operands.key.shape[2], operands.key_rows.shape[1]
    # Rows without keys, and all that is not finite, have no weights.
    lse = jnp.where(jnp.isfinite(of_rows.lse), of_rows.lse, -jnp.inf)
    state = jnp.where((lse > -jnp.inf)[..., None], of_rows.out, 0)
    is_good, *numbers, of_out = OfOutputs.of(*of_queries, of_out)
    query = jnp.where(is_good, operands.query, 0)
    query_side = side_of(True, (query,), of_out, *numbers)
    row_side = side_of(False, split_rows(operands.query_rows), state, lse)
    run = functools.partial(gradient.gradients, interpret=interpret)
    (of_query_vectors,) = run(query_side, row_side, num_heads, others=False, terms=False)
    # Query heads share the rows and the state of their key head.
    of_query_rows, of_state, of_lse = (
        jnp.sum(x.reshape(batch, num_key_heads, -1, *x.shape[2:]), axis=2)
        for x in run(row_side, query_side, num_heads, others=True, terms=True)
    )
    # The first pass.
    own = jnp.where(lse == -jnp.inf, -jnp.inf, row_terms_of(operands) - lse)
    of_state = of_state.astype(jnp.bfloat16)
    # The mean of the gradients of a row's weights, less the gradient of its log-sum-exp.
    means = jnp.sum(of_state.astype(jnp.float32) * state.astype(jnp.float32), axis=-1) - of_lse
    row_side = side_of(False, split_rows(operands.key_rows), of_state, own, means)
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
