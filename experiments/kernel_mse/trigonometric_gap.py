"""Eq. 26: by how much orthogonal trigonometric features beat iid ones, and where they do not."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import matplotlib
import matplotlib.figure
import ml_collections
import numpy as np
from scipy import optimize

from experiments import harness, style
from experiments.kernel_mse import trials
from experiments.kernel_mse.trials import Tasks
from simrf_jax import theory

GRID = np.linspace(0.002, 12, 6000)
# Below this the signs of a difference of numbers near 1e-15 and less mean nothing.
RESOLUTION = 1e-14
COUPLINGS = ("iid", "orthogonal")
DRAWN = (2, 3, 4, 6, 8, 16, 64)  # Of the dimensions; more would be a thicket.
LINE_STYLES = ("-", "--", "-.", ":")


def tasks(config: ml_collections.ConfigDict) -> Tasks:
    """Trials for each dimension and coupling, from the same keys."""
    options = config.gap
    return {
        f"gap-{dim}-{coupling}": functools.partial(
            trials.draw_errors,
            config.seed,
            options.num_trials,
            options.trial_distances,
            dim=dim,
            coupling=coupling,
            features="trigonometric",
        )
        for dim in options.trial_dims
        for coupling in COUPLINGS
    }


def gap(z: np.ndarray, dim: int) -> np.ndarray:
    """The orthogonality gap with as many features as dimensions; of the shape of z."""
    return np.asarray(theory.orthogonality_gap(z, dim, dim, features="trigonometric"))


def relative_gap(z: np.ndarray, dim: int) -> np.ndarray:
    """The gap relative to the mean squared error of iid features, of the shape of z."""
    x = z[..., None] * np.eye(1, dim)[0]
    iid = theory.kernel_mse(x, 0 * x, dim, coupling="iid", features="trigonometric")
    return gap(z, dim) / iid


def sign_changes(dim: int) -> list[float]:
    """Where the gap changes its sign, in ascending order, as far as float64 can tell.

    Example:
      >>> [round(z, 2) for z in sign_changes(6)]
      [2.96, 4.28]
    """
    values = gap(GRID, dim)
    resolved = np.abs(values) > RESOLUTION
    z, sign = GRID[resolved], np.sign(values[resolved])
    changes = np.flatnonzero(sign[1:] != sign[:-1])
    return [optimize.brentq(gap, z[i], z[i + 1], args=(dim,)) for i in changes]


def summary(config: ml_collections.ConfigDict, pieces: dict[str, np.ndarray]) -> dict[str, Any]:
    """Sign changes and the largest loss in each dimension, and the trials of a few."""
    results: dict[str, Any] = {"theory": [], "trials": []}
    for dim in config.gap.dims:
        roots = sign_changes(dim)
        relative = relative_gap(GRID, dim)
        worst = int(relative.argmin())
        results["theory"].append(
            {
                "dim": dim,
                "sign_changes": roots,
                "largest_loss": -float(relative[worst]) if roots else None,
                "largest_loss_at": float(GRID[worst]) if roots else None,
                "resolved_up_to": float(GRID[np.abs(gap(GRID, dim)) > RESOLUTION].max()),
            }
        )
    z = np.array(config.gap.trial_distances)
    for dim in config.gap.trial_dims:
        iid, orthogonal = (pieces[f"gap-{dim}-{coupling}"] for coupling in COUPLINGS)
        ratio = trials.ratio(orthogonal, iid)
        found = trials.Estimate(1 - ratio.value, ratio.standard_error)
        closed = relative_gap(z, dim)
        results["trials"].append(
            {
                "dim": dim,
                "distances": list(z),
                "relative_gap": list(found.value),
                "standard_error": list(found.standard_error),
                "closed_form": list(closed),
                "z_score": list(found.z_score(closed)),
            }
        )
    return results


def table(results: dict[str, Any]) -> str:
    """The sign changes of every dimension, and the trials."""
    signs: list[list[object]] = [
        [
            row["dim"],
            ", ".join(f"{z:.3f}" for z in row["sign_changes"]) or "none",
            f"{row['largest_loss']:.1e} at {row['largest_loss_at']:.2f}"
            if row["sign_changes"]
            else "-",
            f"{row['resolved_up_to']:.2f}",
        ]
        for row in results["theory"]
    ]
    header = ["d", "sign changes at z", "largest loss / MSE of IIDRFs", "resolved up to z"]
    spots: list[list[object]] = [
        [
            row["dim"],
            f"{z:g}",
            f"{row['relative_gap'][i]:.5f} ({row['standard_error'][i]:.5f})",
            f"{row['closed_form'][i]:.5f}",
            f"{row['z_score'][i]:+.1f}",
        ]
        for row in results["trials"]
        for i, z in enumerate(row["distances"])
    ]
    spots_header = ["d", "z", "gap / MSE of IIDRFs, trials", "closed form", "z-score"]
    return "\n\n".join(
        (harness.markdown_table(header, signs), harness.markdown_table(spots_header, spots))
    )


def draw_figures(results: dict[str, Any]) -> dict[str, matplotlib.figure.Figure]:
    """The relative gap whole, and enlarged about zero."""
    figure = matplotlib.figure.Figure(figsize=(9, 3.8), layout="constrained")
    whole, close = figure.subplots(1, 2)
    dims = [row["dim"] for row in results["theory"] if row["dim"] in DRAWN]
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(dims)))
    color_of = dict(zip(dims, colors, strict=True))
    z = GRID[GRID <= 6]
    for axes in (whole, close):
        for (dim, color), line in zip(color_of.items(), itertools.cycle(LINE_STYLES), strict=False):
            gap_in_per_cent = 100 * relative_gap(z, dim)
            axes.plot(z, gap_in_per_cent, color=color, linestyle=line, linewidth=1.3, label=dim)
        for row in results["trials"]:
            color = color_of.get(row["dim"], "black")
            found, error = (100 * np.array(row[k]) for k in ("relative_gap", "standard_error"))
            axes.errorbar(
                row["distances"], found, error, fmt="o", color=color, markersize=4, capsize=2
            )
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xlabel("z = |x - y|")
        style.tidy(axes)
    whole.set_ylabel("gap, per cent of the error of IIDRFs")
    whole.legend(title="d = m", frameon=False)
    whole.set_title("Trigonometric features: dots trials, lines theory", fontsize=10)
    close.set(xlim=(2.5, 6), ylim=(-1.8, 2.5))
    close.set_title("The same about zero, below which ORFs lose", fontsize=10)
    return {"trigonometric_gap": figure}
