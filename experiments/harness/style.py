"""Colors (colorblind-safe, Okabe and Ito) and line styles of the estimators in every figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

STYLES: dict[str, dict[str, Any]] = {
    "iid": {"color": "#009E73", "linestyle": ":"},
    "orthogonal": {"color": "#D55E00", "linestyle": "--"},
    "simplex": {"color": "#0072B2", "linestyle": "-"},
    "simplex_plus": {"color": "#CC79A7", "linestyle": (0, (3, 1, 1, 1))},
    "cross_polytope": {"color": "#E69F00", "linestyle": (0, (6, 1))},
    "exact": {"color": "#000000", "linestyle": "-."},
}
# The names of the paper.
LABELS = {
    "iid": "IIDRFs",
    "orthogonal": "ORFs",
    "simplex": "SimRFs",
    "simplex_plus": "SimRFs+",
}


def subplots(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, Any]:
    """Returns a figure of a size in inches, and its axes, one or an array of them."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def ticks(axes: Axes, places: Iterable[float], names: Iterable[object] | None = None) -> None:
    """Marks some places of the x axis and no other, by names or by their own numbers."""
    places = list(places)
    axes.set_xticks(places, [str(name) for name in (places if names is None else names)])
    axes.xaxis.minorticks_off()


def plain_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis with numbers such as 0.1, 0.2 and 0.5, not with powers of ten."""
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def legend(figure: Figure, axes: Axes, place: str, *, columns: int | None = None) -> None:
    """Names the lines of one panel, which all panels have, outside of them.

    Args:
      figure: The figure.
      axes: The panel.
      place: Place outside of the panels, such as ``"upper center"``.
      columns: Number of columns; None for a column for each line.
    """
    handles, labels = axes.get_legend_handles_labels()
    options: dict[str, Any] = {"loc": f"outside {place}", "ncols": columns or len(labels)}
    figure.legend(handles, labels, **options, frameon=False)


def curve(axes: Axes, x: ArrayLike, summaries: Iterable[Mapping[str, float]], **look: Any) -> None:
    """Draws means as a line, and their standard errors as a band around it; see ``band``."""
    mean, error = moments(summaries)
    band(axes, x, mean - error, mean + error, color=look["color"])
    axes.plot(x, mean, **look)


def dots(axes: Axes, x: ArrayLike, mean: ArrayLike, error: ArrayLike, **look: Any) -> None:
    """Draws means as dots, or as the look says, with their standard errors as bars."""
    bars: dict[str, Any] = {"fmt": "o", "markersize": 4, "capsize": 2, "linewidth": 1}
    axes.errorbar(x, mean, error, **(bars | look))


def moments(summaries: Iterable[Mapping[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means and the standard errors of summaries."""
    rows = np.array([[one["mean"], one["standard_error"]] for one in summaries])
    return rows[:, 0], rows[:, 1]


def tidy(axes: Axes) -> None:
    """Draws a faint grid, and removes the frame where there is no scale."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def band(axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, *, color: str) -> None:
    """Shades what lies between two curves."""
    axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
