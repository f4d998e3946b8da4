"""Errors with couplings of norms and with the parameter of optimal positive features."""

import functools

import numpy as np
import pytest
from mpmath import mp, mpf

from simrf_jax.theory import kernel_mse, mse_ratio, optimal_parameter, relative_bias
from tests.standard_errors import assert_mean
from tests.theory import draws, oracle

LAWS = [
    ("iid", "chi"),
    ("orthogonal", "chi"),
    ("orthogonal", "antithetic"),
    ("orthogonal", "shared"),
    ("simplex", "chi"),
    ("simplex", "antithetic"),
    ("simplex", "shared"),
    ("cross_polytope", "chi"),
    ("cross_polytope", "antithetic"),
    ("cross_polytope", "shared"),
    ("cross_polytope", "pair"),
]
FIXED = [
    (coupling, norms)
    for coupling in ["iid", "orthogonal", "simplex", "cross_polytope"]
    for norms in ["sqrt_dim", "radau"]
]


def ordered_pairs(num_rows, dim, coupling, norms):
    """Counts the ordered pairs of rows by (cosine as a ratio, relation of norms), in a loop."""
    counts = {}
    sizes = [len(block) for block in draws.row_blocks(num_rows, dim, coupling)]
    for size in sizes:
        for i in range(size):
            for j in range(size):
                if i != j:
                    kind = kind_of_pair(i, j, size, coupling, norms)
                    counts[kind] = counts.get(kind, 0) + 1
    return counts


def kind_of_pair(i, j, size, coupling, norms):
    cosine = {"orthogonal": (0, 1), "simplex": (-1, max(size - 1, 1))}.get(coupling)
    step = 1
    if coupling == "cross_polytope":
        step = 2
        cosine = (-1, 1) if i // 2 == j // 2 else (0, 1)
    same = norms == "shared" or (norms in ("pair", "antithetic") and i // step == j // step)
    opposite = norms == "antithetic" and i // step // 2 == j // step // 2
    return cosine, "equal" if same else "antithetic" if opposite else "independent"


@functools.cache
def opposite_norm(a, dim):
    """Returns a' with F(a) + F(a') = 1, for a chi law F."""
    upper = mp.gammainc(mpf(dim) / 2, a**2 / 2, mp.inf, regularized=True)
    if upper < mpf(10) ** -60:
        return mpf(0)

    def excess(log_square):
        return mp.log(mp.gammainc(mpf(dim) / 2, 0, mp.exp(log_square), regularized=True) / upper)

    start = mp.log(upper * mp.gamma(mpf(dim) / 2 + 1)) * 2 / dim
    start = min(start, mp.log(mpf(dim) / 2))
    return mp.sqrt(2 * mp.exp(mp.findroot(excess, start)))


def mean_product(t, parameter, dim, cosine, relation):
    """Returns E f f' for two rows from its definition as a mean over norms."""
    c, s = mpf(cosine[0]) / cosine[1], 1 - 4 * mpf(parameter)
    if relation == "independent":
        return oracle.conformity(dim, cosine, t) * mp.exp(-t)

    def integrand(a):
        other = a if relation == "equal" else opposite_norm(a, dim)
        squares = a**2 + other**2
        resultant = squares + 2 * c * a * other
        log_rest = 2 * mpf(parameter) * squares - a**2 / 2 - t + dim * mp.log(s)
        return a ** (dim - 1) * mp.exp(log_rest) * mp.hyp0f1(mpf(dim) / 2, s * t * resultant / 4)

    norm = mpf(2) ** (mpf(dim) / 2 - 1) * mp.gamma(mpf(dim) / 2)
    if relation == "antithetic":
        median = mp.sqrt(2 * mp.mpf(MEDIANS[dim]))
        ends = [median, median + 1, median + 3, median + 6, median + 12, median + 24]
        return 2 * mp.quad(integrand, ends) / norm
    width = 1 / mp.sqrt(1 - 8 * mpf(parameter))
    peak = width * mp.sqrt(dim) + width**2 * mp.sqrt(s * t * (2 + 2 * c))
    ends = [max(peak + k * width, 0) for k in (-40, -16, -8, -4, 0, 4, 8, 16, 40)]
    return mp.quad(integrand, sorted({mpf(0), *ends})) / norm


def median_of_half_square(dim):
    with mp.workdps(60):
        root = mp.findroot(
            lambda x: mp.gammainc(mpf(dim) / 2, 0, x, regularized=True) - mpf(1) / 2,
            mpf(dim) / 2,
        )
    return root


MEDIANS = {dim: median_of_half_square(dim) for dim in (3, 16)}


def exact_mse(v, num_features, dim, coupling, norms, parameter):
    """Returns E(K_hat / K - 1)^2 by a loop over kinds of pairs, in arbitrary precision."""
    t = mpf(float(v)) ** 2
    total = mean_product(t, parameter, dim, (1, 1), "equal") - 1
    for (cosine, relation), count in ordered_pairs(num_features, dim, coupling, norms).items():
        moment = mean_product(t, parameter, dim, cosine, relation)
        total += mpf(count) / num_features * (moment - 1)
    return total / num_features


@pytest.mark.parametrize("parameter", [0.0, -0.03, 0.02, "optimal"])
@pytest.mark.parametrize("v", [1e-3, 0.3, 0.999, 1.001, 3.0])
@pytest.mark.parametrize(("coupling", "norms"), LAWS)
@pytest.mark.parametrize(("dim", "num_features"), [(3, 10), (16, 32)])
def test_against_arbitrary_precision(dim, num_features, coupling, norms, v, parameter):
    if coupling == "simplex":  # Whole simplices only.
        num_features = 2 * (dim + 1)
    if parameter == "optimal":
        parameter = float(optimal_parameter(v**2, dim))
    x = np.zeros(dim)
    y = v * np.eye(dim)[0]
    got = kernel_mse(
        x, y, num_features, coupling=coupling, norms=norms, parameter=parameter, kernel="softmax"
    )
    with mp.workdps(40):
        expected = float(exact_mse(v, num_features, dim, coupling, norms, parameter))
    # Differences of means over antithetic norms lose digits where the error is nearly 0.
    loose = norms == "antithetic" and parameter and v < 0.01
    np.testing.assert_allclose(got, expected, rtol=1e-8 if loose else 1e-11)
