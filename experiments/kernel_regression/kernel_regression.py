"""Kernel-regression experiment (Tables 2 and 3, Figs. 8 and 10): config, trials and report."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import tqdm
from ml_collections import ConfigDict

from experiments.harness import config_fields, files, resumable
from experiments.harness.trials import summary
from experiments.kernel_regression import classify, figures, tables, uci
from experiments.kernel_regression.configs import paper
from simrf_jax._src.projections.hadamard import padded_dim

FIELDS = config_fields.types_of(paper.get_config())
PARTS = ("tables", "curves", "search")
METHODS = {
    "table_2": ("iid", "orthogonal", "simplex", "simplex_plus"),
    "table_3": ("iid", "orthogonal", "fast_orthogonal", "simplex", "fast_simplex"),
}


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    two = ("num_trials", "curve_trials", "search_trials", "num_sigmas")
    least = {"multiples": 1, **dict.fromkeys(two, 2)}
    values = config_fields.check_fields(config, FIELDS, least)
    config_fields.check_ascending(values, ["multiples"])
    config_fields.check_names("datasets", config.datasets, uci.SOURCES)
    config_fields.check_names("parts", config.parts, PARTS)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs all trials that ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: the mean accuracies of each part and data set with their
      standard errors, and the seconds that each part took.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config; or if a data set is missing and cannot be downloaded.
    """
    check(config)
    splits = {name: uci.load(name, config.data_dir) for name in config.datasets}
    pieces = resumable.Pieces(workdir, config, selection=("data_dir", "datasets", "parts"))
    runs = {"tables": _tables, "curves": _curves, "search": _search}
    results: dict[str, Any] = {"seconds": {}}
    for part in config.parts:
        with tqdm.tqdm(splits.items(), desc=part, unit="data set") as progress:
            results[part] = {
                name: runs[part](name, split, config, pieces) for name, split in progress
            }
        results["seconds"][part] = pieces.seconds(f"{part}*")
    return files.finish(workdir, results, lambda: figures.draw(results))


def report(results: dict[str, Any]) -> str:
    """Returns the paper's tables with our numbers, the paired tests, and the time of each part."""
    lines = [f"{part}: {seconds:.0f} seconds" for part, seconds in results["seconds"].items()]
    texts = {"tables": tables.all_tables, "curves": tables.gains, "search": tables.sigmas}
    for part, describe in texts.items():
        if part in results:
            lines = [describe(results[part]), *lines]
    return "\n\n".join(lines)


def _trials(
    config: ConfigDict,
    split: uci.Split,
    sigmas: float | np.ndarray,
    num_trials: int,
    num_features: int,
    dim: int,
    method: str,
) -> np.ndarray:
    """Returns accuracies, ``[*sigmas, trials]``; methods share keys, so that trials are paired."""
    keys = jax.random.split(jax.random.key(config.seed), num_trials)
    w = classify.draw(keys, num_features, dim, method)
    found = [classify.accuracies(w, split, float(sigma)) for sigma in np.atleast_1d(sigmas)]
    return np.stack(found).reshape(*np.shape(sigmas), num_trials)


def _tables(
    name: str, split: uci.Split, config: ConfigDict, pieces: resumable.Pieces
) -> dict[str, Any]:
    dim, sigma = split.train.shape[1], uci.SOURCES[name].sigma
    result: dict[str, Any] = {
        "mean_distance": classify.mean_distance(split, sigma),
        "exact": float(classify.exact_accuracies(split, np.array([sigma]))[0]),
        "num_train": len(split.train),
        "num_test": len(split.test),
        "dim": dim,
    }
    for table, methods in METHODS.items():
        size = padded_dim(dim) if table == "table_3" else dim
        options = (config, split, sigma, config.num_trials, size, size)
        of = {m: pieces.get(f"tables-{name}-{table}-{m}", _trials, *options, m) for m in methods}
        result[table] = {method: summary(values) for method, values in of.items()}
        pairs = tables.PAIRS[table]
        result[f"{table}_paired"] = {f"{a} - {b}": summary(of[a] - of[b]) for a, b in pairs}
    return result


def _curves(
    name: str, split: uci.Split, config: ConfigDict, pieces: resumable.Pieces
) -> dict[str, Any]:
    dim, sigma = split.train.shape[1], uci.SOURCES[name].sigma
    exact = classify.exact_accuracies(split, np.array([sigma]))
    result: dict[str, Any] = {"multiples": list(config.multiples), "exact": float(exact[0])}

    def trials(method: str, multiple: int) -> np.ndarray:
        options = (config, split, sigma, config.curve_trials, multiple * dim, dim, method)
        return pieces.get(f"curves-{name}-{method}-{multiple}", _trials, *options)

    of = {method: [trials(method, m) for m in config.multiples] for method in figures.CURVES}
    for method, points in of.items():
        result[method] = [summary(accuracies) for accuracies in points]
    pairs = zip(of["simplex"], of["orthogonal"], strict=True)
    return result | {"simplex - orthogonal": [summary(better - worse) for better, worse in pairs]}


def _search(
    name: str, split: uci.Split, config: ConfigDict, pieces: resumable.Pieces
) -> dict[str, Any]:
    """Returns accuracies by sigma, on held-out training rows and, as published, on the test set."""
    sigmas = np.geomspace(0.1, 2, config.num_sigmas)
    dim = split.train.shape[1]
    result: dict[str, Any] = {"sigmas": sigmas.tolist(), "published": uci.SOURCES[name].sigma}
    held_out = uci.load(name, config.data_dir, validation=True)
    for kind, rows in (("validation", held_out), ("test", split)):
        piece, size = f"search-{name}-{kind}", config.search_multiple * dim
        options = (config, rows, sigmas, config.search_trials, size, dim, "iid")
        curve = pieces.get(piece, _trials, *options)
        exact = pieces.get(f"{piece}-exact", classify.exact_accuracies, rows, sigmas)
        result[kind] = {
            "iid": [summary(points) for points in curve],
            "exact": exact.tolist(),
            "best": float(sigmas[curve.mean(axis=1).argmax()]),
            "best_exact": float(sigmas[exact.argmax()]),
        }
    return result
