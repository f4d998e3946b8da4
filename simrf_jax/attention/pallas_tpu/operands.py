"""The arrays of an attention call in the layout of the kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from simrf_jax.attention.inputs.arguments import Arguments
from simrf_jax.attention.pallas_tpu.backward import Transposed
from simrf_jax.attention.pallas_tpu.heads import HIDDEN, TILE, Refs, Shape
from simrf_jax.features import FeatureMap
from simrf_jax.features.exponential_form import ExponentialForm
from simrf_jax.projections import Projection

LOG2E = math.log2(math.e)
LANES = 128
# Lengths up to this are taken in one tile, and longer ones in several.
LONGEST_TILE = 1024
TILE_OF_MANY = 512
# Query heads of one program: enough to overlap, and few enough for a short program.
MOST_HEADS = 16


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the kernels take, and how the output goes back.

    Attributes:
      shape: Sizes of the kernels.
      refs: Arrays of the forward pass.
      transposed: Further arrays of the gradient.
    """

    shape: Shape
    refs: Refs
    transposed: Transposed


def lay_out(
    arguments: Arguments, projection: Projection | None, feature_map: FeatureMap, *, interpret: bool
) -> Operands:
    """Lays out ``[batch, length, heads, dim]`` tokens, and what multiplies them."""
    log_weights = arguments.log_weights_per_key()
    *_, length, num_heads, dim = arguments.query.shape
    num_keys, num_key_heads = arguments.key.shape[-3:-1]
    forms = [feature_map.exponential_forms(projection, side=side) for side in ("query", "key")]
    key, value, groups = arguments.key, arguments.value, num_heads // num_key_heads
    if log_weights is not None and log_weights.shape[-2] not in (1, num_key_heads):
        # Heads that share their keys but not their mask no longer share a state.
        key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
        forms = [_repeated(form, groups) for form in forms]
        groups = 1
    of_queries, of_keys = forms
    root, sign = _root_and_sign(arguments)
    dtype = arguments.query.dtype
    shape = _shape(
        dtype,
        dim=dim,
        value_dim=value.shape[-1],
        num_queries=length,
        num_keys=num_keys,
        num_features=of_queries.rows.shape[-2],
        num_key_heads=key.shape[-2],
        groups=groups,
        is_stretched=of_keys.stretch is not None,
        interpret=interpret,
    )
    refs = Refs(
        query=_tokens(arguments.query, shape.dim),
        key=_tokens(key, shape.dim),
        value=_tokens(value, shape.value_dim),
        query_rows=_parts(shape, _padded(of_queries.rows * (sign * root * LOG2E), shape.dim)),
        key_rows=_parts(shape, _key_rows(shape, of_keys, root * LOG2E, root * LOG2E**0.5)),
        offsets=_offsets(shape, [form.offsets for form in forms]),
        half_square=jnp.reshape(0.5 * LOG2E * jnp.square(root), (1,)),
        log_weights=None if log_weights is None else _hidden(log_weights)[:, :, None],
    )
    transposed = Transposed(
        _padded(of_queries.rows * (sign * root), shape.dim).mT.astype(dtype),
        _key_rows(shape, of_keys, root, root / LOG2E**0.5).mT.astype(dtype),
    )
    return Operands(shape, refs, transposed)


def _root_and_sign(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    scale = arguments.key.shape[-1] ** -0.5 if arguments.scale is None else arguments.scale
    scale = jnp.asarray(scale, jnp.float32)
    return jnp.sqrt(jnp.abs(scale)), jnp.sign(scale)


def _shape(
    dtype: Any,
    *,
    dim: int,
    value_dim: int,
    num_queries: int,
    num_keys: int,
    num_features: int,
    num_key_heads: int,
    groups: int,
    is_stretched: bool,
    interpret: bool,
) -> Shape:
    fitting = (n for n in range(1, num_key_heads + 1) if num_key_heads % n == 0)
    return Shape(
        num_heads=max(n for n in fitting if n == 1 or n * groups <= MOST_HEADS),
        groups=groups,
        dim=_multiple(dim, TILE),
        value_dim=_multiple(value_dim, TILE),
        num_features=num_features,
        num_queries=num_queries,
        num_keys=num_keys,
        query_tile=_tile(num_queries),
        key_tile=_tile(num_keys),
        passes=2 if dtype == jnp.bfloat16 else 1,
        is_stretched=is_stretched,
        dtype=jnp.dtype(dtype),
        interpret=interpret,
    )


def _tile(length: int) -> int:
    return _multiple(length, LANES) if length <= LONGEST_TILE else TILE_OF_MANY


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _tokens(x: Float[Array, "*batch length heads dim"], dim: int) -> Float[Array, "B heads dim length"]:
    *batch, length, heads, width = x.shape
    x = x.reshape(math.prod(batch), length, heads, width)
    return jnp.transpose(_padded(x, dim), (0, 2, 3, 1))


def _padded(x: Shaped[Array, "*shape width"], width: int) -> Shaped[Array, "*shape {width}"]:
    """Adds zeros at the end of the last axis."""
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _parts(shape: Shape, rows: Float[Array, "*K rows H"]) -> Float[Array, "*K rows parts"]:
    """Returns rows in the type of the tokens, for bfloat16 as two parts side by side.

    A number of bfloat16 times both parts, added in float32, has 16 binary digits of the row.
    """
    if shape.passes == 1:
        return rows.astype(shape.dtype)
    # Not a conversion there and back, which XLA would leave out.
    high = jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
    return jnp.concatenate([high, rows - high], axis=-1).astype(shape.dtype)


def _key_rows(
    shape: Shape, form: ExponentialForm, of_rows: jax.Array, of_stretch: jax.Array
) -> Float[Array, "*K rows H"]:
    """Returns stretch, slope and W on top of each other, each times a factor."""
    rows = _padded(form.rows * of_rows, shape.dim)
    if form.stretch is None:
        return rows
    slope = 0 * form.stretch[..., 0, :] if form.slope is None else form.slope
    above = [
        _padded(_padded(form.stretch * of_stretch, shape.dim).mT, shape.dim).mT,
        _padded(_padded(slope[..., None, :] * of_rows, shape.dim).mT, TILE).mT,
    ]
    heads = max(x.shape[0] for x in (rows, *above))
    return jnp.concatenate([jnp.broadcast_to(x, (heads, *x.shape[1:])) for x in (*above, rows)], -2)


def _offsets(
    shape: Shape, offsets: list[Float[Array, "*K m"] | None]
) -> Float[Array, "blocks m heads"] | None:
    """Returns the offsets of queries and keys together, a column for each head of a program."""
    given = [x for x in offsets if x is not None]
    if not given:
        return None
    total = sum(given) * LOG2E
    heads = total.shape[0]
    columns = shape.num_heads if heads > 1 else 1
    return total.reshape(heads // columns, columns, -1).mT


def _hidden(log_weights: Float[Array, "B #K S"]) -> Float[Array, "B #K S"]:
    """Returns log weights to base 2, and a number for minus infinity."""
    too_large = log_weights > float(jnp.finfo(jnp.float32).max) / 4  # Exponents would overflow.
    log_weights = jnp.where(too_large, jnp.nan, log_weights * LOG2E)
    return jnp.where(log_weights < HIDDEN / 2, HIDDEN, log_weights)


def _repeated(form: ExponentialForm, groups: int) -> ExponentialForm:
    return jax.tree.map(
        lambda x: jnp.repeat(x, groups, axis=0) if x.shape[0] > 1 else x, form
    )
