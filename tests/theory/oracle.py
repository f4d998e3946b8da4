"""Closed forms in arbitrary precision and from the definitions, independent of the library.

The conformity is the power series with the paper's I_k by their exact recurrence. It is computed
with more digits than the recurrence and the alternating sums lose. For large arguments it is the
integral over the angle by mp.quad. Errors are V1 plus a loop over row blocks.
"""

import functools
import operator

from mpmath import mp, mpf

DIGITS = 40  # Digits of the series; the integrals have 25.


def fixed(x, bits):
    """Returns an integer, x times 2^bits."""
    with mp.workprec(bits + 100):
        return int(mp.floor(mp.ldexp(x, bits)))


@functools.lru_cache(maxsize=512)
def coefficients(dim, cosine, count, bits):
    """Returns r_k I_k(c) in fixed point.

    The recurrence of I_k loses digits as (1 + |c|)^k. Integers take a tenth of mpmath's time.
    """
    p, q = cosine
    with mp.workprec(bits + 100):
        mu = mp.sqrt(2) * mp.gamma(mpf(dim + 1) / 2) / mp.gamma(mpf(dim) / 2)
        first = 1 + mpf(p) / q * mu**2 / dim
    moments = [0, 1 << bits, fixed(first, bits)]  # I_{-1} (not used), I_0, I_1.
    factor, result = 1 << bits, []
    for k in range(count):
        result.append(factor * moments[k + 1] >> bits)
        factor = factor * (dim + k) // (dim + 2 * k)
        older, old, new = moments[-3:]
        terms = (
            q**2 * (2 * dim + 2 + 3 * k) * new
            + ((dim + k) * p**2 - (dim + 1 + 3 * k) * q**2) * old
            + k * (q**2 - p**2) * older
        )
        moments.append(terms // (q**2 * (dim + 1 + k)))
    return result


@functools.lru_cache(maxsize=128)
def powers(t, count, bits):
    """Returns t^k / k! in fixed point."""
    step, result = fixed(t, bits), [1 << bits]
    for k in range(1, count):
        result.append(result[-1] * step // (k << bits))
    return result


def conformity(dim, cosine, t):
    """Returns rho_c(t) for t = v^2 or t = -z^2; the cosine is a ratio of integers (p, q)."""
    return (conformity_by_series if abs(t) < 150 else conformity_by_quadrature)(dim, cosine, t)


@functools.cache
def conformity_by_series(dim, cosine, t):
    """Returns rho_c(t) = sum_k t^k / k! r_k I_k(c)."""
    size = abs(t)
    # Terms are at most (2|t|)^k / k!, which fall faster than e^-k beyond e^2 * 2|t|.
    count = 2 ** int(mp.ceil(mp.log(2 * 3 * size + 150, 2)))
    lost = count * mp.log10(1 + abs(mpf(cosine[0]) / cosine[1])) + 4 * size / mp.log(10)
    bits = 333 * int(mp.ceil((DIGITS + 60 + lost) / 100))  # 100 digits have 332.2 bits.
    terms = [*map(operator.mul, powers(t, count, bits), coefficients(dim, cosine, count, bits))]
    total = sum(terms)
    assert abs(terms[-1]) * 10 ** (DIGITS + 20) < abs(total)
    with mp.workprec(bits):
        return mp.ldexp(total, -2 * bits)


@functools.cache
def conformity_by_quadrature(dim, cosine, t):
    """Returns rho_c(t) = E_phi[1F1(d; d/2; t (1 + c sin phi) / 2)]."""
    with mp.workdps(30):
        c = mpf(cosine[0]) / cosine[1]

        def integrand(phi):
            s = mp.sin(phi)
            return mp.hyp1f1(dim, mpf(dim) / 2, t * (1 + c * s) / 2) * s ** (dim - 1)

        norm = mp.beta(mpf(dim) / 2, mpf(1) / 2)
        # The integrand has its peaks near 0 or pi/2.
        ends = [0, mpf("0.01"), mpf("0.1"), mpf("0.5"), mpf("1.2"), mpf("1.5"), mp.pi / 2]
        return 2 * mp.quad(integrand, ends) / norm


def regular_blocks(num_features, dim):
    """Returns the rows of each regular simplex: d + 1 if full, and never 1 next to another."""
    sizes, left = [], num_features
    while left > dim + 2:
        sizes.append(dim + 1)
        left -= dim + 1
    return sizes + ([dim, 2] if left == dim + 2 else [left])


def square_blocks(num_features, dim):
    sizes, left = [], num_features
    while left > 0:
        sizes.append(min(left, dim))
        left -= dim
    return sizes


def blocks(num_features, dim, coupling, block):
    """Returns (rows, cosine) of each row block."""
    if coupling == "iid":
        return []
    if coupling == "orthogonal":
        return [(r, (0, 1)) for r in square_blocks(num_features, dim)]
    if block == "square":
        return [(r, (-1, dim - 1)) for r in square_blocks(num_features, dim)]
    return [(r, (-1, r - 1) if r > 1 else None) for r in regular_blocks(num_features, dim)]


def error(t, num_features, dim, coupling, features, block):
    """Returns V1 + sum_b r (r - 1) / m (C_c - C_iid) at t = v^2 or z^2, without prefactor / m."""
    with mp.workdps(2 * DIGITS):
        sign = -1 if features == "trigonometric" else 1
        iid = mp.exp(sign * t)
        variance = iid**2 - iid if features == "positive" else (iid - 1) ** 2 / 2
        for rows, cosine in blocks(num_features, dim, coupling, block):
            if rows > 1:
                c = conformity(dim, cosine, sign * t)
                if features != "positive":
                    c = (c + conformity(dim, (-cosine[0], cosine[1]), sign * t)) / 2
                variance += mpf(rows * (rows - 1)) / num_features * (c - iid)
        return variance


def ratio(distance, num_features, dim, coupling, features, block):
    t = mpf(float(distance)) ** 2
    iid = error(t, num_features, dim, "iid", features, block)
    return error(t, num_features, dim, coupling, features, block) / iid


def mse(x, y, num_features, coupling, features, kernel, block):
    """Returns the mean squared error for two vectors, which are lists of numbers."""
    x, y = [mpf(float(a)) for a in x], [mpf(float(b)) for b in y]
    with mp.workdps(DIGITS):
        norms = sum(a * a for a in x) + sum(b * b for b in y)
        sign = -1 if features == "trigonometric" else 1
        t = sum((a + sign * b) ** 2 for a, b in zip(x, y, strict=True))
        prefactor = {
            ("positive", "gaussian"): -2 * norms,
            ("positive", "softmax"): -norms,
            ("trigonometric", "gaussian"): 0,
            ("trigonometric", "softmax"): norms,
        }["trigonometric" if features == "trigonometric" else "positive", kernel]
        value = error(t, num_features, len(x), coupling, features, block)
        return mp.exp(prefactor) * value / num_features
