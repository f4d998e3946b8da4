"""Tests of the example of Gaussian processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gaussian_process as gp
from tests.versions import enable_x64


@pytest.fixture(autouse=True)
def _in_float64():
    with enable_x64(True):
        yield


def small(rows=60):
    key = jax.random.key(0)
    x, y = gp.data(key, rows)
    scales = jnp.log(jnp.array([0.5, 0.8, 1.0, 5.0, 5.0, 5.0]))
    parameters = gp.Parameters(scales, jnp.zeros(()), jnp.log(0.05))
    return x, y, parameters, gp.draw(jax.random.key(1))


@pytest.mark.slow
def test_the_loss_has_the_gradient_of_the_marginal_likelihood():
    x, y, parameters, w = small()

    def likelihood(parameters):
        phi = gp.features(parameters, w, x)
        noise = jnp.exp(parameters.noise) * jnp.eye(len(x))
        covariance = jnp.exp(parameters.signal) * phi @ phi.T + noise
        square = y @ jnp.linalg.solve(covariance, y)
        return (square + jnp.linalg.slogdet(covariance)[1]) / (2 * len(x))

    found = jax.grad(gp.loss)(parameters, w, x, y)
    expected = jax.grad(likelihood)(parameters)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_the_posterior_is_that_of_the_kernel_of_features():
    x, y, parameters, w = small()
    at, _ = gp.data(jax.random.key(5), 20)
    law = gp.posterior(parameters, w, x, y, batch=25)
    mean, std = gp.predict(parameters, w, law, at)
    phi, phi_at = (gp.features(parameters, w, rows) for rows in (x, at))
    noisy = phi @ phi.T + jnp.exp(parameters.noise) * jnp.eye(len(x))
    solved = jnp.linalg.solve(noisy, phi @ phi_at.T)
    np.testing.assert_allclose(mean, y @ solved, atol=1e-8)
    variance = jnp.sum(phi_at**2, axis=1) - jnp.sum((phi @ phi_at.T) * solved, axis=0)
    np.testing.assert_allclose(std, jnp.sqrt(variance), rtol=1e-6)
    weights = gp.sample(jax.random.key(6), parameters, w, law, x, y, 4_000)
    values = weights @ phi_at.T
    np.testing.assert_allclose(values.mean(axis=0), mean, atol=5 * std.max() / 4_000**0.5)
    np.testing.assert_allclose(values.std(axis=0), std, rtol=0.08)


@pytest.mark.slow
def test_pathwise_samples_have_the_law_of_the_exact_process():
    x, y, parameters, w = small()
    at, _ = gp.data(jax.random.key(5), 20)
    mean, std = gp.exactly(parameters, x, y, at)
    values = gp.pathwise(jax.random.key(6), parameters, w, x, y, at, 4_000)
    assert np.sqrt(np.mean(((values.mean(axis=0) - mean) / std) ** 2)) < 0.1
    np.testing.assert_allclose(values.std(axis=0), std, rtol=0.2)


@pytest.mark.slow
def test_the_example_prints_and_draws(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gp, "fit", lambda key, x, y: small()[2])
    monkeypatch.setattr(gp.compare, "__defaults__", (200, 2))
    gp.main(["--rows", "3000", "--figure", str(tmp_path / "figure.png")])
    lines = capsys.readouterr().out.splitlines()
    assert "posterior of 3,000 rows" in lines[1]
    assert [line.split(":")[0].strip() for line in lines[3:]] == [*gp.COUPLINGS, "exact process"]
    assert (tmp_path / "figure.png").stat().st_size > 10_000
