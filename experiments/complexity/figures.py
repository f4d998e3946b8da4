"""Figures of time and memory by dimension, with the paper's orders of growth."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.complexity.measure import FAST
from experiments.complexity.tables import label
from experiments.harness import style

# Look of curves that all couplings share.
MATRIX = {"color": "#000000", "linestyle": "-", "linewidth": 1.2, "marker": "o", "markersize": 4}
# Expected orders of growth, of regular and of fast forms.
ORDERS: dict[str, Any] = {
    "draw": (("$d^3$", lambda d: d**3), ("$d\\,\\log d$", lambda d: d * np.log(d))),
    "apply": (("$d^2$", lambda d: d**2), ("$d\\,\\log d$", lambda d: d * np.log(d))),
    "bytes": (("$d^2$", lambda d: d**2), ("$d$", lambda d: d)),
}
TICKS = (64, 1024, 16384, 262144)


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """Returns all figures by file name."""
    return {"time": draw_times(results), "memory": draw_memory(results)}


def draw_times(results: dict[str, Any]) -> Figure:
    """Draws the milliseconds to draw W, to apply it to one vector and to apply it to a batch."""
    titles = {"draw": "draw W", "apply": "apply W to one vector"}
    titles["apply_batch"] = f"apply W to {results['num_vectors']:,} vectors"
    return _figure(results["curves"], "ms", titles, "ms (median)")


def draw_memory(results: dict[str, Any]) -> Figure:
    """Draws the KiB that drawing a projection takes and that the projection holds."""
    titles = {"draw": "buffers to draw W", "held": "held by W"}
    return _figure(results["curves"], "bytes", titles, "KiB")


def _figure(curves: dict[str, Any], measure: str, titles: dict[str, str], y_label: str) -> Figure:
    """Draws one panel for each quantity; all matrices share one curve where they are applied."""
    figure, panels = style.subplots(
        2 + 3 * len(titles), 3.8, 1, len(titles), sharex=True, sharey=True
    )
    panels[0].set_ylabel(y_label)
    lines: dict[str, Any] = {}
    for axes, (quantity, title) in zip(panels, titles.items(), strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("d, and number of features")
        for name, points in curves.items():
            one_of_all = quantity != "draw" and name not in FAST
            if not one_of_all or name == "simplex":
                look = MATRIX if one_of_all else _look(name)
                what = "any matrix W" if one_of_all else label(name)
                dims = [point["dim"] for point in points]
                [lines[what]] = axes.plot(dims, _values(points, measure, quantity), **look)
        _orders(axes, curves, measure, quantity)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([tick for tick in TICKS if tick <= points[-1]["dim"]])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.minorticks_off()
        style.tidy(axes)
    figure.legend(
        lines.values(), lines.keys(), loc="outside right center", frameon=False, handlelength=3.5
    )
    return figure


def _values(points: list[Any], measure: str, quantity: str) -> np.ndarray:
    """Returns medians of milliseconds, or KiB, for each dimension."""
    values = np.array([point[measure][quantity] for point in points], float)
    return values[:, 1] if measure == "ms" else values / 1024


def _orders(axes: Axes, curves: dict[str, Any], measure: str, what: str) -> None:
    """Draws gray lines of the expected slopes, above the regular and below the fast curves."""
    orders = ORDERS["bytes" if measure == "bytes" else what.removesuffix("_batch")]
    places: Any = (
        ("simplex_plus", 3, -1, (-3, 1), "right"),
        ("fast_simplex", 0.3, 0, (0, -12), "left"),
    )
    for (name, factor, end, offset, side), (text, order) in zip(places, orders, strict=True):
        dims = np.array([point["dim"] for point in curves[name]][-4:], float)
        last = _values(curves[name], measure, what)[-1]
        line = factor * last * order(dims) / order(dims[-1])
        axes.plot(dims, line, color="0.55", linewidth=1)
        here: dict[str, Any] = {"textcoords": "offset points", "color": "0.35", "fontsize": 9}
        axes.annotate(text, (dims[end], line[end]), offset, ha=side, **here)


def _look(name: str) -> dict[str, Any]:
    """Returns the look of a method: the coupling's line, with hollow squares for fast forms.

    Costs are often equal. So ORFs are wide and pale beneath SimRFs, IIDRFs are crosses on top, and
    squares have room for a dot.
    """
    coupling = name.removeprefix("fast_")
    look = style.STYLES[coupling] | {"linewidth": 1.2, "marker": "o", "markersize": 3.5}
    if coupling != name:
        look |= {"marker": "s", "markersize": 6, "markerfacecolor": "none"}
    if coupling == "orthogonal":
        look |= {"linestyle": "-", "linewidth": 6, "alpha": 0.35, "markersize": 9}
    if coupling == "iid":
        look |= {"marker": "x", "markersize": 5, "zorder": 3}
    return look
