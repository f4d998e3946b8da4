"""Other kernels in scikit-learn: couplings, quasi-Monte Carlo features and ``Nystroem``.

The data sets, splits and judgments are those of ``benchmarks.sklearn_features``, with five trials
and 128 features. The length scale is that of ``gamma="scale"`` for every kernel. Quasi-Monte Carlo
features have scrambled Sobol points in the place of independent random numbers. The program prints
tables over all data sets, and with --all those of each.

Run: SIMRF_DATA_DIR=DIR python -m benchmarks.sklearn_kernels
Without SIMRF_DATA_DIR, the UCI data sets are downloaded.
"""

import itertools
import time
from typing import Any

import numpy as np
from scipy import special
from scipy.stats import qmc
from sklearn.gaussian_process.kernels import RBF, Matern, RationalQuadratic
from sklearn.kernel_approximation import Nystroem

from benchmarks import command_line
from benchmarks.sklearn_features import (
    CHOSEN,
    DATASETS,
    Split,
    accuracy,
    load_all,
    mean_and_error,
    split,
)
from experiments.harness import markdown
from simrf_jax import kernels
from simrf_jax._src.projections.norms import log_norm_of_normal
from simrf_jax.integrations.sklearn import RandomFeatures

TRIALS = 5
# Kernels of the transformer by name, ours and those of scikit-learn.
KERNELS: dict[str, tuple[kernels.ScaleMixture, Any]] = {
    "rbf": (kernels.Gaussian(), RBF()),
    "matern": (kernels.Matern(1.5), Matern(nu=1.5)),
    "laplace": (kernels.Matern(0.5), Matern(nu=0.5)),
    "rational_quadratic": (kernels.RationalQuadratic(1.0), RationalQuadratic()),
}
# Couplings and laws of norms of RandomFeatures, the default last.
COUPLINGS = {
    "iid": ("iid", "chi"),
    "orthogonal": ("orthogonal", "chi"),
    "simplex": ("simplex", "chi"),
    "cross-polytope": ("cross_polytope", "chi"),
    "iid, stratified norms": ("iid", "stratified"),
    "orthogonal, antithetic norms": ("orthogonal", "antithetic"),
    "orthogonal, stratified norms": ("orthogonal", "stratified"),
}
OTHERS = ("quasi-Monte Carlo", "Nystroem")
METHODS = (*COUPLINGS, *OTHERS)


class QuasiMonteCarlo:
    """Sines and cosines of rows that scrambled Sobol points make, one coordinate for the norm."""

    def __init__(self, kernel: kernels.ScaleMixture, scale: float, seed: int) -> None:
        self._kernel, self._scale, self._seed = kernel, scale, seed

    def fit(self, rows: np.ndarray) -> "QuasiMonteCarlo":
        """Draws the rows of W."""
        dim, self._mean = rows.shape[1], rows.mean(axis=0)
        is_gaussian = self._kernel == kernels.Gaussian()
        points = qmc.Sobol(dim + (not is_gaussian), seed=self._seed).random(CHOSEN // 2)
        normal = special.ndtri(points)
        self._rows = normal[:, :dim]
        if not is_gaussian:
            norms = np.exp(log_norm_of_normal(self._kernel, dim)(normal[:, dim]))
            self._rows *= (norms / np.linalg.norm(self._rows, axis=1))[:, None]
        return self

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Returns the features of each row."""
        angles = (rows - self._mean) / self._scale @ self._rows.T
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1) / len(self._rows) ** 0.5


def transformer(method: str, kernel: str, scale: float, seed: int) -> Any:
    """Returns a transformer that has not been fitted."""
    ours, of_sklearn = KERNELS[kernel]
    if method == "Nystroem":
        # scikit-learn's kernels are objects with a length scale of their own.
        kernel_of_rows = of_sklearn.clone_with_theta(of_sklearn.theta)
        kernel_of_rows.set_params(length_scale=scale)
        return Nystroem(kernel_of_rows, n_components=CHOSEN, random_state=seed)
    if method == "quasi-Monte Carlo":
        return QuasiMonteCarlo(ours, scale, seed)
    coupling, norms = COUPLINGS[method]
    options = {"coupling": coupling, "norms": norms, "random_state": seed}
    return RandomFeatures(CHOSEN, kernel=kernel, length_scale=scale, **options)


def judge(method: str, kernel: str, data: Split, seed: int) -> tuple[float, float, float]:
    """Returns Gram error, accuracy, and seconds to fit 1,000 rows and transform 500 others."""
    scale = (2 * data.gamma) ** -0.5
    one = transformer(method, kernel, scale, seed)
    one.fit(data.train).transform(data.test)  # Compiles.
    start = time.perf_counter()
    phi = one.fit(data.train).transform(data.test)
    seconds = time.perf_counter() - start
    exact = KERNELS[kernel][1](data.test / scale)
    error = np.linalg.norm(phi @ phi.T - exact) / np.linalg.norm(exact)
    return error, accuracy(one, data), seconds


def table(results: np.ndarray, kernel: int, names: tuple[str, ...]) -> str:
    """Returns the errors and the accuracies of one kernel for each data set."""
    rows = [
        [name, *(f"{error:.3f}, {score:.3f}" for error, score, _ in of_data)]
        for name, of_data in zip(names, results[kernel].mean(axis=1), strict=True)
    ]
    return markdown.table(["data set", *METHODS], rows)


def summary(results: np.ndarray, what: int) -> str:
    """Returns a table over all data sets: errors relative to iid rows, accuracies, or seconds."""
    rows = []
    for kernel, of_kernel in zip(KERNELS, results[..., what], strict=True):
        if what == 0:
            logs = np.log(of_kernel / of_kernel[..., :1]).mean(axis=0)
            means, errors = np.exp(logs.mean(axis=0)), logs.std(axis=0, ddof=1) / TRIALS**0.5
            cells = [f"{m:.3f} ({m * e:.3f})" for m, e in zip(means, errors, strict=True)]
        elif what == 1:
            trials = of_kernel.mean(axis=0)
            cells = ["{:.4f} ({:.4f})".format(*mean_and_error(each)) for each in trials.T]
        else:
            cells = [f"{1e3 * np.median(each):.1f}" for each in np.moveaxis(of_kernel, -1, 0)]
        rows.append([kernel, *cells])
    return markdown.table(["kernel", *METHODS], rows)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="also print a table for each kernel")
    options = parser.parse_args()
    shape = (len(KERNELS), len(DATASETS), TRIALS, len(METHODS), 3)
    results = np.empty(shape)
    every = load_all(parser)
    runs = [*itertools.product(enumerate(DATASETS), range(TRIALS))]
    for (place, name), seed in command_line.bar(runs, "splits"):
        data = split(*every[name], seed)
        for i, kernel in enumerate(KERNELS):
            for j, method in enumerate(METHODS):
                results[i, place, seed, j] = judge(method, kernel, data, seed)
    if options.all:
        for i, kernel in enumerate(KERNELS):
            print(f"\n{kernel}, Gram error and accuracy:\n\n{table(results, i, DATASETS)}")
    titles = (
        "Gram error relative to that of iid rows",
        "Mean accuracy over the data sets",
        "Milliseconds to fit 1,000 rows and transform 500, median",
    )
    for what, title in enumerate(titles):
        print(f"\n{title}:\n\n{summary(results, what)}")


if __name__ == "__main__":
    main()
