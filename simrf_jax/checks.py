"""Checks at the public boundary: each says what was expected and what was given."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike


def typed_key(key: Any) -> None:
    """Accepts one typed PRNG key."""
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        what = f"{key.dtype} array" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(
            f"key must be a typed PRNG key, made by jax.random.key(seed), got {what}. "
            "jax.random.wrap_key_data turns a raw key into a typed one."
        )
    if key.shape:
        raise ValueError(f"key must be a single key, got shape {key.shape}; use jax.vmap for many.")


def one_of(name: str, value: Any, known: Iterable[str | None]) -> None:
    """Accepts one of the known names."""
    known = tuple(known)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def integer(name: str, value: Any) -> int:
    """Returns an integer as a Python one."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}.") from None


def positive_int(name: str, value: Any) -> int:
    """Returns an integer of at least 1."""
    if integer(name, value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return operator.index(value)


def floating_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """Returns a real floating dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating type, got {jnp.dtype(dtype).name}.")
    return jnp.dtype(dtype)


def floating(name: str, x: ArrayLike) -> jax.Array:
    """Returns an array of a real floating type."""
    x = jnp.asarray(x)
    floating_dtype(name, x.dtype)
    return x
