"""Checks of the arguments of the closed forms."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike

from simrf_jax import checks
from simrf_jax.projections import FIXED_NORMS, NORMS, Norms, couplings
from simrf_jax.projections.row_blocks import CrossPolytope

ClosedFormCoupling: TypeAlias = Literal["iid", "orthogonal", "simplex", "cross_polytope"]
COUPLINGS = get_args(ClosedFormCoupling)
# Couplings in which all pairs of rows have one angle.
PairCoupling: TypeAlias = Literal["iid", "orthogonal", "simplex"]
PAIR_COUPLINGS = get_args(PairCoupling)
_LARGEST_PARAMETER = 0.125  # The variance of generalised exponential features is infinite from it.


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
        couplings.has_room(value, dim, name)


def norm_law(value: Any, coupling: ClosedFormCoupling) -> None:
    """Raises ``ValueError`` unless rows of the coupling can have this law of norms.

    Args:
      value: The law to check.
      coupling: Coupling of the rows, which is known to be valid.
    """
    checks.one_of("norms", value, NORMS)
    if coupling == "iid" and value in ("antithetic", "shared"):
        raise ValueError(
            f"norms={value!r} couples the norms of one row block, and iid rows have no row blocks."
        )
    if coupling != "cross_polytope" and value == "pair":
        raise ValueError(
            "norms='pair' gives the rows of a +- pair one norm, which only "
            f"coupling='cross_polytope' has, got coupling={coupling!r}."
        )


def parameter(value: Any, norms: Norms) -> Float64[np.ndarray, "*shape"]:
    """Returns the parameter A of optimal positive features in float64 after checking it.

    Args:
      value: The parameter, any shape.
      norms: Law of the row norms, which is known to be valid.
    """
    array = checks.real("parameter", value)
    if not np.all(array < _LARGEST_PARAMETER):
        raise ValueError(
            "parameter must be less than 1/8, from where on the variance is infinite, "
            f"got {np.max(array)}."
        )
    if norms in FIXED_NORMS and np.any(array):
        raise ValueError(
            f"parameter must be 0 with norms={norms!r}: the weights of rows of equal norms cancel, "
            f"and the features estimate another kernel, got {array}."
        )
    return array


def one_parameter(value: Any, norms: Norms) -> float:
    """Returns the parameter A as one number after checking it; see ``parameter``."""
    array = parameter(value, norms)
    if array.shape:
        raise ValueError(f"parameter must be one number, got shape {array.shape}.")
    return float(array)


def pair_coupling(value: Any, dim: int) -> None:
    """Raises ``ValueError`` unless the coupling has a pair of rows in ``dim`` dimensions.

    Args:
      value: The coupling to check, which also needs a closed form.
      dim: Dimension d.
    """
    if value not in couplings.COUPLINGS and value != "cross_polytope":
        checks.one_of("coupling", value, PAIR_COUPLINGS)
    coupling("coupling", value, dim)
    if value == "cross_polytope":
        raise ValueError(
            "coupling 'cross_polytope' has pairs of rows at two angles. "
            "Give cosine=-1 or cosine=0 instead."
        )
    if value == "orthogonal" and dim < 2:
        raise ValueError(f"A pair of orthogonal rows needs dim of at least 2, got {dim}.")


def pair_cosine(coupling: Any, cosine: Any, dim: int) -> float | None:
    """Returns the cosine of the angle between a pair of rows, or None for iid rows.

    Args:
      coupling: A coupling that determines the cosine, or None.
      cosine: The cosine itself, one number in [-1, 1], or None. Exactly one of the two is given.
      dim: Dimension d.
    """
    if (coupling is None) == (cosine is None):
        raise ValueError(
            "Give exactly one of coupling and cosine, "
            f"got coupling={coupling!r} and cosine={cosine!r}."
        )
    if coupling is not None:
        pair_coupling(coupling, dim)
        if coupling == "iid":
            return None
        [run] = couplings.COUPLED[coupling].blocks(dim, dim, "square")
        return None if isinstance(run.block, CrossPolytope) else run.block.cosine
    value = checks.real("cosine", cosine)
    if value.shape or not -1 <= value <= 1:
        raise ValueError(f"cosine must be one number in [-1, 1], got {cosine!r}.")
    if dim < 2:
        raise ValueError(f"A pair of rows at an angle needs dim of at least 2, got {dim}.")
    return float(value)


def norms(name: str, value: ArrayLike) -> Float64[np.ndarray, "*shape"]:
    """Returns norms in float64 after checking that each is at least 0 or NaN."""
    array = checks.real(name, value)
    if np.any(array < 0):
        raise ValueError(f"{name} is a norm and must be at least 0, got {np.nanmin(array)}.")
    return array


def vectors(
    x: ArrayLike, y: ArrayLike
) -> tuple[Float64[np.ndarray, "*#batch dim"], Float64[np.ndarray, "*#batch dim"]]:
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
