"""Figures of the experiment, which are Figs. 8 and 10 of the paper."""

from __future__ import annotations

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
    figure, axes = _grid(len(panels))
    for axis, (name, row) in zip(axes, panels.items(), strict=False):
        multiples = np.array(row["multiples"])
        for coupling in CURVES:
            look, label = style.STYLES[coupling], style.LABELS[coupling]
            _curve(axis, multiples, row[coupling], look | {"marker": "o", "markersize": 3}, label)
        axis.axhline(row["exact"], **style.STYLES["exact"], linewidth=1, label="exact kernel")
        axis.set_xscale("log")
        axis.set_xticks(multiples, [str(m) for m in multiples])
        axis.minorticks_off()
        axis.set_title(name, fontsize=10)
    _finish(figure, axes, len(panels), "number of features / d", "accuracy")
    return figure


def draw_search(results: dict[str, Any]) -> Figure:
    """Draws Fig. 10: validation accuracy by sigma."""
    figure, axes = _grid(len(results))
    for axis, (name, row) in zip(axes, results.items(), strict=False):
        sigmas = np.array(row["sigmas"])
        _curve(
            axis,
            sigmas,
            row["validation"]["iid"],
            style.STYLES["iid"] | {"linestyle": "-"},
            "IIDRFs",
        )
        axis.plot(
            sigmas, row["validation"]["exact"], color="black", linestyle=":", label="exact kernel"
        )
        axis.axvline(row["published"], color="0.5", linewidth=1, label="published sigma")
        axis.axvline(
            row["validation"]["best"], color="0.5", linewidth=1, linestyle="--", label="our maximum"
        )
        axis.set_xscale("log")
        axis.set_xticks([0.1, 0.3, 1, 2], ["0.1", "0.3", "1", "2"])
        axis.minorticks_off()
        axis.set_title(name, fontsize=10)
    _finish(figure, axes, len(results), "sigma", "validation accuracy")
    return figure


def _average(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean over data sets, with the standard error of independent trials."""
    mean: dict[str, Any] = {
        "multiples": rows[0]["multiples"],
        "exact": float(np.mean([row["exact"] for row in rows])),
    }
    for coupling in CURVES:
        points = zip(*(row[coupling] for row in rows), strict=True)
        mean[coupling] = [
            {
                "mean": float(np.mean([p["mean"] for p in point])),
                "standard_error": float(
                    np.sqrt(np.sum([p["standard_error"] ** 2 for p in point])) / len(point)
                ),
            }
            for point in points
        ]
    return mean


def _grid(panels: int) -> tuple[Figure, list[Axes]]:
    columns = min(3, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(2.9 * columns + 0.3, 2.3 * rows + 0.5), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _curve(
    axis: Axes, x: np.ndarray, points: list[dict[str, float]], look: dict[str, Any], label: str
) -> None:
    mean, spread = (np.array([p[k] for p in points]) for k in ("mean", "standard_error"))
    style.band(axis, x, mean - spread, mean + spread, color=look["color"])
    axis.plot(x, mean, **look, linewidth=1.3, label=label)


def _finish(figure: Figure, axes: list[Axes], panels: int, x_label: str, y_label: str) -> None:
    for axis in axes[panels:]:
        axis.remove()
    for axis in axes[:panels]:
        style.tidy(axis)
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
