"""Fig. 6: mean squared errors of positive features relative to iid ones, in theory and trials."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tqdm
from matplotlib.figure import Figure
from ml_collections import ConfigDict
from scipy import special

from experiments.harness import markdown, resumable, style, trials
from simrf_jax import theory
from simrf_jax._src.projections import Coupling

COUPLINGS: tuple[Coupling, ...] = ("iid", "orthogonal", "simplex", "simplex_plus")
CURVE = np.geomspace(1e-3, 1e2, 501)  # Distances on the paper's axis.
ENOUGH = 0.9  # A marker is filled if the draws can see at least this share of the mean.


def visible_share(v: np.ndarray, num_draws: int, power: int) -> np.ndarray:
    r"""Returns the share of :math:`E\, e^{p g v}` from g below the largest of n normal draws.

    Weighted by :math:`e^{p g v}`, a standard normal number g has mean p v. So most of the
    expectation may come from numbers that are never drawn.

    Args:
      v: Distances, of any shape.
      num_draws: Number n of draws.
      power: Power p, which is 2 for a mean squared error and 4 for its standard error.

    Returns:
      :math:`\Phi(\Phi^{-1}(1 - 1/n) - p v)`, of the shape of v.

    Example:
      >>> visible_share(np.array([0.0, 1.0, 3.0]), 10**8, 2).round(2)
      array([1.  , 1.  , 0.35])
    """
    largest = -special.ndtri(1 / num_draws)
    return special.ndtr(largest - power * v)


def summary(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Returns the errors and ratios of each coupling at all distances, with closed forms."""
    dim, v = config.ratio.dim, np.array(config.ratio.distances)
    trial = functools.partial(trials.draw_errors, dim=dim, features="positive")
    drawn = (config.seed, config.ratio.num_trials, config.ratio.distances)
    errors = {  # From the same keys.
        coupling: pieces.get(f"ratio-{coupling}", trial, *drawn, coupling=coupling)
        for coupling in tqdm.tqdm(COUPLINGS, desc="ratio")
    }
    num_draws = config.ratio.num_trials * dim**2
    results: dict[str, Any] = {
        "dim": dim,
        "distances": list(v),
        "visible_share_of_mean": list(visible_share(v, num_draws, 2)),
        "visible_share_of_spread": list(visible_share(v, num_draws, 4)),
        "small_distance_limit": float(theory.small_distance_prefactor(dim)),
    }
    for coupling in COUPLINGS:
        results[coupling] = _compare(errors[coupling], errors["iid"], v, dim, coupling)
    return results


def _compare(
    errors: np.ndarray, iid_errors: np.ndarray, v: np.ndarray, dim: int, coupling: Coupling
) -> dict[str, list[float]]:
    mse, ratio = trials.mean(errors), trials.ratio(errors, iid_errors)
    results = {
        "mse": list(mse.value),
        "mse_standard_error": list(mse.standard_error),
        "ratio": list(ratio.value),
        "ratio_standard_error": list(ratio.standard_error),
    }
    if coupling == "simplex_plus":  # It has no closed form.
        return results
    x = v[:, None] / 2 * np.eye(1, dim)  # With y = x the kernel is 1.
    closed_mse = np.asarray(theory.kernel_mse(x, x, dim, coupling=coupling))
    closed_ratio = np.asarray(theory.mse_ratio(v, dim, dim, coupling=coupling))
    results["mse_closed_form"] = list(closed_mse)
    results["mse_z_score"] = list(mse.z_score(closed_mse))
    results["ratio_closed_form"] = list(closed_ratio)
    if coupling != "iid":
        results["ratio_z_score"] = list(ratio.z_score(closed_ratio))
    return results


def table(results: dict[str, Any]) -> str:
    """Returns the table of ratios: trials (standard error) / closed form."""
    rows: list[list[object]] = []
    for number, v in enumerate(results["distances"]):
        row: list[object] = [f"{v:g}"]
        for coupling in COUPLINGS[1:]:
            curve = results[coupling]
            cell = f"{curve['ratio'][number]:.4g} ({curve['ratio_standard_error'][number]:.1g})"
            if closed := curve.get("ratio_closed_form"):
                cell += f" / {closed[number]:.5g}"
            row.append(cell)
        row.append(_largest_z_score(results, number))
        row.append(f"{results['visible_share_of_mean'][number]:.0%}")
        row.append(f"{results['visible_share_of_spread'][number]:.0%}")
        rows.append(row)
    labels = [style.LABELS[coupling] for coupling in COUPLINGS[1:]]
    return markdown.table(["v", *labels, "z-score", "mean seen", "spread seen"], rows)


def _largest_z_score(results: dict[str, Any], number: int) -> str:
    scores = [
        abs(results[coupling][score][number])
        for coupling in COUPLINGS
        for score in ("mse_z_score", "ratio_z_score")
        if score in results[coupling]
    ]
    return f"{max(scores):.1f}"


def draw_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws closed forms as lines and trials as markers, open where draws miss part of the mean."""
    figure, axes = style.subplots(5, 3.8)
    dim, v = results["dim"], np.array(results["distances"])
    enough = np.array(results["visible_share_of_mean"]) >= ENOUGH
    for coupling in COUPLINGS:
        look = style.STYLES[coupling] | {"linewidth": 1.2, "label": style.LABELS[coupling]}
        if coupling == "simplex_plus":
            axes.plot(v[enough], np.array(results[coupling]["ratio"])[enough], **look)
        else:
            # IIDRFs are dots, through which ORFs show at small distances.
            order = 3 if coupling == "iid" else 2
            ratio = theory.mse_ratio(CURVE, dim, dim, coupling=coupling)
            axes.plot(CURVE, ratio, **look, zorder=order)
        if coupling != "iid":
            found = np.array([results[coupling][x] for x in ("ratio", "ratio_standard_error")])
            for seen, face in ((enough, look["color"]), (~enough, "white")):
                bars = {"color": look["color"], "markerfacecolor": face}
                style.dots(axes, v[seen], found[0, seen], found[1, seen], **bars)
    if not enough.all():
        unseen: dict[str, Any] = {"color": "gray", "markerfacecolor": "white"}
        axes.plot([], [], "o", markersize=4, **unseen, label="draws miss the tail")
    axes.set(xscale="log", yscale="log", xlim=(CURVE[0] * 0.8, CURVE[-1]), ylim=(1e-4, 2))
    axes.set(xlabel="v = |x + y|", ylabel="mean squared error / that of IIDRFs")
    axes.set_title(f"Positive features, d = m = {dim}: dots trials, lines theory", fontsize=10)
    style.tidy(axes)
    axes.legend(frameon=False, loc="lower right")
    return {"mse_ratio": figure}
