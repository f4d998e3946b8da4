"""The figures: time and memory against the dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np

from experiments import style
from experiments.complexity.tables import label


def draw_times(results: dict[str, Any]) -> matplotlib.figure.Figure:
    """Milliseconds to draw, to apply to one vector and to apply to the batch."""
    titles = {
        "draw": "draw W",
        "apply": "apply to one vector",
        "apply_batch": f"apply to {results['num_vectors']:,} vectors",
    }
    figure, panels = _panels(titles.values(), "ms (median, quartiles)")
    for axes, quantity in zip(panels, titles, strict=True):
        for name, points in results["curves"].items():
            low, median, high = np.array([point["ms"][quantity] for point in points]).T
            dims = [point["dim"] for point in points]
            axes.fill_between(dims, low, high, color=_look(name)["color"], alpha=0.2, linewidth=0)
            axes.plot(dims, median, **_look(name), label=label(name))
    _finish(figure, panels)
    return figure


def draw_memory(results: dict[str, Any]) -> matplotlib.figure.Figure:
    """KiB that projections hold, and that drawing and applying them takes."""
    titles = {"held": "held by W", "draw": "to draw W", "apply": "to apply to one vector"}
    figure, panels = _panels(titles.values(), "KiB")
    for axes, quantity in zip(panels, titles, strict=True):
        for name, points in results["curves"].items():
            kib = [point["bytes"][quantity] / 1024 for point in points]
            axes.plot([point["dim"] for point in points], kib, **_look(name), label=label(name))
    _finish(figure, panels)
    return figure


def _panels(
    titles: Iterable[str], quantity: str
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    titles = list(titles)
    figure = matplotlib.figure.Figure(figsize=(3.6 * len(titles), 3.8), layout="constrained")
    panels = list(figure.subplots(1, len(titles), sharex=True, sharey=True))
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set(xlabel="dimension d, and number of features")
    panels[0].set_ylabel(quantity)
    return figure, panels


def _look(name: str) -> dict[str, Any]:
    """The coupling's line; fast forms have hollow squares."""
    fast = name.startswith("fast_")
    marker = {"marker": "s", "markerfacecolor": "white"} if fast else {"marker": "o"}
    look = style.STYLES[name.removeprefix("fast_")]
    return {**look, **marker, "markersize": 4, "linewidth": 1.2}


def _finish(figure: matplotlib.figure.Figure, panels: list[matplotlib.axes.Axes]) -> None:
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        style.tidy(axes)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3.5)
