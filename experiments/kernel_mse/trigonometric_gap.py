"""Eq. 26: the gap between iid and orthogonal trigonometric features, and where it is negative."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import matplotlib
import numpy as np
import tqdm
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy import optimize

from experiments.harness import markdown, resumable, style, trials
from simrf_jax import theory

GRID = np.linspace(0.002, 12, 6000)
# The gap is computed with errors of 1e-15, so the sign of a smaller value means nothing.
RESOLUTION = 1e-14
COUPLINGS = ("iid", "orthogonal")
DRAWN = (2, 3, 4, 6, 8, 16, 64)  # Dimensions in the figure; more would make it unreadable.
LINE_STYLES = ("-", "--", "-.", ":")


def gap(z: np.ndarray, dim: int) -> np.ndarray:
    """Returns the orthogonality gap for m = d, of the shape of z."""
    return np.asarray(theory.orthogonality_gap(z, dim, dim, features="trigonometric"))


def relative_gap(z: np.ndarray, dim: int) -> np.ndarray:
    """Returns the gap divided by the mean squared error of iid features, of the shape of z."""
    x = z[..., None] * np.eye(1, dim)[0]
    iid = theory.kernel_mse(x, 0 * x, dim, coupling="iid", features="trigonometric")
    return gap(z, dim) / iid


def sign_changes(dim: int) -> list[float]:
    """Finds the distances where the gap changes its sign, as far as float64 can tell.

    Example:
      >>> [round(z, 2) for z in sign_changes(6)]
      [2.96, 4.28]
    """
    values = gap(GRID, dim)
    resolved = np.abs(values) > RESOLUTION
    z, sign = GRID[resolved], np.sign(values[resolved])
    changes = np.flatnonzero(sign[1:] != sign[:-1])
    return [optimize.brentq(gap, z[i], z[i + 1], args=(dim,)) for i in changes]


def summary(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Returns sign changes and the largest loss of each dimension, and the trials."""
    dims = tqdm.tqdm(config.gap.trial_dims, desc="gap")
    return {
        "theory": [_signs(dim) for dim in config.gap.dims],
        "trials": [_compare(dim, config, pieces) for dim in dims],
    }


def _signs(dim: int) -> dict[str, Any]:
    roots, relative = sign_changes(dim), relative_gap(GRID, dim)
    worst = int(relative.argmin())
    resolved = np.abs(gap(GRID, dim)) > RESOLUTION
    return {
        "dim": dim,
        "sign_changes": roots,
        "largest_loss": -float(relative[worst]) if roots else None,
        "largest_loss_at": float(GRID[worst]) if roots else None,
        "resolved_up_to": float(GRID[resolved].max()),
    }


def _compare(dim: int, config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    z = np.array(config.gap.trial_distances)
    trial = functools.partial(trials.draw_errors, dim=dim, features="trigonometric")
    drawn = (config.seed, config.gap.num_trials, config.gap.trial_distances)
    iid, orthogonal = (  # From the same keys.
        pieces.get(f"gap-{dim}-{coupling}", trial, *drawn, coupling=coupling)
        for coupling in COUPLINGS
    )
    ratio, closed_form = trials.ratio(orthogonal, iid), relative_gap(z, dim)
    found = trials.Estimate(1 - ratio.value, ratio.standard_error)
    return {
        "dim": dim,
        "distances": list(z),
        "relative_gap": list(found.value),
        "standard_error": list(found.standard_error),
        "closed_form": list(closed_form),
        "z_score": list(found.z_score(closed_form)),
    }


def table(results: dict[str, Any]) -> str:
    """Returns the tables of sign changes and of trials."""
    signs: list[list[object]] = []
    for row in results["theory"]:
        changes = ", ".join(f"{z:.3f}" for z in row["sign_changes"])
        loss = f"{row['largest_loss']:.1e} at {row['largest_loss_at']:.2f}" if changes else "-"
        signs.append([row["dim"], changes or "none", loss, f"{row['resolved_up_to']:.2f}"])
    header = ["d", "sign changes at z", "largest loss / MSE of IIDRFs", "resolved up to z"]
    spots: list[list[object]] = []
    for row in results["trials"]:
        for i, z in enumerate(row["distances"]):
            found = f"{row['relative_gap'][i]:.5f} ({row['standard_error'][i]:.5f})"
            closed_form = f"{row['closed_form'][i]:.5f}"
            spots.append([row["dim"], f"{z:g}", found, closed_form, f"{row['z_score'][i]:+.1f}"])
    spots_header = ["d", "z", "gap / MSE of IIDRFs, trials", "closed form", "z-score"]
    tables = markdown.table(header, signs), markdown.table(spots_header, spots)
    return "\n\n".join(tables)


def draw_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws the whole relative gap, and the part near zero enlarged."""
    figure, (whole, close) = style.subplots(9, 3.8, 1, 2)
    for axes in (whole, close):
        _draw_gap(axes, results)
    whole.set_ylabel("gap, per cent of the error of IIDRFs")
    whole.legend(title="d = m", frameon=False)
    whole.set_title("Trigonometric features: dots trials, lines theory", fontsize=10)
    close.set(xlim=(2.5, 6), ylim=(-1.8, 2.5))
    close.set_title("The same about zero, below which ORFs lose", fontsize=10)
    return {"trigonometric_gap": figure}


def _draw_gap(axes: Axes, results: dict[str, Any]) -> None:
    dims = [row["dim"] for row in results["theory"] if row["dim"] in DRAWN]
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.8, len(dims)))
    color_of = dict(zip(dims, colors, strict=True))
    z = GRID[GRID <= 6]
    for (dim, color), line in zip(color_of.items(), itertools.cycle(LINE_STYLES), strict=False):
        look = {"color": color, "linestyle": line, "linewidth": 1.3, "label": str(dim)}
        axes.plot(z, 100 * relative_gap(z, dim), **look)
    for row in results["trials"]:
        found, error = (100 * np.array(row[name]) for name in ("relative_gap", "standard_error"))
        color = color_of.get(row["dim"], "black")
        style.dots(axes, row["distances"], found, error, color=color)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("z = |x - y|")
    style.tidy(axes)
