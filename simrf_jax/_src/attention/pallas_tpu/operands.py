"""The arrays of an attention call in the layout of the kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.pallas_inputs import (
    LOG2E,
    bfloat16_parts,
    form_of,
    repeated,
    root_and_sign,
    to_base_2,
)
from simrf_jax._src.attention.pallas_tpu.choice import LANES, NearProgram, Program, memory
from simrf_jax._src.attention.pallas_tpu.heads import HIDDEN, TILE, Refs, Shape
from simrf_jax._src.attention.pallas_tpu.near import Band, NearRefs
from simrf_jax._src.attention.pallas_tpu.segments import SEGMENT_ROWS
from simrf_jax._src.features import FeatureMap
from simrf_jax._src.features.exponential_form import ExponentialForm
from simrf_jax._src.features.log_space import SIDES, Side
from simrf_jax._src.projections import ProjectionLike

# Most tokens of a sequence that is one tile, and of each tile of a longer one, for heads of at most
# 64 dimensions; tiles of wider heads hold as many numbers. The second is smaller, because each of
# several tiles also reads and writes the running sums. Both shrink where a program of one head
# would not fit into the memory of a core.
LONGEST_WHOLE, LONGEST_TILE = 4096, 2048
# Paired rows must fill whole registers, so that appending their negatives moves no data.
SUBLANES = 8
# Query heads of one program: enough to overlap, few enough to keep the program short.
MOST_HEADS = 16


def lay_out(
    call: Call,
    projection: ProjectionLike | None,
    feature_map: FeatureMap,
    *,
    start: int | None = None,
    is_reversed: bool = False,
) -> Refs:
    """Returns the operands of the kernels, with whole arrays in place of blocks.

    Args:
      call: The call.
      projection: W.
      feature_map: The feature map.
      start: Position, maybe negative, of the key that is paired with the first query, for causal
        kernels, which take equal numbers of keys and queries; None for all keys.
      is_reversed: True for kernels in the reverse order.
    """
    log_weights = call.log_weights_per_key()
    num_heads, dim = call.query.shape[-2:]
    key, value, num_key_heads = call.key, call.value, call.key.shape[-2]
    if start is not None:
        key, value, log_weights = _one_for_each_query(call, log_weights, start)
    forms = [_form(feature_map, projection, side) for side in SIDES]
    if log_weights is not None and log_weights.shape[-2] not in (1, num_key_heads):
        # Heads that share keys but not a mask cannot share a state.
        groups = num_heads // num_key_heads
        key, value = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
        forms = [repeated(form, groups) for form in forms]
    of_queries, of_keys = forms
    root, sign = root_and_sign(call)
    dim, dtype = _multiple(dim, TILE), call.query.dtype
    return Refs(
        query=_tokens(call.query),
        key=_tokens(key),
        value=_tokens(value),
        query_rows=_in_parts(_padded(of_queries.rows, dim) * (root * sign * LOG2E), dtype),
        key_rows=_in_parts(_key_rows(of_keys) * (root * LOG2E), dtype),
        offsets=_offsets(forms),
        center=_center(of_keys),
        factor=jnp.full((1, 2 if of_queries.is_paired else 1), 0.5 * LOG2E * jnp.square(root)),
        log_weights=None if log_weights is None else _hidden(log_weights)[:, :, None],
        segments=None if start is None else _segment_rows(call, start, is_reversed),
    )


def _segment_rows(
    call: Call, start: int, is_reversed: bool
) -> Float[Array, "B 1 rows padded"] | None:
    """Returns the rows of ``segments.Segments``; padding belongs to the outermost segments."""
    segments = call.with_batch_axis().segments()
    if segments is None:
        return None
    padded = _multiple(call.query.shape[-3], LANES)
    positions = np.arange(padded)[:, None] + np.array([0, start])
    rows = segments[:, np.clip(positions, 0, segments.shape[1] - 1)].astype(jnp.float32)
    # The last key of each tile, in the order of the kernel.
    last = rows[:, (0 if is_reversed else LANES - 1) :: LANES, 1]
    none = jnp.full_like(last[:, :1], -1)
    after = [last[:, 1:], none] if is_reversed else [none, last[:, :-1]]
    of_tiles = jnp.stack([jnp.concatenate(after, axis=1), last], axis=-1)
    rows = jnp.concatenate([rows, jnp.repeat(of_tiles, LANES, axis=1)], axis=-1)
    return jnp.moveaxis(_padded(rows, SEGMENT_ROWS), 1, 2)[:, None]


def lay_out_near(call: Call, bandwidth: int) -> NearRefs:
    """Returns the operands of the kernels of a band."""
    log_weights = call.log_weights_per_key()
    key, value, groups = call.key, call.value, 1
    if log_weights is not None and log_weights.shape[-2] not in (1, key.shape[-2]):
        groups = call.query.shape[-2] // key.shape[-2]
    # The keys that are in the band of a query.
    near = functools.partial(
        jax.lax.slice_in_dim,
        start_index=0,
        limit_index=min(key.shape[-3], call.query.shape[-3] + bandwidth),
    )
    key, value = (near(x, axis=x.ndim - 3) for x in (key, value))
    key, value = (jnp.repeat(x, groups, axis=-2) if groups > 1 else x for x in (key, value))
    root, sign = root_and_sign(call)
    segments = call.with_batch_axis().segments()
    if segments is not None:
        segments = segments.astype(jnp.float32)[:, None, None]
    return NearRefs(
        query=_tokens(call.query),
        key=_tokens(key),
        value=_tokens(value),
        log_weights=None if log_weights is None else near(_hidden(log_weights), axis=2)[:, :, None],
        query_segments=segments,
        key_segments=segments,
        factor=(sign * jnp.square(root) * LOG2E)[None, None],
    )


def _one_for_each_query(
    call: Call, log_weights: Float[Array, "B rows S"] | None, start: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the keys, values and log weights from ``start`` on, one for each query.

    Keys that are added beyond the ends are hidden.
    """
    length, num_keys = call.query.shape[-3], call.key.shape[-3]
    start = min(max(start, -length), num_keys)  # Farther out there is only padding.
    before, after = -start, start + length - num_keys  # Negative numbers cut keys off.
    is_whole = before == 0 and after == 0

    def fit(x: jax.Array, axis: int, fill: float) -> jax.Array:
        padding = [(0, 0, 0)] * x.ndim
        padding[axis] = (before, after, 0)
        # One operation, so that XLA sums its gradients with others in one pass.
        return x if is_whole else jax.lax.pad(x, jnp.asarray(fill, x.dtype), padding)

    if (before > 0 or after > 0) and log_weights is None:
        batch = math.prod(call.key.shape[:-3])
        log_weights = jnp.zeros((batch, 1, num_keys), jnp.float32)
    key, value = (fit(x, x.ndim - 3, 0) for x in (call.key, call.value))
    return key, value, None if log_weights is None else fit(log_weights, 2, -jnp.inf)


def _form(
    feature_map: FeatureMap, projection: ProjectionLike | None, side: Side
) -> ExponentialForm:
    form = form_of(feature_map, projection, side)
    return form if form.rows.shape[-2] % SUBLANES == 0 else form.unpaired()


def band_of(refs: NearRefs, *, interpret: bool, bandwidth: int, is_causal: bool) -> Band:
    """Returns the sizes of the kernels of a band."""
    _, num_heads, dim, num_queries = refs.query.shape
    _, num_key_heads, value_dim, num_keys = refs.value.shape
    groups, itemsize = num_heads // num_key_heads, refs.query.dtype.itemsize
    program = NearProgram(1, groups, max(dim, value_dim), itemsize, bandwidth)
    heads = max(
        n
        for n in range(1, num_key_heads + 1)
        if num_key_heads % n == 0
        and (
            n == 1
            or (n * groups <= MOST_HEADS and program._replace(num_heads=n).bytes_taken <= memory())
        )
    )
    shape = Shape(
        num_heads=heads,
        groups=groups,
        dim=dim,
        value_dim=value_dim,
        num_features=0,
        is_paired=False,
        num_queries=num_queries,
        num_keys=num_keys,
        query_tile=LANES,
        key_tile=LANES,
        passes=1,
        is_stretched=False,
        dtype=refs.query.dtype,
        interpret=interpret,
    )
    return Band(shape, bandwidth, is_causal)


def shape_of(
    refs: Refs,
    *,
    interpret: bool,
    is_causal: bool = False,
    is_reversed: bool = False,
    is_moved: bool = False,
) -> Shape:
    """Returns the sizes of the kernels for arrays that are laid out."""
    _, num_heads, dim, num_queries = refs.query.shape
    _, num_key_heads, value_dim, num_keys = refs.value.shape
    groups, itemsize = num_heads // num_key_heads, refs.query.dtype.itemsize
    num_rows, num_key_rows = refs.query_rows.shape[1], refs.key_rows.shape[1]
    num_features, width = num_rows * refs.factor.shape[1], max(dim, value_dim)

    def program(num_heads: int) -> Program:
        rows = (num_rows, num_key_rows)
        return Program(num_heads, groups, width, num_features, rows, itemsize, is_causal)

    query_tile = key_tile = LANES
    if not is_causal:
        # The memory of a program is linear in its tile.
        fixed = program(1).bytes_of(0)
        most = (memory() - fixed) // (program(1).bytes_of(1) - fixed)
        query_tile, key_tile = (_tile(length, most, width) for length in (num_queries, num_keys))
    tile = max(query_tile, key_tile)
    heads = max(
        n
        for n in range(1, num_key_heads + 1)
        if num_key_heads % n == 0
        and (n == 1 or (n * groups <= MOST_HEADS and program(n).bytes_of(tile) <= memory()))
    )
    return Shape(
        num_heads=heads,
        groups=groups,
        dim=dim,
        value_dim=value_dim,
        num_features=num_features,
        is_paired=num_features > num_rows,
        num_queries=num_queries,
        num_keys=num_keys,
        query_tile=query_tile,
        key_tile=key_tile,
        passes=refs.query_rows.shape[2] // dim,
        is_stretched=num_key_rows > num_rows,
        dtype=refs.query.dtype,
        interpret=interpret,
        is_reversed=is_reversed,
        is_moved=is_moved,
    )


def _tile(length: int, most: int, width: int) -> int:
    """Returns the tile for a length of heads of ``width``, a multiple of ``LANES``.

    It has at most ``most`` tokens, if that is possible.
    """

    def at_most(tokens: int) -> int:
        return min(tokens * 64 // max(width, 64), most)

    whole = _multiple(length, LANES)
    if whole <= at_most(LONGEST_WHOLE):
        return whole
    longest = max(at_most(LONGEST_TILE) // LANES, 1) * LANES
    tiles = -(-length // longest)
    return _multiple(-(-length // tiles), LANES)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _tokens(x: Float[Array, "*batch length heads dim"]) -> Float[Array, "B heads padded length"]:
    *batch, length, heads, dim = x.shape
    x = x.reshape(math.prod(batch), length, heads, dim)
    return jnp.transpose(_padded(x, _multiple(dim, TILE)), (0, 2, 3, 1))


def _padded(x: Shaped[Array, "*shape width"], width: int) -> Shaped[Array, "*shape {width}"]:
    """Adds zeros at the end of the last axis."""
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def _in_parts(rows: Float[Array, "*K rows H"], dtype: Any) -> Float[Array, "*K rows width"]:
    """Returns rows in a dtype, for bfloat16 as two parts side by side.

    The products of a bfloat16 number with both parts, added in float32, keep 16 bits of the row.
    """
    if dtype != jnp.bfloat16:
        return rows.astype(dtype)
    return jnp.concatenate(bfloat16_parts(rows, 2), axis=-1)


def _key_rows(form: ExponentialForm) -> Float[Array, "*K rows H"]:
    """Returns the stretch stacked on W."""
    dim = _multiple(form.rows.shape[-1], TILE)
    rows = _padded(form.rows, dim)
    if form.stretch is None:
        return rows
    stretch = _padded(_padded(form.stretch * LOG2E**-0.5, dim).mT, dim).mT
    heads = max(rows.shape[0], stretch.shape[0])
    both = (jnp.broadcast_to(x, (heads, *x.shape[1:])) for x in (stretch, rows))
    return jnp.concatenate(list(both), axis=-2)


def _center(form: ExponentialForm) -> Float[Array, "*K H 1"] | None:
    """Returns the center of the stretched keys; None without a stretch."""
    if form.stretch is None:
        return None
    dim = _multiple(form.rows.shape[-1], TILE)
    if form.center is None:
        return jnp.zeros((1, dim, 1), form.stretch.dtype)
    return _padded(form.center, dim)[..., None] * LOG2E**0.5


def _offsets(forms: list[ExponentialForm]) -> Float[Array, "*K m 1"] | None:
    """Returns the sum of the offsets of queries and keys; None without any."""
    given = [form.offsets for form in forms if form.offsets is not None]
    return functools.reduce(jnp.add, given)[..., None] * LOG2E if given else None


def _hidden(log_weights: Float[Array, "B rows S"]) -> Float[Array, "B rows S"]:
    """Returns log weights to base 2, with a finite number in place of minus infinity."""
    return to_base_2(log_weights, hidden=HIDDEN, least=0.49 * HIDDEN)
