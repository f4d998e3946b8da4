"""Gaussian processes of random features: 10^5 rows, hyperparameters by gradient, pathwise samples.

With a prior f(x) = phi(x) . w, w ~ N(0, signal I), the kernel is signal phi(x) . phi(y), which for
trigonometric features estimates a Matérn kernel. Marginal likelihood and posterior then need the
matrix of all products of features, ``[features, features]``, and not that of all rows.

- ``fit`` maximizes the marginal likelihood by optax: signal, noise, one length scale a column.
- ``posterior`` has the weights of all rows in time O(rows features^2), ``predict`` means and
  standard deviations, and ``sample`` draws functions by Matheron's rule.
- ``pathwise`` draws functions whose prior is made of features and whose update is exact
  (Wilson et al., Efficiently Sampling Functions from Gaussian Process Posteriors, ICML 2020).

Run: python -m examples.gaussian_process [--rows 100000] [--figure FILE]
"""

import argparse
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from simrf_jax import draw_projection, trigonometric_features
from simrf_jax.kernels import Matern

KERNEL = Matern(1.5)
DIM, NUM_ROWS_OF_W = 6, 256  # Sines and cosines are twice as many features.
COUPLINGS = {
    "iid": ("iid", "chi"),
    "orthogonal": ("orthogonal", "chi"),
    "simplex": ("simplex", "chi"),
    "orthogonal, stratified norms": ("orthogonal", "stratified"),
}


class Parameters(NamedTuple):
    """Logarithms of the hyperparameters."""

    length_scale: jax.Array  # One for each column.
    signal: jax.Array
    noise: jax.Array


class Posterior(NamedTuple):
    """Law of the weights of the features."""

    mean: jax.Array
    covariance: jax.Array


def data(key, rows):
    """Returns rows in a cube and noisy values of a function of the first three columns."""
    one, two = jax.random.split(key)
    x = jax.random.uniform(one, (rows, DIM), minval=-1.0, maxval=1.0)
    f = jnp.sin(4 * x[:, 0]) + jnp.abs(x[:, 1]) + 0.5 * jnp.cos(3 * x[:, 2] * x[:, 0])
    return x, f - 0.7 + 0.1 * jax.random.normal(two, (rows,))


def draw(key, coupling="orthogonal", norms="stratified", dim=DIM):
    return draw_projection(
        key, NUM_ROWS_OF_W, dim, coupling=coupling, norms=norms, dtype=float, kernel=KERNEL
    )


def features(parameters, w, x):
    scale = jnp.exp(parameters.length_scale)
    return trigonometric_features(x, w, kernel=KERNEL, length_scale=scale)


def products(parameters, w, x, y):
    """Returns the matrix of products of features, and their products with the targets."""
    phi = features(parameters, w, x)
    return phi.T @ phi, phi.T @ y


def of_weights(parameters, gram, dots):
    """Returns the law of the weights, from the products of features."""
    signal, noise = jnp.exp(parameters.signal), jnp.exp(parameters.noise)
    precision = gram / noise + jnp.eye(len(gram)) / signal
    covariance = jax.scipy.linalg.cho_solve(
        jax.scipy.linalg.cho_factor(precision), jnp.eye(len(gram))
    )
    return Posterior(covariance @ dots / noise, covariance)


@jax.jit
def loss(parameters, w, x, y):
    """Returns a function whose gradient is that of the negative log marginal likelihood per row.

    The likelihood is the minimum over weights of a square, and a determinant. At the minimum the
    weights may be held fixed, and the derivative of log |A| is the trace of A^-1 dA.
    """
    signal, noise = jnp.exp(parameters.signal), jnp.exp(parameters.noise)
    gram, dots = products(parameters, w, x, y)
    mean, covariance = jax.lax.stop_gradient(of_weights(parameters, gram, dots))
    squares = y @ y - 2 * mean @ dots + mean @ gram @ mean
    precision = gram / noise + jnp.eye(len(gram)) / signal
    log_determinant = jnp.sum(covariance * precision)
    log_determinant += len(gram) * parameters.signal + len(y) * parameters.noise
    return (squares / noise + mean @ mean / signal + log_determinant) / (2 * len(y))


def fit(key, x, y, steps=150):
    """Returns hyperparameters after some steps of Adam, each with another W."""
    parameters = Parameters(jnp.zeros(x.shape[1]), jnp.zeros(()), jnp.log(0.1))
    optimizer = optax.adam(0.05)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, key):
        w = draw(key, dim=x.shape[1])
        updates, state = optimizer.update(jax.grad(loss)(parameters, w, x, y), state)
        return optax.apply_updates(parameters, updates), state

    for each in jax.random.split(key, steps):
        parameters, state = step(parameters, state, each)
    return parameters


def posterior(parameters, w, x, y, batch=10_000):
    """Returns the law of the weights, from batches of rows."""
    gram, dots = 0.0, 0.0
    summed = jax.jit(products)
    for start in range(0, len(x), batch):
        one, other = summed(parameters, w, x[start : start + batch], y[start : start + batch])
        gram, dots = gram + one, dots + other
    return jax.jit(of_weights)(parameters, gram, dots)


def predict(parameters, w, law, x):
    """Returns the mean and the standard deviation of f at some rows."""
    phi = features(parameters, w, x)
    return phi @ law.mean, jnp.sqrt(jnp.sum((phi @ law.covariance) * phi, axis=1))


def sample(key, parameters, w, law, x, y, num_samples):
    """Draws functions, as weights ``[num_samples, features]``, by Matheron's rule."""
    one, two = jax.random.split(key)
    phi, noise = features(parameters, w, x), jnp.exp(parameters.noise)
    prior = jnp.exp(parameters.signal / 2) * jax.random.normal(one, (num_samples, phi.shape[1]))
    targets = prior @ phi.T + noise**0.5 * jax.random.normal(two, (num_samples, len(y)))
    return prior + (y[None] - targets) @ phi @ law.covariance / noise


def gram(parameters, x, y):
    """Returns the kernel of all pairs, exactly."""
    scale = jnp.exp(parameters.length_scale)
    return jnp.exp(parameters.signal) * KERNEL(x, y, length_scale=scale)


def exactly(parameters, x, y, at):
    """Returns mean and standard deviation of f by the exact process, in time O(rows^3)."""
    noisy = gram(parameters, x, x) + jnp.exp(parameters.noise) * jnp.eye(len(x))
    factor, cross = jax.scipy.linalg.cho_factor(noisy, lower=True), gram(parameters, x, at)
    solved = jax.scipy.linalg.cho_solve(factor, cross)
    variance = jnp.exp(parameters.signal) - jnp.sum(cross * solved, axis=0)
    return y @ solved, jnp.sqrt(jnp.maximum(variance, 0))


def pathwise(key, parameters, w, x, y, at, num_samples):
    """Draws values of functions at some rows, ``[num_samples, rows]``, with an exact update."""
    one, two = jax.random.split(key)
    weights = jax.random.normal(one, (num_samples, 2 * len(w)))
    weights *= jnp.exp(parameters.signal / 2)
    noise = jnp.exp(parameters.noise)
    targets = weights @ features(parameters, w, x).T
    targets += noise**0.5 * jax.random.normal(two, targets.shape)
    factor = jax.scipy.linalg.cho_factor(gram(parameters, x, x) + noise * jnp.eye(len(x)))
    update = jax.scipy.linalg.cho_solve(factor, (y[None] - targets).T)
    return weights @ features(parameters, w, at).T + (gram(parameters, at, x) @ update).T


def compare(parameters, key, rows=2_000, num_draws=5):
    """Yields for each coupling how far the posterior of features is from the exact one.

    Each is a mean over draws of W: root mean squares of the difference of means, in units of the
    exact standard deviation, and of the relative differences of standard deviations, that of the
    features and that of 256 pathwise samples; the share of
    new targets within 95 % intervals; and seconds, of features without those of pathwise samples.
    """
    x, y = data(jax.random.fold_in(key, 0), rows)
    at, targets = data(jax.random.fold_in(key, 1), 500)
    noise = jnp.exp(parameters.noise)

    def timed(function):
        jax.block_until_ready(function())  # Compiles.
        start = time.perf_counter()
        return jax.block_until_ready(function()), time.perf_counter() - start

    (mean, std), of_exact = timed(lambda: exactly(parameters, x, y, at))

    def coverage(mean, std):
        return float(jnp.mean(jnp.abs(targets - mean) < 1.96 * jnp.sqrt(std**2 + noise)))

    for name, (coupling, norms) in COUPLINGS.items():
        found = []
        for each in jax.random.split(jax.random.fold_in(key, 2), num_draws):
            w = draw(each, coupling, norms)

            def from_features(w=w):
                return predict(parameters, w, posterior(parameters, w, x, y), at)

            (own_mean, own_std), seconds = timed(from_features)
            paths = pathwise(each, parameters, w, x, y, at, 256)
            off = [(own_mean - mean) / std, own_std / std - 1, paths.std(axis=0) / std - 1]
            rms = [float(jnp.sqrt(jnp.mean(jnp.square(each)))) for each in off]
            found.append([*rms, coverage(own_mean, own_std), seconds])
        yield name, np.mean(found, axis=0)
    yield "exact process", np.array([0.0, 0.0, 0.0, coverage(mean, std), of_exact])


def draw_figure(path):
    """Draws samples and bands of the exact process and of features, for one column."""
    x = jnp.sort(jax.random.uniform(jax.random.key(3), (12, 1), minval=-1.0, maxval=0.6), axis=0)
    y = jnp.sin(4 * x[:, 0])
    at = jnp.linspace(-1.3, 1.3, 400)[:, None]
    parameters = Parameters(jnp.log(jnp.array([0.4])), jnp.zeros(()), jnp.log(0.01))
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    mean, std = exactly(parameters, x, y, at)
    w = draw(jax.random.key(0), dim=1)
    law = posterior(parameters, w, x, y)
    own_mean, own_std = predict(parameters, w, law, at)
    weights = sample(jax.random.key(1), parameters, w, law, x, y, 4)
    samples = (
        pathwise(jax.random.key(1), parameters, w, x, y, at, 4),
        weights @ features(parameters, w, at).T,
    )
    titles = ("exact process, pathwise samples", f"{2 * NUM_ROWS_OF_W} features, their samples")
    bands = ((mean, std), (own_mean, own_std))
    for axes, title, (center, width), paths in zip(panels, titles, bands, samples, strict=True):
        axes.fill_between(
            at[:, 0], center - 2 * width, center + 2 * width, color="#0072B2", alpha=0.2
        )
        axes.plot(at[:, 0], center, color="#0072B2", label="mean, and two standard deviations")
        lines = axes.plot(at[:, 0], paths.T, color="#D55E00", linewidth=0.8)
        lines[0].set_label("samples")
        axes.plot(x[:, 0], y, "o", color="black", markersize=4, label="observations")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("x")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=160)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--figure", help="file to draw samples and bands to")
    options = parser.parse_args(arguments)
    if options.rows < 1:
        parser.error(f"--rows must be at least 1, got {options.rows}.")
    jax.config.update("jax_enable_x64", True)
    x, y = data(jax.random.key(0), options.rows)
    start = time.perf_counter()
    parameters = fit(jax.random.key(1), x[:4_000], y[:4_000])
    scales = ", ".join(f"{scale:.2f}" for scale in jnp.exp(parameters.length_scale))
    seconds = time.perf_counter() - start
    print(f"length scales {scales}; noise {jnp.exp(parameters.noise / 2):.3f}; {seconds:.0f} s")
    start = time.perf_counter()
    w = draw(jax.random.key(2))
    law = jax.block_until_ready(posterior(parameters, w, x, y))
    seconds = time.perf_counter() - start
    at, targets = data(jax.random.key(3), 2_000)
    mean, _ = predict(parameters, w, law, at)
    rmse = jnp.sqrt(jnp.mean((targets - mean) ** 2))
    print(f"posterior of {len(x):,} rows in {seconds:.1f} s, RMSE {rmse:.4f}, noise is 0.1")
    print("at 2,000 rows, differences from the exact process:")
    for name, numbers in compare(parameters, jax.random.key(4)):
        of_mean, of_std, of_paths, inside, seconds = numbers
        print(
            f"  {name}: mean {of_mean:.3f} standard deviations, standard deviation {of_std:.0%}, "
            f"that of pathwise samples {of_paths:.0%}, 95 % intervals hold {inside:.1%}, "
            f"{seconds:.2f} s"
        )
    if options.figure:
        draw_figure(options.figure)


if __name__ == "__main__":
    main()
