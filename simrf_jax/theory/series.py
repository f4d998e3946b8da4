r"""Ratios of mean squared errors as power series in :math:`t = v^2`.

Without the prefactor that all couplings share, the mean squared error is

.. math::
    V_1 + \sum_b P_b (C_{c_b} - C_\text{iid}) = \sum_k \frac{t^k}{k!} V_k q_k, \qquad
    q_k = 1 - \sum_b \frac{P_b}{V_k} (1 - r_k E_k(c_b))

where :math:`P_b = r_b (r_b - 1) / m` for row block b of :math:`r_b` rows at cosine :math:`c_b`, and
``theory.moments`` defines :math:`r_k` and :math:`I_k`. For positive features
:math:`V_k = 2^k - 1` and :math:`E_k = I_k(c)`. Hyperbolic features have the even parts of these,
:math:`V_k = 2^{k-1} - 1` and :math:`E_k = (I_k(c) + I_k(-c)) / 2`. Trigonometric features have the
series of hyperbolic features at :math:`-t`, with :math:`t = z^2`.

The ratio to iid is thus a mean of the ratios :math:`q_k` of single degrees, with positive weights.
Nothing is subtracted beyond the :math:`q_k`, neither at small :math:`t`, where both errors vanish,
nor at large :math:`t`, where both overflow.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Float64
from scipy import special

from simrf_jax.theory.moments import scaled_deficits
from simrf_jax.theory.numerics import over_chunks
from simrf_jax.theory.pairs import Pairs

_ROUNDING = 1e-14  # Ratios of single degrees are 0, or at least about 1 / d^2.


@functools.lru_cache(maxsize=64)
def degree_ratios(
    dim: int, pairs: tuple[Pairs, ...], even: bool
) -> Float64[np.ndarray, " degrees"]:
    """Returns the ratios q_k from the first degree with variance until they are constant.

    Args:
      dim: Dimension d.
      pairs: Coupled pairs of the projection.
      even: If true, the series is that of hyperbolic features, whose first degree with variance is
        2; otherwise that of positive features, whose first degree with variance is 1.

    Returns:
      The ratios, one for each degree.
    """
    degrees = 64
    while True:
        degrees *= 2
        first = 2 if even else 1
        differences = np.zeros(degrees + 1 - first)
        scaled_v = scaled_variances(np.arange(first, degrees + 1.0), even)
        for kind in pairs:
            if _is_identical(kind, even):
                continue
            deficits = scaled_deficits(dim, kind, degrees)
            if even:
                mirrored = kind._replace(cosine=-kind.cosine)
                deficits = (deficits + scaled_deficits(dim, mirrored, degrees)) / 2
            differences += kind.weight * deficits[first:] / scaled_v
        if abs(differences[-1]) < 1e-17:
            return without_rounding(_last_ratio(pairs, even) - differences)


def _last_ratio(pairs: tuple[Pairs, ...], even: bool) -> float:
    """Returns the limit of the ratios q_k, which is above 1 if features occur more than once."""
    return 1 + sum(kind.weight for kind in pairs if _is_identical(kind, even))


def _is_identical(kind: Pairs, even: bool) -> bool:
    """Returns whether the two rows of each pair have the same feature, even if ``even``."""
    return kind.norms == "equal" and (kind.cosine == 1 or (even and kind.cosine == -1))


def without_rounding(ratios: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Replaces by 0 what rounding leaves of degrees that the rows integrate exactly."""
    return np.where(np.abs(ratios) < _ROUNDING, 0.0, ratios)


def scaled_variances(k: Float64[np.ndarray, " k"], even: bool) -> Float64[np.ndarray, " k"]:
    """Returns 2^-k V_k, for the even parts if ``even``."""
    return (1 - 2 ** (1 - k)) / 2 if even else 1 - 2**-k


def positive_series(
    t: Float64[np.ndarray, " n"], dim: int, pairs: tuple[Pairs, ...], *, even: bool
) -> Float64[np.ndarray, " n"]:
    """Returns the mean squared error of positive or hyperbolic features relative to iid rows.

    Args:
      t: Squared norms v^2, at least 0.
      dim: Dimension d.
      pairs: Coupled pairs of the projection.
      even: If true, the features are hyperbolic; otherwise they are positive.

    Returns:
      The ratio at each t.
    """
    ratios = degree_ratios(dim, pairs, even)
    # The weights are almost those of Poisson(2t). At t_max they are negligible at all degrees whose
    # ratio differs from 1.
    t_max = ratios.size
    degrees = int(2 * t_max + 14 * np.sqrt(2 * t_max) + 60)
    first = 2 if even else 1
    k = np.arange(first, first + degrees, dtype=np.float64)
    last = _last_ratio(pairs, even)
    q = np.concatenate([ratios, np.full(degrees - ratios.size, last)])
    log_coefficients = np.log(scaled_variances(k, even)) - special.gammaln(k + 1)

    def mean_ratio(t: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        log_weights = k * np.log(2 * t)[:, None] + log_coefficients
        weights = np.exp(log_weights - log_weights.max(axis=1, keepdims=True))
        return weights @ q / weights.sum(axis=1)

    result = np.full_like(t, last)
    result[t == 0] = q[0]
    inside = (t > 0) & (t < t_max)
    result[inside] = over_chunks(mean_ratio, t[inside], degrees)
    return result


def alternating_series(
    t: Float64[np.ndarray, " n"], dim: int, pairs: tuple[Pairs, ...]
) -> Float64[np.ndarray, " n"]:
    """Returns the mean squared error of trigonometric features relative to iid rows.

    Args:
      t: Squared distances z^2, from 0 to 3 or so.
      dim: Dimension d.
      pairs: Coupled pairs of the projection.

    Returns:
      The ratio at each t.
    """
    degrees = 48
    k = np.arange(2.0, 2 + degrees)
    coefficients = 2**k * scaled_variances(k, even=True) / special.factorial(k)
    coefficients *= degree_ratios(dim, pairs, even=True)[:degrees]

    def ratio(t: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        return (-t[:, None]) ** (k - 2) @ coefficients / (special.exprel(-t) ** 2 / 2)

    return over_chunks(ratio, t, degrees)
