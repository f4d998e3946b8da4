"""Figures of the experiment, which are Figs. 8 and 10 of the paper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import style

CURVES = ("iid", "orthogonal", "simplex")


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws the figures of those parts that ran, by file name."""
    figures = {}
    if "curves" in results:
        figures["accuracy"] = draw_curves(results["curves"])
    if "search" in results:
        figures["sigma"] = draw_search(results["search"])
    return figures


def draw_curves(results: dict[str, Any]) -> Figure:
    """Draws Fig. 8: accuracy by number of features, for each data set and for their mean."""
    panels = dict(results)
    if len(results) > 1:
        panels["average"] = _average(list(results.values()))
    figure, axes = _grid(panels, "number of features / d", "accuracy")
    for axis, row in zip(axes, panels.values(), strict=True):
        multiples = row["multiples"]
        for coupling in CURVES:
            look = style.STYLES[coupling] | {"marker": "o", "markersize": 3, "linewidth": 1.3}
            style.curve(axis, multiples, row[coupling], **look, label=style.LABELS[coupling])
        axis.axhline(row["exact"], **style.STYLES["exact"], linewidth=1, label="exact kernel")
        axis.set_xscale("log")
        style.ticks(axis, multiples)
    style.legend(figure, axes[0], "upper center")
    return figure


def draw_search(results: dict[str, Any]) -> Figure:
    """Draws Fig. 10: validation accuracy by sigma."""
    figure, axes = _grid(results, "sigma", "validation accuracy")
    for axis, row in zip(axes, results.values(), strict=True):
        sigmas, found = row["sigmas"], row["validation"]
        # The wide line shows on both sides of the narrow one where they meet.
        axis.axvline(row["published"], color="0.8", linewidth=4, label="published sigma")
        axis.axvline(found["best"], color="0.4", linewidth=1, label="our maximum")
        style.curve(axis, sigmas, found["iid"], **style.STYLES["iid"], label=style.LABELS["iid"])
        axis.plot(sigmas, found["exact"], **style.STYLES["exact"], label="exact kernel")
        axis.set_xscale("log")
        style.ticks(axis, [0.1, 0.3, 1, 2])
    style.legend(figure, axes[0], "upper center")
    return figure


def _average(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean over data sets, with the standard error of independent trials."""

    def mean(points: tuple[dict[str, float], ...]) -> dict[str, float]:
        errors = np.array([point["standard_error"] for point in points])
        return {
            "mean": float(np.mean([point["mean"] for point in points])),
            "standard_error": float(np.linalg.norm(errors) / len(points)),
        }

    exact = float(np.mean([row["exact"] for row in rows]))
    of_couplings = {name: zip(*(row[name] for row in rows), strict=True) for name in CURVES}
    return {"multiples": rows[0]["multiples"], "exact": exact} | {
        name: [mean(point) for point in points] for name, points in of_couplings.items()
    }


def _grid(names: Iterable[str], x_label: str, y_label: str) -> tuple[Figure, list[Axes]]:
    """Returns a figure with a panel for each name."""
    names = list(names)
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    size = 2.9 * columns + 0.3, 2.3 * rows + 0.5
    figure, grid = style.subplots(*size, rows, columns, squeeze=False)
    for axis in grid.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(grid.flat, names, strict=False):
        axis.set_title(name, fontsize=10)
        style.tidy(axis)
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    return figure, list(grid.flat[: len(names)])
