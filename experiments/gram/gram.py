"""Gram-matrix experiment: config, trials, closed form, table and figure."""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from matplotlib.figure import Figure
from ml_collections import ConfigDict

import simrf_jax
from experiments.gram.configs import paper
from experiments.harness import config_fields, files, markdown, resumable, style, trials
from simrf_jax import theory
from simrf_jax._src.projections import Coupling
from simrf_jax._src.theory.arguments import ClosedFormCoupling

FIELDS = config_fields.types_of(paper.get_config())
COUPLINGS: tuple[Coupling, ...] = ("iid", "orthogonal", "simplex", "simplex_plus")
POINTS, TRIALS = range(2)  # Purposes of PRNG keys, which are folded in.


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    least = {"dim": 2, "multiples": 1, "num_trials": 2}
    values = config_fields.check_fields(config, FIELDS, least)
    config_fields.check_ascending(values, ["multiples"])
    # Hardly a point is then longer than 5, and |x + y| than 10, as in kernel_mse.
    config_fields.check_distances(values, ["scale"], most=5 / (config.dim**0.5 + 4))


def draw_points(config: ConfigDict) -> jax.Array:
    """Draws the data, ``[num_points, dim]``."""
    key = jax.random.fold_in(jax.random.key(config.seed), POINTS)
    return config.scale * jax.random.normal(key, (config.num_points, config.dim))


@functools.partial(jax.jit, static_argnums=(2, 3))
def squared_errors(
    keys: jax.Array, x: jax.Array, num_features: int, coupling: Coupling
) -> jax.Array:
    """Returns the mean squared error of the entries of the Gram matrix, for each key."""
    exact = simrf_jax.gaussian_kernel(x, x)

    def one(key: jax.Array) -> jax.Array:
        w = simrf_jax.draw_projection(key, num_features, x.shape[1], coupling=coupling)
        phi = simrf_jax.positive_features(x, w, kernel="gaussian")
        estimate = jnp.matmul(phi, phi.T, precision=jax.lax.Precision.HIGHEST)
        return jnp.mean(jnp.square(estimate - exact))

    return jax.vmap(one)(keys)


def expected_error(x: np.ndarray, num_features: int, coupling: ClosedFormCoupling) -> float:
    """Returns the closed form of the mean squared error, which includes the diagonal."""
    mse = theory.kernel_mse(x[:, None], x[None], num_features, coupling=coupling)
    return float(mse.mean())


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs all trials that ``workdir`` lacks, and writes results and the figure there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: for each coupling a list over the sizes of the mean error,
      its standard error and, where there is one, its closed form.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config)
    x = draw_points(config)
    sizes = [multiple * config.dim for multiple in config.multiples]
    results: dict[str, Any] = {"num_features": sizes, **{name: [] for name in COUPLINGS}}
    points = [*itertools.product(COUPLINGS, zip(config.multiples, sizes, strict=True))]
    for coupling, (multiple, size) in tqdm.tqdm(points, unit="curve point"):
        options = (x, size, coupling, max(2, config.num_trials // multiple), config)
        errors = pieces.get(f"{coupling}-{size}", _all_trials, *options)
        results[coupling].append(_summary(errors, np.asarray(x), size, coupling))
    return files.finish(workdir, results, lambda: {"gram": draw_figure(results, config.dim)})


def _all_trials(
    x: jax.Array, size: int, coupling: Coupling, num_trials: int, config: ConfigDict
) -> np.ndarray:
    # All couplings get the same keys, so that their draws are paired.
    key = jax.random.fold_in(jax.random.key(config.seed), TRIALS)
    keys = jax.random.split(key, num_trials)
    starts = list(range(config.batch_size, num_trials, config.batch_size))
    errors = [squared_errors(batch, x, size, coupling) for batch in jnp.split(keys, starts)]
    return np.concatenate([np.asarray(e, np.float64) for e in errors])


def _summary(errors: np.ndarray, x: np.ndarray, size: int, coupling: Coupling) -> dict[str, Any]:
    closed_form = None if coupling == "simplex_plus" else expected_error(x, size, coupling)
    return {**trials.summary(errors), "closed_form": closed_form}


def report(results: dict[str, Any]) -> str:
    """Returns the table of mean errors and their standard errors."""
    rows: list[list[object]] = []
    for number, size in enumerate(results["num_features"]):
        curve = [results[coupling][number] for coupling in COUPLINGS]
        rows.append([size, *(f"{row['mean']:.3e} ({row['standard_error']:.0e})" for row in curve)])
    return markdown.table(["features", *COUPLINGS], rows)


def draw_figure(results: dict[str, Any], dim: int) -> Figure:
    """Draws Fig. 7: the error by number of features, with closed forms as lines."""
    figure, axes = style.subplots(5, 3.8)
    multiples = np.array(results["num_features"]) / dim
    for coupling in COUPLINGS:
        rows, look = results[coupling], style.STYLES[coupling]
        dots = {"color": look["color"], "linestyle": "", "marker": "o", "markersize": 4}
        style.curve(axes, multiples, rows, **dots)
        line = [row["closed_form"] or row["mean"] for row in rows]
        axes.plot(multiples, line, **look, linewidth=1.2, label=style.LABELS[coupling])
    first = 2 ** np.floor(np.log2(multiples.min()))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    style.ticks(axes, [m for m in (1, 2, 4, 8, 16, 32, 64) if first <= m <= multiples.max()])
    axes.set(xlabel=f"number of features / d (d = {dim})", ylabel="mean squared error of an entry")
    axes.set_title("Gram matrix, positive features: dots trials, lines theory", fontsize=10)
    style.tidy(axes)
    axes.legend(frameon=False)
    return figure
