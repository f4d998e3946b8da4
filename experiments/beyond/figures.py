"""Figures of the README."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import style
from simrf_jax import theory
from simrf_jax._src.theory.arguments import FEATURES

BLOCK_LABELS = {
    "orthogonal": "ORFs",
    "square": "SimRFs, Eq. 9 (square)",
    "regular": "SimRFs, regular blocks",
}
BLOCK_STYLES: dict[str, dict[str, Any]] = {
    "orthogonal": style.STYLES["orthogonal"],
    "square": {"color": "#56B4E9", "linestyle": ":"},
    "regular": style.STYLES["simplex"],
}
REACH_LABELS = {
    "iid": "positive, iid",
    "orthogonal": "positive, orthogonal",
    "simplex": "positive, simplex",
    "cross_polytope": "positive, paired cross-polytope",
    "simplex_best": "optimal positive, simplex",
    "cross_polytope_best": "optimal positive, antithetic cross-polytope",
}
REACH_STYLES: dict[str, dict[str, Any]] = {
    **{name: style.STYLES[name] for name in ("iid", "orthogonal", "simplex", "cross_polytope")},
    "simplex_best": style.STYLES["simplex"] | {"linestyle": ":"},
    "cross_polytope_best": style.STYLES["cross_polytope"] | {"linestyle": ":"},
}
RATIO = "mean squared error / that of IIDRFs"


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """Returns all figures by file name."""
    return {
        "blocks": draw_blocks(results["blocks"]),
        "simplex_plus": draw_plus(results["plus"]),
        "maps": draw_maps(results["maps"]),
        "reach": draw_reach(results["reach"]),
    }


def draw_blocks(blocks: dict[str, Any]) -> Figure:
    """Draws the errors of the row-block modes by number of features and by distance."""
    figure, (left, right) = style.subplots(9, 3.8, 1, 2)
    for name, look in BLOCK_STYLES.items():
        options = look | {"linewidth": 1.4, "label": BLOCK_LABELS[name]}
        left.plot(blocks["sizes"], blocks["against_size"][name], **options)
        right.plot(blocks["distances"], blocks["against_distance"][name], **options)
    dim = blocks["dim"]
    left.set(xlabel="number of features m", ylabel=RATIO, xscale="log", yscale="log")
    style.ticks(left, [2, 8, dim // 2, dim, 2 * dim, 4 * dim])
    left.set_title(f"d = {dim}, v = {blocks['distance']:g}", fontsize=10)
    right.set(xlabel="v = |x + y|", xscale="log", yscale="log")
    right.set_title(f"d = {dim}, m = {blocks['num_features']}", fontsize=10)
    for axes in (left, right):
        style.tidy(axes)
        style.plain_ticks(axes.yaxis)
    style.legend(figure, right, "lower center", columns=3)
    return figure


def draw_plus(plus: dict[str, Any]) -> Figure:
    """Draws the errors of SimRFs+ at small distances, with one panel for each dimension."""
    size = 3.1 * len(plus) + 0.5, 3.4
    figure, [panels] = style.subplots(*size, 1, len(plus), sharey=True, squeeze=False)
    for axes, (dim, row) in zip(panels, plus.items(), strict=True):
        v = np.array(row["distances"])
        grid = np.geomspace(v.min(), v.max(), 101)
        for coupling in ("simplex", "simplex_plus"):
            look = style.STYLES[coupling]
            mean, spread = (np.array(row[coupling + s]) for s in ("", "_standard_error"))
            line: tuple[Any, Any] = v, mean
            if coupling == "simplex":
                line = grid, theory.mse_ratio(grid, int(dim), int(dim), coupling="simplex")
            axes.plot(*line, **look, linewidth=1.3, label=style.LABELS[coupling])
            style.dots(axes, v, mean, spread, color=look["color"])
        axes.set(xscale="log", yscale="log", xlabel="v = |x + y|")
        axes.set_title(f"d = m = {dim}", fontsize=10)
        style.tidy(axes)
    panels[0].set_ylabel(RATIO)
    panels[0].legend(frameon=False, loc="lower right")
    return figure


def draw_maps(maps: dict[str, Any]) -> Figure:
    """Draws one row of panels for each dimension and one column for each feature map."""
    shape, size = (len(maps), len(FEATURES)), (3.1 * len(FEATURES) + 0.5, 2.6 * len(maps) + 0.4)
    figure, rows = style.subplots(*size, *shape, sharex=True, sharey="row", squeeze=False)
    for axes_row, (dim, row) in zip(rows, maps.items(), strict=True):
        for axes, features in zip(axes_row, FEATURES, strict=True):
            _draw_map(axes, row, features)
            axes.set_title(f"{features}, d = m = {dim}", fontsize=10)
    for axes, features in zip(rows[-1], FEATURES, strict=True):
        axes.set_xlabel("z = |x - y|" if features == "trigonometric" else "v = |x + y|")
    figure.supylabel(RATIO, fontsize=10)
    style.legend(figure, rows[0, 0], "lower center", columns=3)
    return figure


def _draw_map(axes: Axes, row: dict[str, Any], features: str) -> None:
    axes.axhline(1, **style.STYLES["iid"], linewidth=1.3, label=style.LABELS["iid"])
    for coupling, curve in row[features].items():
        look = style.STYLES[coupling] | {"linewidth": 1.4, "label": style.LABELS[coupling]}
        axes.plot(row["distances"], curve["ratio"], **look)
    axes.set(xscale="log", yscale="log")
    style.tidy(axes)
    style.plain_ticks(axes.yaxis)


def draw_reach(reach: dict[str, Any]) -> Figure:
    """Draws ratios and errors of an equal number of features up to the distances of real models."""
    figure, (left, right) = style.subplots(9, 3.8, 1, 2)
    v, iid = np.array(reach["distances"]), np.array(reach["errors"]["iid"])
    for name, look in REACH_STYLES.items():
        errors, options = np.array(reach["errors"][name]), look | {"linewidth": 1.4}
        left.plot(v, errors / iid, **options)
        right.plot(v, errors, **options, label=REACH_LABELS[name])
    for axes in (left, right):
        axes.axvspan(*reach["trained"], color="0.9", zorder=0)
        axes.set(xlabel="v = |x + y|", xlim=(0, v[-1]))
        style.tidy(axes)
    left.text(np.mean(reach["trained"]), 0.6, "layers of MiniLM", ha="center", fontsize=8)
    left.set(ylabel=RATIO, ylim=(0, 1.05))
    right.axhline(1, color="0.5", linewidth=0.8, zorder=0)
    right.text(0.1, 2, "as large as the kernel", fontsize=8)
    right.set(ylabel="relative mean squared error", yscale="log", ylim=(1e-7, 1e10))
    figure.suptitle(f"d = {reach['dim']}, {reach['num_features']} features", fontsize=10)
    style.legend(figure, right, "lower center", columns=3)
    return figure
