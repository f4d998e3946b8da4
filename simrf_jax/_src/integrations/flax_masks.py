"""Flax's masks, read as booleans and factored if they are products with a query axis."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from simrf_jax._src.attention.inputs.call import Axes
from simrf_jax._src.attention.inputs.masks import as_array
from simrf_jax._src.attention.inputs.sharding import are_bound

Mask = jax.Array | np.ndarray
LOGGER = logging.getLogger("simrf_jax")


def why_no_segments(
    target: tuple[int, ...], *, packed: bool, decode: bool, has_segment_ids: bool
) -> str | None:
    """Returns a sentence with the reason why a mask cannot hold segments, or None if it can.

    Args:
      target: ``(*batch, heads, T, S)``.
      packed: True if the adapter takes segments in its masks.
      decode: The field of the adapter.
      has_segment_ids: True if the call has segment ids in addition to the mask.
    """
    length, key_length = target[-2:]
    if not packed:
        return NEEDS_PACKED
    if decode:
        return (
            "With decode=True there are no segments: the cache holds one sequence in each row of "
            "the batch."
        )
    if has_segment_ids:
        return "segment_ids were given: leave the segments out of the mask."
    if length != key_length:
        return (
            "Segments are for self-attention, with equal numbers of queries and keys, got "
            f"{key_length} keys for {length} queries."
        )
    return None


NEEDS_PACKED = 'The mask of packed sequences needs masks="packed", and so do segment ids as a mask.'


def as_boolean(mask: ArrayLike, no_segments: str | None) -> tuple[Mask, Mask | None]:
    """Reads a mask of booleans, or of zeros and ones, the default of Flax's functions.

    Args:
      mask: Booleans or numbers of any shape.
      no_segments: Sentence with the reason why integers are not segment ids; None if they may be.

    Returns:
      The mask in booleans; and None or, for traced values, ``[..., 1, 1]``, True for each sequence
      and head that has only zeros and ones.

    Raises:
      TypeError: If the type is neither boolean nor that of real numbers.
      ValueError: If the values are known, and some are neither zero nor one.
    """
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    if mask.dtype == bool:
        return mask, None
    if not any(jnp.issubdtype(mask.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"mask must hold booleans, or zeros and ones, got {mask.dtype.name}.")
    xp: Any = np if isinstance(mask, np.ndarray) else jnp  # NumPy values are known even under jit.
    binary = xp.logical_or(mask == 0, mask == 1)
    binary = binary.reshape((1,) * (3 - mask.ndim) + mask.shape)
    is_mask = xp.all(binary, axis=(-2, -1), keepdims=True)
    instead = f"{_INSTEAD} {no_segments}" if no_segments else _INSTEAD
    if isinstance(is_mask, jax.core.Tracer):
        say_unless(is_mask, f"{_NOT_BOOLEAN}, got other {mask.dtype.name} numbers. {instead}")
        return mask.astype(bool), is_mask
    if not is_mask.all():
        raise ValueError(
            f"{_NOT_BOOLEAN}, got {mask.dtype.name} numbers from {mask.min()} to {mask.max()}. "
            f"{instead}"
        )
    return mask.astype(bool), None


_NOT_BOOLEAN = "mask must hold booleans, or zeros and ones"
_INSTEAD = "Pass terms of the logits as bias, or compare them with 0 to make a mask of them."


class Factors(NamedTuple):
    """A factored mask: ``mask == queries & keys``, and other factors, where ``is_product``.

    The other factors are the causal mask and the mask of the segments, if present.

    Attributes:
      keys: ``[..., 1, S]``, True at keys that some query sees.
      queries: ``[..., T, 1]``, True at queries that see some key.
      segment_ids: ``[*batch, T]``, integers that differ between segments; or None.
      is_product: ``[..., 1, 1]``, True where the mask is such a product.
    """

    keys: Mask
    queries: Mask
    segment_ids: Mask | None
    is_product: Mask


def factor(
    mask: Mask, target: tuple[int, ...], *, is_causal: bool, no_segments: str | None = NEEDS_PACKED
) -> Factors | None:
    """Factors a boolean mask, in O(T S) boolean operations.

    The factors here work for a mask made of any factors q and k: if q_t k_s [s <= t] is not zero
    for some s, then q_t is 1, and so is k_s, hence the product is zero where the mask is. The
    segments here are the shortest ranges of positions such that no query sees a key of another
    range. So they hide nothing that the mask shows, and each is part of a segment of which the mask
    was made.

    Args:
      mask: Mask of a rank up to that of ``target``.
      target: ``(*batch, heads, T, S)``.
      is_causal: True if the causal mask is a factor too, in the mask or in addition to it.
      no_segments: Sentence with the reason why segments cannot be another factor; None if they can.

    Returns:
      The factors; None for a mask that has no query axis, or does not fit.

    Raises:
      ValueError: If the values are known and the mask is not such a product.
    """
    shape = (1,) * (len(target) - mask.ndim) + mask.shape
    fits = len(shape) == len(target) and all(
        have in (1, want) for have, want in zip(shape, target, strict=True)
    )
    if not fits or shape[-2] == 1:
        return None
    xp: Any = np if isinstance(mask, np.ndarray) else jnp  # NumPy values are known even under jit.
    mask = mask.reshape(shape)
    causal = np.tri(*target[-2:], dtype=np.bool_) if is_causal else np.ones((1, 1), bool)
    causal = causal.reshape((1,) * (len(target) - 2) + causal.shape)
    mask = mask & causal
    keys, queries = (xp.any(mask, axis=axis, keepdims=True) for axis in (-2, -1))
    product, segment_ids = queries & keys & causal, None
    if no_segments is None and 0 < target[-2] == shape[-1]:
        segment_ids = _shortest_segments(mask)
        product &= (segment_ids[..., :, None] == segment_ids[..., None, :])[..., None, :, :]
        segment_ids = xp.broadcast_to(segment_ids, (*target[:-3], target[-2]))
    is_product = xp.all(mask == product, axis=(-2, -1), keepdims=True)
    if isinstance(is_product, jax.core.Tracer):
        say_unless(is_product, _no_product(shape, no_segments, is_causal=is_causal))
    elif not is_product.all():
        raise ValueError(_no_product(shape, no_segments, is_causal=is_causal))
    return Factors(keys, queries, segment_ids, is_product)


def _shortest_segments(mask: Mask) -> Mask:
    """Returns segment numbers ``[*batch, T]`` from a mask ``[*batch, heads, T, T]``.

    Two neighboring positions share a segment if some query at or before one of them sees a key at
    or after the other, or vice versa.
    """
    xp: Any = np if isinstance(mask, np.ndarray) else jnp
    length = mask.shape[-1]
    position = np.arange(length).reshape((1,) * (mask.ndim - 2) + (length,))
    sees = xp.any(mask, axis=-1)
    first, last = xp.argmax(mask, axis=-1), length - 1 - xp.argmax(mask[..., ::-1], axis=-1)
    first = xp.where(sees, xp.minimum(first, position), position).min(axis=-2)
    last = xp.where(sees, xp.maximum(last, position), position).max(axis=-2)
    position = position.reshape((1,) * (mask.ndim - 2) + (length,))
    is_between = (first[..., None] < position) & (position <= last[..., None])
    return xp.cumsum(~xp.any(is_between, axis=-2), axis=-1, dtype=np.int32)


def _no_product(shape: tuple[int, ...], no_segments: str | None, *, is_causal: bool) -> str:
    """Returns sentences with the reason why a mask cannot be honored."""
    factors = ["a mask of queries", "a mask of keys"]
    factors += ["the causal mask"] if is_causal else []
    factors += ["a mask of segments of neighbors"] if no_segments is None else []
    product = f"{', '.join(factors[:-1])} and {factors[-1]}"
    field = 'masks="packed"'
    if no_segments == NEEDS_PACKED:
        field = "is_causal=True" if is_causal else 'masks="factored"'
    causal = "" if is_causal else "is_causal=True is needed for a causal mask. "
    segments = f" {no_segments}" if no_segments else ""
    return (
        f"{causal}{field}: the mask of shape {shape} is not a product of {product}.{segments} "
        "Linear attention cannot honor other masks."
    )


def is_segment_ids(mask: ArrayLike, target: tuple[int, ...]) -> bool:
    """Returns whether a mask holds segment ids: integers that are the same for all queries."""
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    shape = (1,) * (len(target) - mask.ndim) + mask.shape
    is_integer = jnp.issubdtype(mask.dtype, jnp.integer)
    return is_integer and shape[:-1] in ((*target[:-3], 1, 1), (1,) * (len(target) - 1))


def factors_of_ids(ids: ArrayLike, target: tuple[int, ...], axes: Axes) -> Factors:
    """Returns the factors of the mask for segment ids, in O(T).

    Args:
      ids: Integers that broadcast to ``[*batch, 1, 1, T]``. 0 is padding, which sees nothing, is
        not seen, and does not split a segment.
      target: ``(*batch, heads, T, T)``.
      axes: Mesh axes that the caller named for the length. Inside ``shard_map`` over them, the ids
        and T are those of one device.
    """
    ids = as_array("Segment ids in a mask", ids)
    ids = jnp.broadcast_to(ids, (*target[:-3], 1, 1, target[-1]))[..., 0, 0, :]
    fill = functools.partial(_fill, axes=axes if axes and are_bound(axes) else ())
    sharding = jax.typeof(ids).sharding
    if sharding.spec and sharding.spec[-1]:
        # A scan does not accept an axis that is explicitly sharded.
        fill = jax.sharding.auto_axes(fill, out_sharding=sharding)
    real = (ids != 0)[..., None, None, :]
    return Factors(real, real.swapaxes(-2, -1), fill(ids), np.ones((1,) * len(target), bool))


@functools.partial(jax.jit, static_argnames="axes")  # Op by op, jax 0.7.2 refuses explicit axes.
def _fill(ids: jax.Array, *, axes: Axes) -> jax.Array:
    """Returns ids ``[*batch, T]`` where padding gets the id of the last real token before it.

    Args:
      ids: ``[*batch, T]``; those of this device if there are axes.
      axes: Manual axes that shard the length.
    """

    def last_real(earlier: jax.Array, later: jax.Array) -> jax.Array:
        return jnp.where(later != 0, later, earlier)

    filled = jax.lax.associative_scan(last_real, ids, axis=ids.ndim - 1)
    if not axes or not ids.shape[-1]:
        return filled
    # Each device sends its last id to the others; padding at its start takes the last earlier id.
    last = jax.lax.all_gather(filled[..., -1:], axes, axis=ids.ndim - 1, tiled=True)
    last = _fill(last, axes=())
    device = jax.lax.axis_index(axes)
    before = jnp.take(last, jnp.maximum(device - 1, 0), axis=-1)[..., None]
    return jnp.where((filled == 0) & (device > 0), before, filled)


def say_unless(valid: jax.Array, reason: str) -> None:
    """Logs a reason, once per process, when a traced program finds that a mask is not valid.

    The program contains a callback for it, so it cannot be exported or cached on disk. To omit the
    callback, call ``logging.getLogger("simrf_jax").setLevel(logging.CRITICAL)`` before tracing.
    """
    if not LOGGER.isEnabledFor(logging.ERROR):
        return

    def say(is_valid: jax.Array) -> None:
        jax.debug.callback(_speaker(reason), is_valid)

    is_valid = jnp.all(valid)  # One number is cheap to bring to the host.
    jax.lax.cond(is_valid, lambda is_valid: None, say, is_valid)


@functools.cache
def _speaker(reason: str) -> Callable[[Any], None]:
    """Returns a function that logs a reason once; it is the same for all layers."""
    said: list[bool] = []

    def speak(is_valid: Any) -> None:
        # Under vmap both branches of a condition run.
        if not said and not np.all(is_valid):
            said.append(True)
            LOGGER.error("The output of attention is NaN. %s", reason)

    return speak
