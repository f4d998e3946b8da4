"""Checks of what the closed forms are given."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.projections import couplings
from simrf_jax.projections.couplings import FIXED

COUPLINGS = ("iid", *FIXED)


def coupling(name: str, value: Any, dim: int) -> None:
    """Accepts a coupling with a closed form in ``dim`` dimensions."""
    if value in couplings.COUPLINGS and value not in COUPLINGS:
        raise ValueError(
            f"{name} {value!r} has no closed form: its angles depend on the norms drawn. "
            f"Estimate it by Monte Carlo; the closed forms know {', '.join(map(repr, COUPLINGS))}."
        )
    checks.one_of(name, value, COUPLINGS)
    couplings.has_room(value, dim, name)


def pair_coupling(value: Any, dim: int) -> None:
    """Accepts a coupling that has a pair of coupled rows in ``dim`` dimensions."""
    coupling("coupling", value, dim)
    if value == "orthogonal" and dim < 2:
        raise ValueError(f"A pair of orthogonal rows needs dim of at least 2, got {dim}.")


def pair_cosine(coupling: Any, cosine: Any, dim: int) -> float | None:
    """Returns the cosine of a pair of rows, named or given; None for iid rows."""
    if (coupling is None) == (cosine is None):
        raise ValueError(
            f"Give one of coupling and cosine, got coupling={coupling!r} and cosine={cosine!r}."
        )
    if coupling is not None:
        pair_coupling(coupling, dim)
        if coupling == "iid":
            return None
        [run] = couplings.COUPLED[coupling].blocks(dim, dim, "square")
        return run.block.cosine
    value = real("cosine", cosine)
    if value.shape or not -1 <= value <= 1:
        raise ValueError(f"cosine must be one number in [-1, 1], got {cosine!r}.")
    if dim < 2:
        raise ValueError(f"A pair at an angle needs dim of at least 2, got {dim}.")
    return float(value)


def norms(name: str, value: ArrayLike) -> np.ndarray:
    """Returns lengths, at least 0 or NaN, in float64."""
    array = real(name, value)
    if np.any(array < 0):
        raise ValueError(f"{name} is a norm and must be at least 0, got {np.nanmin(array)}.")
    return array


def vectors(x: ArrayLike, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns vectors of one dimension and leading shapes that broadcast, in float64."""
    x, y = real("x", x), real("y", y)
    expected = "x and y must be [..., dim] with the same dim of at least 1"
    if x.ndim < 1 or y.ndim < 1 or x.shape[-1] != y.shape[-1] or x.shape[-1] < 1:
        raise ValueError(f"{expected}, got {x.shape} and {y.shape}.")
    try:
        np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise ValueError(
            f"{expected} and leading shapes that broadcast, got {x.shape} and {y.shape}."
        ) from None
    return x, y


def real(name: str, value: ArrayLike) -> np.ndarray:
    """Returns integers or floating numbers of any width, bfloat16 included, in float64."""
    array = np.asarray(value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} must hold real numbers, got {array.dtype.name}.")
    return array.astype(np.float64)
