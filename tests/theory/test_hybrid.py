import numpy as np
import pytest

from simrf_jax.theory import hybrid_mse, kernel_mse
from tests.standard_errors import assert_mean

pytestmark = pytest.mark.fast


def pair_at(angle, radius, dim=3, other=None):
    x, y = np.zeros((2, dim))
    x[0] = radius
    y[:2] = (other or radius) * np.array([np.cos(angle), np.sin(angle)])
    return x, y


def draw(rng, coupling, count, rows, dim):
    """Draws the rows of one row block with a Haar rotation."""
    w = rng.normal(size=(count, dim, dim))
    if coupling == "iid":
        return w[:, :rows]
    q, r = np.linalg.qr(w)
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q[:, :rows] * np.sqrt(rng.chisquare(dim, (count, rows, 1)))


@pytest.mark.parametrize("coupling", ["iid", "orthogonal"])
@pytest.mark.parametrize("angle", [0.5, 2.0])
def test_is_the_error_of_drawn_estimates(coupling, angle):
    rng, m, n = np.random.default_rng(0), 3, 2
    x, y = pair_at(angle, 0.7, other=0.9)
    w = draw(rng, coupling, 60_000, m, 3)
    hyperbolic = np.exp(-(x @ x + y @ y) / 2) * np.cosh(w @ (x + y)).mean(axis=-1)
    w = draw(rng, coupling, 60_000, m, 3)
    trigonometric = np.exp((x @ x + y @ y) / 2) * np.cos(w @ (x - y)).mean(axis=-1)
    tau = rng.normal(size=(60_000, n, 3))
    weight = 0.5 - np.mean(np.sign(tau @ x) * np.sign(tau @ y), axis=-1) / 2
    estimate = weight * hyperbolic + (1 - weight) * trigonometric
    assert_mean(estimate, np.exp(x @ y))
    assert_mean((estimate - np.exp(x @ y)) ** 2, hybrid_mse(x, y, m, n, coupling=coupling))


@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
def test_relative_errors_of_the_bases_are_those_of_lemma_3_4(radius):
    m = 16
    for angle in [0.0, 0.4, 1.5, 3.0, np.pi]:
        s = 2 * radius**2 * np.sin(angle / 2) ** 2
        expected = np.exp(s) * (1 - np.exp(-2 * s)) / np.sqrt(2 * m)
        x, y = pair_at(angle, radius)
        trigonometric = kernel_mse(
            x, y, m, coupling="iid", features="trigonometric", kernel="softmax"
        )
        relative = np.sqrt(trigonometric) / np.exp(x @ y)
        np.testing.assert_allclose(relative, expected, rtol=1e-12, atol=1e-14)
        x, y = pair_at(np.pi - angle, radius)
        hyperbolic = kernel_mse(x, y, m, coupling="iid", features="hyperbolic", kernel="softmax")
        np.testing.assert_allclose(
            np.sqrt(hyperbolic) / np.exp(x @ y), expected, rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, {3: 0.85, 5: 1.10, 8: 1.39}),
        (2, {3: 0.71, 5: 0.90, 8: 1.13}),
        (8, {3: 0.48, 5: 0.57, 8: 0.69, 20: 1.03}),
    ],
)
def test_theorem_3_5_bounds_the_relative_error_of_short_vectors_alone(n, expected):
    m, delta = 16, np.geomspace(1e-4, np.pi - 1e-4, 2000)

    def log_ratio(radius):
        pairs = [pair_at(angle, radius) for angle in np.concatenate([delta, np.pi - delta])]
        x, y = np.swapaxes(np.array(pairs), 0, 1)
        log_error = hybrid_mse(x, y, m, n, coupling="iid", log=True) / 2 - np.sum(x * y, axis=-1)
        bound = (1 - np.exp(-4 * radius**2)) / np.sqrt(2 * m) / radius
        bound *= np.sqrt(1 / np.pi - 1 / (n * np.pi) + 1 / (n * np.sqrt(np.pi)))
        return log_error.max() - 2 * radius**2 - np.log(bound)

    for radius in (1.0, 1.5):
        assert log_ratio(radius) < 0
    for radius, ratio in expected.items():  # ERRATA.md has these numbers.
        assert np.exp(log_ratio(radius)) == pytest.approx(ratio, abs=5e-3)


@pytest.mark.parametrize("end", [0.0, np.pi])
def test_relative_error_at_either_end_is_that_of_theorem_3_5(end):
    radius, m, n, delta = 1.2, 16, 8, 1e-7
    x, y = pair_at(abs(end - delta), radius)
    relative = np.sqrt(hybrid_mse(x, y, m, n, coupling="iid")) / np.exp(x @ y)
    limit = np.exp(2 * radius**2) * (1 - np.exp(-4 * radius**2)) / np.sqrt(2 * np.pi * m * n)
    np.testing.assert_allclose(relative / np.sqrt(delta), limit, rtol=1e-6)


def test_both_ends_and_the_zero_vector():
    x = np.array([0.3, -1.0, 2.0])
    for y in (x, -x, 0 * x):
        got = hybrid_mse(x, y, 4, 3, coupling="simplex")
        if y.any():
            assert got == 0
            assert hybrid_mse(x, y, 4, 3, coupling="simplex", log=True) == -np.inf
        else:  # The weights are 1/2, with variance 1/(4n).
            bases = sum(
                kernel_mse(x, y, 4, coupling="simplex", features=f, kernel="softmax")
                for f in ("hyperbolic", "trigonometric")
            )
            np.testing.assert_allclose(got, (1 / 4 + 1 / 12) * bases, rtol=1e-14)
    assert hybrid_mse(0 * x, 0 * x, 4, 3, coupling="iid") == 0


def test_kernels_logarithm_shapes_and_nan():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 1, 3)), rng.normal(size=(6, 3))
    x[2, 0, 1] = np.nan
    got = hybrid_mse(x, y, 5, 2, coupling="orthogonal")
    assert got.shape == (4, 6)
    np.testing.assert_array_equal(np.isnan(got), np.arange(4)[:, None] == np.full(6, 2))
    log = hybrid_mse(x, y, 5, 2, coupling="orthogonal", log=True)
    np.testing.assert_allclose(np.exp(log), got, rtol=1e-14)
    gaussian = hybrid_mse(x, y, 5, 2, coupling="orthogonal", kernel="gaussian")
    norms = np.sum(x**2, axis=-1) + np.sum(y**2, axis=-1)
    np.testing.assert_allclose(gaussian, got * np.exp(-norms), rtol=1e-13)
    one = hybrid_mse(x[1, 0], y[3], 5, 2, coupling="orthogonal")
    assert isinstance(one, np.float64)
    np.testing.assert_allclose(one, got[1, 3], rtol=1e-14)
    far = hybrid_mse(30 * x[0], 30 * y, 5, 2, coupling="iid", log=True)
    assert np.all(np.isfinite(far))


@pytest.mark.parametrize(
    ("shape", "n", "options", "error", "match"),
    [
        ((3,), 0, {}, ValueError, "num_weights must be at least 1, got 0"),
        ((3,), 2.0, {}, TypeError, "num_weights must be an integer, got 2.0"),
        ((3,), 2, {"log": 1}, TypeError, "log must be True or False, got 1"),
        ((2,), 2, {}, ValueError, "x and y must be"),
        ((3,), 2, {"coupling": "simplex_plus"}, ValueError, "no closed form"),
        ((3,), 2, {"kernel": "laplace"}, ValueError, "kernel must be one of"),
    ],
)
def test_refuses(shape, n, options, error, match):
    with pytest.raises(error, match=match):
        hybrid_mse(np.ones(3), np.ones(shape), 4, n, **{"coupling": "iid", **options})
