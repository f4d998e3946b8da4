"""Flax's masks, read as booleans, and taken apart where they are products with a query axis."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Mask = jax.Array | np.ndarray


def as_boolean(mask: ArrayLike) -> tuple[Mask, Mask | None]:
    """Reads a mask of booleans, or of zeros and ones, which Flax's functions make by default.

    Args:
      mask: Booleans or numbers of any shape.

    Returns:
      The mask in booleans; and None, or where the values are traced ``[..., 1, 1]``, True for each
      sequence and head that has zeros and ones only.

    Raises:
      TypeError: If the type is neither boolean nor that of real numbers.
      ValueError: If the values are known, and others than zeros and ones are among them.
    """
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    if mask.dtype == bool:
        return mask, None
    if not any(jnp.issubdtype(mask.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"mask must hold booleans, or zeros and ones, got {mask.dtype.name}.")
    xp: Any = np if isinstance(mask, np.ndarray) else jnp  # NumPy's values are known under jit.
    binary = xp.logical_or(mask == 0, mask == 1)
    binary = binary.reshape((1,) * (3 - mask.ndim) + mask.shape)
    is_mask = xp.all(binary, axis=(-2, -1), keepdims=True)
    if isinstance(is_mask, jax.core.Tracer):
        return mask.astype(bool), is_mask
    if not is_mask.all():
        raise ValueError(
            f"mask must hold booleans, or zeros and ones, got {mask.dtype.name} numbers from "
            f"{mask.min()} to {mask.max()}. Pass what is added to the logits as bias, or compare "
            "it with 0 to make a mask of it."
        )
    return mask.astype(bool), None


class Factors(NamedTuple):
    """A mask taken apart; ``mask == queries & keys``, and the causal mask, where ``is_product``.

    Attributes:
      keys: ``[..., 1, S]``, True at keys that some query sees.
      queries: ``[..., T, 1]``, True at queries that see some key.
      is_product: ``[..., 1, 1]``.
    """

    keys: Mask
    queries: Mask
    is_product: Mask


def factor(mask: Mask, target: tuple[int, ...], *, is_causal: bool) -> Factors | None:
    """Takes a boolean mask apart, in O(T S) boolean operations.

    Whatever factors q and k it was made of, those here serve: if q_t k_s [s <= t] is not zero for
    some s, then q_t is 1, and likewise k_s, so that a product of them is zero where the mask is.

    Args:
      mask: Mask of a rank up to that of ``target``.
      target: ``(*batch, heads, T, S)``.
      is_causal: True if the causal mask is a factor too, in the mask or beside it.

    Returns:
      The factors; None for a mask that has no query axis, or does not fit.

    Raises:
      ValueError: If the values are known and are not such a product.
    """
    shape = (1,) * (len(target) - mask.ndim) + mask.shape
    fits = len(shape) == len(target) and all(
        have in (1, want) for have, want in zip(shape, target, strict=True)
    )
    if not fits or shape[-2] == 1:
        return None
    xp: Any = np if isinstance(mask, np.ndarray) else jnp  # NumPy's values are known under jit.
    mask = mask.reshape(shape)
    causal = np.tri(*target[-2:], dtype=np.bool_) if is_causal else np.ones((1, 1), bool)
    causal = causal.reshape((1,) * (len(target) - 2) + causal.shape)
    mask = mask & causal
    keys, queries = (xp.any(mask, axis=axis, keepdims=True) for axis in (-2, -1))
    is_product = xp.all(mask == (queries & keys & causal), axis=(-2, -1), keepdims=True)
    if not isinstance(is_product, jax.core.Tracer) and not is_product.all():
        raise ValueError(
            f"factored_masks=True: the mask of shape {shape} is not a product of a mask of queries "
            f"and a mask of keys{', with the causal mask' if is_causal else ''}. "
            f"{'' if is_causal else 'A causal mask needs is_causal=True beside it. '}"
            "Linear attention can honour no other."
        )
    return Factors(keys, queries, is_product)
