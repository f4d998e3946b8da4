"""Gaussian-process regression in linear time: predictions of diabetes with error bars.

A Bayesian linear model of random features is a Gaussian process whose kernel is their product.
``BayesianRidge`` finds the noise and the size of the signal by maximum likelihood, as
``GaussianProcessRegressor`` does, in time linear in the number of training rows.

Run: python -m examples.sklearn_gaussian_process
"""

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from simrf_jax.integrations.sklearn import RandomFeatures

GAMMA = 0.02  # The columns are standardized.


def data():
    """Returns rows and targets to fit on and to judge by, all standardized."""
    rows, targets = load_diabetes(return_X_y=True)
    parts = train_test_split(rows, targets[:, None], test_size=0.3, random_state=0)
    scaled = []
    for train, test in (parts[:2], parts[2:]):
        scaler = StandardScaler().fit(train)
        scaled += [scaler.transform(train), scaler.transform(test)]
    train, test, train_targets, test_targets = scaled
    return train, test, train_targets[:, 0], test_targets[:, 0]


def fit(train, targets, size):
    """Returns a Gaussian process of random features."""
    features = RandomFeatures(size, gamma=GAMMA, random_state=0)
    return make_pipeline(features, BayesianRidge(fit_intercept=False)).fit(train, targets)


def predict(model, rows):
    """Returns the mean and the standard deviation of each target, with its noise."""
    return model.predict(rows, return_std=True)


def predict_exactly(model, train, targets, rows):
    """Returns the same of the exact Gaussian process with the noise and the signal of the model."""
    regression = model[-1]
    signal, noise = 1 / regression.lambda_, 1 / regression.alpha_
    kernel = ConstantKernel(signal, "fixed") * RBF((2 * GAMMA) ** -0.5, "fixed")
    exact = GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(train, targets)
    mean, std = exact.predict(rows, return_std=True)
    return mean, np.sqrt(std**2 + noise)


def main():
    train, test, targets, test_targets = data()
    for size in (32, 128, 512):
        model = fit(train, targets, size)
        mean, std = predict(model, test)
        exact_mean, exact_std = predict_exactly(model, train, targets, test)
        inside = np.mean(np.abs(test_targets - mean) < 1.96 * std)
        rmse = np.sqrt(np.mean((test_targets - mean) ** 2))
        off = np.abs(mean - exact_mean).max(), np.abs(std / exact_std - 1).max()
        print(
            f"{size:>4} features: RMSE {rmse:.3f}, 95 % intervals hold {inside:.0%}, "
            f"off the exact process by {off[0]:.3f} in the mean, {off[1]:.1%} in the error bars"
        )


if __name__ == "__main__":
    main()
