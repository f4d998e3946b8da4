"""Kernel approximation in scikit-learn: ``RandomFeatures``, ``RBFSampler`` and ``Nystroem``.

The data are eight UCI data sets and scikit-learn's digits, with standardized columns. Each trial
splits a data set anew, fits on up to 1,000 rows and is judged on up to 500 others: by the relative
Frobenius error of their Gram matrix, and by the accuracy of a ridge classifier of the features. All
methods have the same splits, and gamma is that of ``gamma="scale"``. The program prints tables with
standard errors over the trials, and draws benchmarks/figures/sklearn_features.png.

Run: SIMRF_DATA_DIR=DIR python -m benchmarks.sklearn_features
Without SIMRF_DATA_DIR, the UCI data sets are downloaded.
"""

import argparse
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import RidgeClassifier
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks import command_line
from experiments.harness import markdown, mistakes, style
from experiments.kernel_regression import uci
from simrf_jax.integrations.sklearn import RandomFeatures

DATASETS = ("digits", *uci.SOURCES)
DRAWN = ("digits", "nursery", "wifi", "chess")  # Data sets of the figure.
SIZES = (16, 32, 64, 128, 256, 512)
CHOSEN = 128  # Size in the tables that have one size.
TRIALS, NUM_TRAIN, NUM_TEST = 20, 1000, 500
ALPHA = 0.1  # Penalty of the ridge classifier.
METHODS: dict[str, Callable[..., Any]] = {
    "RandomFeatures": RandomFeatures,
    "RBFSampler": RBFSampler,
    "Nystroem": Nystroem,
}
# Options of RandomFeatures in the last table, the defaults first.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"feature_map": "trigonometric", "coupling": "orthogonal", "norms": "stratified"},
    {"feature_map": "trigonometric", "coupling": "orthogonal", "norms": "chi"},
    {"feature_map": "trigonometric", "coupling": "iid", "norms": "chi"},
    {"feature_map": "phase", "coupling": "orthogonal", "norms": "stratified"},
    {"feature_map": "hyperbolic", "coupling": "orthogonal", "norms": "chi"},
    {"feature_map": "positive", "coupling": "simplex", "norms": "chi"},
    {"feature_map": "positive", "coupling": "orthogonal", "norms": "chi"},
    {"feature_map": "positive", "coupling": "iid", "norms": "chi"},
    {"feature_map": "positive", "coupling": "simplex", "norms": "chi", "center": False},
)
# Random features look as their couplings do.
LOOKS: dict[str, dict[str, Any]] = {
    "RandomFeatures": style.STYLES["orthogonal"],
    "RBFSampler": style.STYLES["iid"],
    "Nystroem": {"color": "#56B4E9", "linestyle": "-"},
}
FIGURE = pathlib.Path(__file__).parent / "figures" / "sklearn_features.png"


class Split(NamedTuple):
    """Standardized rows and their classes, to fit on and to judge by, and the kernel of the latter.

    Attributes:
      offset: Means that were subtracted from the columns, in units of their standard deviations.
    """

    train: np.ndarray
    test: np.ndarray
    train_labels: np.ndarray
    test_labels: np.ndarray
    gamma: float
    kernel: np.ndarray
    offset: np.ndarray

    def with_offset(self) -> "Split":
        """Returns the rows that are scaled only, which have the same kernel."""
        return self._replace(train=self.train + self.offset, test=self.test + self.offset)


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows and the classes of a data set."""
    return load_digits(return_X_y=True) if name == "digits" else uci.read(name)


def load_all(parser: argparse.ArgumentParser) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns all data sets; if one is missing, the program ends with a line that says so."""
    try:
        return {name: load(name) for name in DATASETS}
    except mistakes.UserError as mistake:
        parser.exit(1, f"{mistake}\n")


def split(rows: np.ndarray, labels: np.ndarray, seed: int) -> Split:
    """Splits a data set at random, and standardizes its columns by the training rows."""
    num_test = min(NUM_TEST, len(rows) - NUM_TRAIN)
    train, test, *classes = train_test_split(
        rows, labels, train_size=NUM_TRAIN, test_size=num_test, random_state=seed
    )
    scaler = StandardScaler().fit(train)
    train, test = scaler.transform(train), scaler.transform(test)
    gamma = 1 / (train.shape[1] * train.var())
    kernel = rbf_kernel(test, gamma=gamma)
    return Split(train, test, *classes, gamma, kernel, scaler.mean_ / scaler.scale_)


def gram_error(transformer: Any, data: Split) -> float:
    """Fits a transformer, and returns the relative error of the Gram matrix of the test rows."""
    phi = transformer.fit(data.train).transform(data.test)
    return np.linalg.norm(phi @ phi.T - data.kernel) / np.linalg.norm(data.kernel)


def seconds(transformer: Any, data: Split) -> float:
    """Returns the time to fit the training rows and to transform both, programs being compiled."""
    start = time.perf_counter()
    transformer.fit(data.train).transform(data.train)
    transformer.transform(data.test)
    return time.perf_counter() - start


def accuracy(fitted: Any, data: Split) -> float:
    """Returns the accuracy of a ridge classifier of the features of a fitted transformer."""
    classifier = RidgeClassifier(ALPHA).fit(fitted.transform(data.train), data.train_labels)
    return classifier.score(fitted.transform(data.test), data.test_labels)


def measure(splits: list[Split], sizes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Returns ``[sizes, trials, 3]`` for each method: errors, accuracies and seconds.

    The entry ``exact`` has the accuracies of the kernel itself, ``[trials]``.
    """
    results = {}
    runs = [*itertools.product(METHODS, range(len(sizes)), range(len(splits)))]
    for name, row, seed in command_line.bar(runs, "fits"):
        data = splits[seed]
        transformer = METHODS[name](n_components=sizes[row], gamma=data.gamma, random_state=seed)
        of_method = results.setdefault(name, np.empty((len(sizes), len(splits), 3)))
        judged = gram_error(transformer, data), accuracy(transformer, data)
        of_method[row, seed] = *judged, seconds(transformer, data)
    # Nystroem's features of all training rows are those of the kernel itself.
    results["exact"] = np.array(
        [
            accuracy(Nystroem(gamma=data.gamma, n_components=len(data.train)).fit(data.train), data)
            for data in splits
        ]
    )
    return results


def mean_and_error(samples: np.ndarray) -> tuple[float, float]:
    return np.mean(samples), np.std(samples, ddof=1) / len(samples) ** 0.5


def ratio_of_errors(results: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the log ratio of the errors of RandomFeatures and RBFSampler, ``[sizes, trials]``."""
    return np.log(results["RandomFeatures"][..., 0] / results["RBFSampler"][..., 0])


def table_of_ratios(results: dict[str, dict[str, np.ndarray]], sizes: tuple[int, ...]) -> str:
    """Returns the Gram errors relative to those of RBFSampler, geometric means over the trials."""
    rows, least = [], {}
    for name, of_data in results.items():
        summary = [mean_and_error(trials) for trials in ratio_of_errors(of_data)]
        cells = [f"{np.exp(mean):.3f} ({np.exp(mean) * error:.3f})" for mean, error in summary]
        least[name] = min(-mean / error for mean, error in summary)
        rows.append([name, *cells])
    below = [name for name, z in least.items() if z > 0]
    text = (
        f"RandomFeatures are below RBFSampler at every size on {len(below)} of {len(results)} data "
        f"sets, by at least {min(least[name] for name in below):.1f} standard errors."
        if below
        else "RandomFeatures are not below RBFSampler at every size on any data set."
    )
    return f"{markdown.table(['data set', *map(str, sizes)], rows)}\n\n{text}"


def table_of_methods(results: dict[str, dict[str, np.ndarray]], row: int) -> str:
    """Returns errors, accuracies and medians of milliseconds at one size."""
    header = [f"{name}, {what}" for what in ("error", "accuracy") for name in METHODS]
    header = [*header, "exact, accuracy", *(f"{name}, ms" for name in METHODS)]
    rows = []
    for name, of_data in results.items():
        cells = [
            "{:.3f} ({:.3f})".format(*mean_and_error(of_data[method][row, :, column]))
            for column in range(2)
            for method in METHODS
        ]
        cells.append("{:.3f} ({:.3f})".format(*mean_and_error(of_data["exact"])))
        times = [f"{1e3 * np.median(of_data[method][row, :, 2]):.1f}" for method in METHODS]
        rows.append([name, *cells, *times])
    return markdown.table(["data set", *header], rows)


def table_of_options(splits: dict[str, list[Split]]) -> str:
    """Returns the Gram errors of feature maps and couplings, geometric means over the trials.

    The rows are not centered beforehand.
    """
    rows = []
    for options in command_line.bar(OPTIONS, "options"):
        cells = []
        for of_data in splits.values():
            errors = [
                gram_error(RandomFeatures(CHOSEN, gamma=d.gamma, random_state=seed, **options), d)
                for seed, d in enumerate(each.with_offset() for each in of_data)
            ]
            mean, error = mean_and_error(np.log(errors))
            cells.append(f"{np.exp(mean):.3f} ({np.exp(mean) * error:.3f})")
        center = "no" if options.get("center") is False else "yes"
        names = [options[name] for name in ("feature_map", "coupling", "norms")]
        rows.append([*names, center, *cells])
    return markdown.table(["feature map", "coupling", "norms", "centered", *splits], rows)


def draw_figure(
    results: dict[str, dict[str, np.ndarray]], sizes: tuple[int, ...], path: pathlib.Path
) -> None:
    """Draws errors above accuracies, a column for each data set."""
    figure, panels = plt.subplots(
        2,
        len(results),
        figsize=(2.7 * len(results) + 0.3, 5.2),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for column, (name, of_data) in enumerate(results.items()):
        for axes, what in zip(panels[:, column], range(2), strict=True):
            for method, look in LOOKS.items():
                trials = of_data[method][..., what]
                mean, error = np.transpose([mean_and_error(row) for row in trials])
                axes.plot(sizes, mean, label=method, **look)
                style.band(axes, sizes, mean - error, mean + error, color=look["color"])
            style.tidy(axes)
        panels[0, column].set_title(name, fontsize=10)
        panels[0, column].set_yscale("log")
        style.plain_ticks(panels[0, column].yaxis)
        panels[1, column].axhline(of_data["exact"].mean(), **style.STYLES["exact"], label="exact")
        panels[1, column].set_xscale("log", base=2)
        panels[1, column].set_xticks(sizes, [str(size) for size in sizes])
    panels[0, 0].set_ylabel("relative error of the Gram matrix")
    panels[1, 0].set_ylabel("accuracy")
    figure.supxlabel("n_components", fontsize=10)
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = command_line.parser(__doc__)
    parser.parse_args()
    data, splits, results = load_all(parser), {}, {}
    for name, (rows, labels) in command_line.bar(data.items(), "data sets"):
        splits[name] = [split(rows, labels, seed) for seed in range(TRIALS)]
        results[name] = measure(splits[name], SIZES)
    print("Gram error relative to RBFSampler by n_components:\n")
    print(table_of_ratios(results, SIZES))
    print(f"\nAt n_components = {CHOSEN}:\n")
    print(table_of_methods(results, SIZES.index(CHOSEN)))
    print(f"\nGram error of other options, at n_components = {CHOSEN}:\n")
    print(table_of_options({name: splits[name] for name in DRAWN}))
    draw_figure({name: results[name] for name in DRAWN}, SIZES, FIGURE)


if __name__ == "__main__":
    main()
