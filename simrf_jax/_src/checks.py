"""Checks of arguments, whose errors state the expected and the given value."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float64

Sign: TypeAlias = Literal["any", "at least 0", "positive"]


def typed_key(key: Any) -> None:
    """Accepts one typed PRNG key."""
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        what = f"{key.dtype} array" if hasattr(key, "dtype") else type(key).__name__
        raise TypeError(
            f"key must be a typed PRNG key, such as jax.random.key(0), got {what}. "
            "jax.random.wrap_key_data turns a raw key into a typed one."
        )
    if key.shape:
        raise ValueError(f"key must be a single key, got shape {key.shape}; use jax.vmap for many.")


def one_of(name: str, value: Any, known: Iterable[str | None]) -> None:
    """Accepts one of the known names."""
    known = tuple(known)
    if not isinstance(value, str | None) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")


def integer(name: str, value: Any, *, least: int | None = None) -> int:
    """Returns an integer, no less than the least, as a Python one."""
    if isinstance(value, bool | np.bool_):  # Old versions of NumPy take theirs for an integer.
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}.") from None
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    return value


def boolean(name: str, value: Any) -> bool:
    """Returns True or False, given as Python's or NumPy's, as Python's."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be True or False when the program is traced, got a traced value; "
            "jax.jit takes it in static_argnames."
        )
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def lead_shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns a leading shape, a tuple of integers of at least 0, in Python ones."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{name} must be a tuple of integers, got {value!r}.")
    return tuple(integer(f"{name}[{i}]", size, least=0) for i, size in enumerate(value))


def axis_names(name: str, value: Any) -> tuple[str, ...]:
    """Returns the names of mesh axes, given as None, one name or a tuple of them, as a tuple."""
    axes = (value,) if isinstance(value, str) else value
    if axes is None:
        return ()
    if not (isinstance(axes, tuple) and axes and all(isinstance(axis, str) for axis in axes)):
        raise TypeError(
            f"{name} must be the name of a mesh axis, or a tuple of names, got {value!r}."
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"{name} must name each axis once, got {value!r}.")
    return axes


def positive_int(name: str, value: Any) -> int:
    """Returns an integer of at least 1."""
    return integer(name, value, least=1)


def power_of_two(name: str, value: Any) -> int:
    """Returns an integer that is a power of two."""
    value = integer(name, value, least=1)
    if value & (value - 1):
        raise ValueError(f"{name} must be a power of two, got {value}.")
    return value


def floating_dtype(name: str, dtype: DTypeLike) -> jnp.dtype:
    """Returns a real floating dtype of at least 16 bits that arrays can have."""
    if dtype is None:
        raise TypeError(f"{name} must be a floating type, got None.")
    if jnp.issubdtype(dtype, jax.dtypes.extended):  # NumPy cannot interpret those of PRNG keys.
        raise TypeError(f"{name} must be a floating type, of 16 bits or more, got {dtype}.")
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(f"{name} must be a floating type, of 16 bits or more, got {dtype.name}.")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(f"{name} {dtype.name} needs jax.config.update('jax_enable_x64', True).")
    return dtype


def floating(name: str, x: ArrayLike) -> jax.Array:
    """Returns an array of a real floating type."""
    x = jnp.asarray(x)
    floating_dtype(name, x.dtype)
    return x


def real(name: str, value: npt.ArrayLike) -> Float64[np.ndarray, "*shape"]:
    """Returns integers or floating numbers of any width, including bfloat16, in float64."""
    array = np.asarray(value)
    if not _is_real(array.dtype):
        raise TypeError(f"{name} must hold real numbers, got {array.dtype.name}.")
    return array.astype(np.float64)


def vectors(name: str, x: ArrayLike) -> jax.Array:
    """Returns an array of a real floating type with at least one axis."""
    x = floating(name, x)
    if x.ndim < 1:
        raise ValueError(f"{name} must be [..., dim], got shape {x.shape}.")
    return x


def scalar(name: str, value: ArrayLike, *, sign: Sign = "any") -> None:
    """Accepts one finite real number of a sign; the values of traced ones are not known."""
    try:
        dtype, shape = jnp.result_type(value), jnp.shape(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be one real number, got {value!r}.") from None
    if shape or not _is_real(dtype):
        raise TypeError(f"{name} must be one real number, got {value!r}.")
    if isinstance(value, jax.core.Tracer):
        return
    number = np.asarray(value)
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}.")
    if not {"any": True, "at least 0": number >= 0, "positive": number > 0}[sign]:
        raise ValueError(f"{name} must be {sign}, got {value}.")


def is_traced(tree: Any) -> bool:
    """Returns whether some array of a pytree is traced, so that not all values are known."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def are_finite(tree: Any) -> bool:
    """Returns whether all numbers of a pytree are finite, or some are traced."""
    if is_traced(tree):
        return True
    return all(np.all(np.isfinite(leaf)) for leaf in jax.device_get(jax.tree.leaves(tree)))


def _is_real(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def tokens(
    query: Float[ArrayLike, "*batch T N H"],
    key: Float[ArrayLike, "*batch S K H"],
    value: Float[ArrayLike, "*batch S K D"],
) -> tuple[
    Float[Array, "*batch T N H"], Float[Array, "*batch S K H"], Float[Array, "*batch S K D"]
]:
    """Returns queries, keys and values as arrays whose dtypes and shapes fit each other.

    Raises:
      TypeError: If a dtype is not floating, or they differ.
      ValueError: If the shapes do not match.
    """
    query, key, value = (
        floating(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    )
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if min(query.ndim, key.ndim, value.ndim) < 3:
        raise ValueError(f"query, key and value must be [..., length, heads, dim], got {shapes}.")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            "query, key and value must have one dtype, got "
            f"{query.dtype.name}, {key.dtype.name} and {value.dtype.name}."
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(f"query, key and value must have the same batch shape, got {shapes}.")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must have the same length and heads, got {shapes}.")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same head_dim, got {shapes}.")
    if 0 in (*query.shape[-2:], key.shape[-2], value.shape[-1]):
        raise ValueError(
            f"query, key and value must have at least one head and dimension, got {shapes}."
        )
    num_heads, num_key_heads = query.shape[-2], key.shape[-2]
    if num_heads % num_key_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of that of key heads, got {num_heads} "
            f"and {num_key_heads}."
        )
    return query, key, value
