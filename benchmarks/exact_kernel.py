"""Exact attention in a plain fused TPU kernel, to count beside the kernels of random features.

It has the layout and the style of ``simrf_jax``'s kernels: tokens on the lanes, a program for each
sequence, and heads that begin one after the other. All queries meet all keys at once, without a
running maximum, so that it is for lengths whose logits fit in the memory of a core.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from simrf_jax._src.attention.pallas_tpu.heads import interleave, keep

LANES, SUBLANES = 128, 16
LONGEST = 1024  # Tokens.
NAME = "plain_exact_attention"


def _kernel(q, k, v, out, *, length, at_once):
    heads, dim, tile = q.shape[1:]
    visible = jax.lax.broadcasted_iota(jnp.int32, (1, tile), 1) < length
    is_key = jax.lax.broadcasted_iota(jnp.int32, (tile, tile), 0) < length
    is_first = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, 1), 0) == 0
    ones = jnp.where(is_first & visible, 1.0, 0.0).astype(v.dtype)  # One more row: the normalizer.

    def product(a, b, axis_a, axis_b):
        axes = (((axis_a,), (axis_b,)), ((), ()))
        return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)

    def head(n):
        values = jnp.concatenate([keep(v[0, n], visible), ones], axis=0)
        logits = product(k[0, n], q[0, n], 0, 0) * (dim**-0.5 * math.log2(math.e))
        yield
        logits = jnp.where(is_key, logits, -1e30)
        weights = jnp.exp2(logits - jnp.max(logits, axis=0, keepdims=True)).astype(v.dtype)
        yield
        sums = product(values, weights, 1, 0)
        yield
        out[0, n] = (sums[:dim] * pl.reciprocal(sums[dim : dim + 1])).astype(out.dtype)

    interleave(map(head, range(heads)), at_once)


def attend(q, k, v, *, at_once=2, interpret=False):
    """Returns exact attention of ``[B, T, N, D]`` queries, keys and values, forward only."""
    batch, length, heads, dim = q.shape
    tile = -(-length // LANES) * LANES
    spec = pl.BlockSpec((1, heads, dim, tile), lambda b: (b, 0, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, length=length, at_once=at_once),
        grid=(batch,),
        in_specs=[spec] * 3,
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((batch, heads, dim, length), q.dtype),
        name=NAME,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=100 * 2**20
        ),
        interpret=interpret,
    )(*(jnp.transpose(x, (0, 2, 3, 1)) for x in (q, k, v)))
    return jnp.transpose(out, (0, 3, 1, 2))
