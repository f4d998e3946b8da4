"""Checks of the arguments of the closed forms, and the names that they accept."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax._src import checks
from simrf_jax._src.projections import FIXED_NORMS, Norms, couplings

ClosedFormCoupling: TypeAlias = Literal["iid", "orthogonal", "simplex", "cross_polytope"]
COUPLINGS = get_args(ClosedFormCoupling)
# Couplings in which all pairs of rows have one angle.
PairCoupling: TypeAlias = Literal["iid", "orthogonal", "simplex"]
PAIR_COUPLINGS = get_args(PairCoupling)
# The feature maps that have closed forms.
Features: TypeAlias = Literal["positive", "hyperbolic", "trigonometric"]
FEATURES = get_args(Features)
Numbers: TypeAlias = Float64[np.ndarray, "*shape"] | np.float64
Vectors: TypeAlias = Float64[np.ndarray, "*#batch dim"]
_LARGEST_PARAMETER = 0.125  # The variance of the features is infinite from here on.


def coupling(name: str, value: Any, dim: int) -> None:
    """Raises ``ValueError`` unless the coupling has a closed form in ``dim`` dimensions.

    Args:
      name: Name of the argument, for the error message.
      value: The coupling to check.
      dim: Dimension d.
    """
    if value in couplings.COUPLINGS and value not in COUPLINGS:
        depends = couplings.COUPLED[value].weight_dependent
        why = ", because its angles depend on the norms drawn" if depends else ""
        raise ValueError(
            f"{name} {value!r} has no closed form in simrf_jax.theory{why}. "
            "Estimate its errors by Monte Carlo. The couplings with closed forms are "
            f"{', '.join(map(repr, COUPLINGS))}."
        )
    checks.one_of(name, value, COUPLINGS)
    if value != "cross_polytope":  # It exists in every dimension.
        couplings.check_dim(value, dim, name)


def parameter(value: ArrayLike, norms: Norms) -> Float64[np.ndarray, "*shape"]:
    """Returns the parameter A of optimal positive features in float64 after checking it.

    Args:
      value: The parameter, any shape.
      norms: Law of the row norms, already checked.
    """
    array = checks.real("parameter", value)
    if not np.all(array < _LARGEST_PARAMETER):
        raise ValueError(
            "parameter must be less than 1/8, from which on the variance is infinite, "
            f"got {np.max(array)}."
        )
    if norms in FIXED_NORMS and np.any(array):
        raise ValueError(
            f"parameter must be 0 with norms={norms!r}: the weights of rows of equal norms cancel, "
            f"and the features estimate another kernel, got {array}."
        )
    return array


def one_parameter(value: ArrayLike, norms: Norms) -> float:
    """Returns the parameter A as one number after checking it; see ``parameter``."""
    array = parameter(value, norms)
    if array.shape:
        raise ValueError(f"parameter must be one number, got shape {array.shape}.")
    return float(array)


def norms(name: str, value: ArrayLike) -> Float64[np.ndarray, "*shape"]:
    """Returns norms in float64 after checking that each is at least 0 or NaN."""
    array = checks.real(name, value)
    if np.any(array < 0):
        raise ValueError(f"{name} is a norm and must be at least 0, got {np.nanmin(array)}.")
    return array


def squared_norms(name: str, value: ArrayLike) -> Float64[np.ndarray, "*shape"]:
    """Returns the squares of norms, which may be infinite, after checking the norms."""
    with np.errstate(over="ignore"):
        return np.asarray(norms(name, value) ** 2)


def vectors(x: ArrayLike, y: ArrayLike) -> tuple[Vectors, Vectors]:
    """Returns x and y in float64 after checking their shapes.

    Both must be ``[..., dim]`` with the same ``dim`` of at least 1, and their leading shapes must
    broadcast.
    """
    x, y = checks.real("x", x), checks.real("y", y)
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
