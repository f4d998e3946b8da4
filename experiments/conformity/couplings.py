"""Figs. 2 and 3: draws of the couplings in two and three dimensions."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import matplotlib.patches
import matplotlib.patheffects
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

import simrf_jax
from experiments.harness import style
from simrf_jax._src.projections import Coupling

COUPLINGS: tuple[Coupling, ...] = ("iid", "orthogonal", "simplex")
NUM_DRAWS = 500  # Draws from which Fig. 3 takes the one with the most typical norms.
NUM_CHOICES = 300  # Draws from which Fig. 2 takes the clearest one, which is bold.
NUM_FAINT = 12  # Faint draws behind the bold one.
LIMIT = 2.5  # Both axes go from -LIMIT to LIMIT.
ARC = 0.8  # Radius of the arcs that show angles.


def draw(key: jax.Array, dim: int, coupling: Coupling) -> np.ndarray:
    """Draws d rows in 3 coordinates, ``[NUM_DRAWS, dim, 3]``; the third is 0 for d = 2."""
    keys = jax.random.split(jax.random.fold_in(key, dim), NUM_DRAWS)
    one = functools.partial(simrf_jax.draw_projection, num_features=dim, dim=dim, coupling=coupling)
    w = np.asarray(jax.vmap(one)(keys), np.float64)
    return np.pad(w, [(0, 0), (0, 0), (0, 3 - dim)])


def angles(rows: np.ndarray) -> list[float]:
    """Returns the angles between all pairs of rows, in degrees."""
    s = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    cosines = [a @ b for a, b in itertools.combinations(s, 2)]
    return np.degrees(np.arccos(np.clip(cosines, -1, 1))).tolist()


def arc(a: np.ndarray, b: np.ndarray, num_points: int = 41) -> np.ndarray:
    """Returns points ``[num_points, 3]`` of the unit circle, from a's direction to b's."""
    a = a / np.linalg.norm(a)
    # QR finds a perpendicular direction even for antiparallel vectors.
    side = np.linalg.qr(np.stack([a, b], axis=1))[0][:, 1]
    side *= np.copysign(1, side @ b)
    t = np.linspace(0, np.arctan2(side @ b, a @ b), num_points)[:, None]
    return np.cos(t) * a + np.sin(t) * side


def label_place(points: np.ndarray) -> np.ndarray:
    """Returns the place of an arc's label on the page, just outside the middle of the arc."""
    middle = points[len(points) // 2, :2]
    return middle * (1 + 0.5 / np.linalg.norm(middle))


def clearest(draws: np.ndarray) -> int:
    """Returns the index of the draw whose tips and labels lie farthest apart on the page.

    The page is the plane of the first two coordinates. Only draws that fit on it count, and only
    the half of the draws that points out of it most.
    """
    height = draws[..., 2].max(axis=1)
    fits = np.linalg.norm(draws[..., :2], axis=-1).max(axis=1) < LIMIT

    def least_distance(rows: np.ndarray) -> float:
        labels = [label_place(ARC * arc(a, b, 3)) for a, b in itertools.combinations(rows, 2)]
        marks = [np.zeros(2), *rows[:, :2], *labels]
        return min(float(np.linalg.norm(p - q)) for p, q in itertools.combinations(marks, 2))

    distances = np.array([least_distance(rows) for rows in draws])
    return int(np.argmax(distances * fits * (height >= np.median(height))))


def typical(norms: np.ndarray) -> int:
    """Returns the index of the draw of norms ``[num_draws, d]`` nearest to the quantiles of chi."""
    num_rows = norms.shape[1]
    quantiles = stats.chi(num_rows).ppf((np.arange(num_rows) + 1) / (num_rows + 1))
    return int(np.argmin(np.abs(np.sort(norms) - quantiles).max(axis=1)))


def in_their_plane(rows: np.ndarray) -> np.ndarray:
    """Returns coplanar rows ``[m, 3]`` in coordinates of their plane, with the longest upwards."""
    plane = np.linalg.svd(rows)[2][:2]
    page = rows @ plane.T
    x, y = page[np.argmax(np.linalg.norm(page, axis=1))]
    turned = page @ np.array([[y, x], [-x, y]]) / np.hypot(x, y)
    return np.pad(turned, [(0, 0), (0, 1)])


def draw_arrow(axes: Axes, row: np.ndarray, color: str) -> None:
    """Draws an arrow from the origin: thick if it leaves the page, dotted if it goes into it."""
    into = row[2] < -1e-6
    width = 1.6 if into else 2 + 0.5 * row[2]
    order = 3 + row[2] / 10
    x, y = row[:2]
    line: dict[str, Any] = {"color": color, "linewidth": width, "linestyle": ":" if into else "-"}
    axes.plot([0, 0.94 * x], [0, 0.94 * y], **line, zorder=order)
    arrow = f"-|>,head_width={0.15 + width / 12},head_length={0.3 + width / 6}"
    head: dict[str, Any] = {"arrowstyle": arrow, "color": color, "linewidth": 0.5}
    head |= {"shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (x, y), (0.94 * x, 0.94 * y), arrowprops=head, zorder=order)


def draw_rows(axes: Axes, rows: np.ndarray, color: str) -> None:
    """Draws an arrow for each row, and an arc with the angle for each pair."""
    axes.add_patch(matplotlib.patches.Circle((0, 0), ARC, color="0.94", zorder=0.5))
    for row in rows:
        draw_arrow(axes, row, color)
    for (a, b), angle in zip(itertools.combinations(rows, 2), angles(rows), strict=True):
        points = ARC * arc(a, b)
        axes.plot(points[:, 0], points[:, 1], color="0.25", linewidth=0.9, zorder=2)
        x, y = label_place(points)
        clear = [matplotlib.patheffects.withStroke(linewidth=3, foreground="white")]
        look: dict[str, Any] = {"fontsize": 9, "path_effects": clear}
        axes.text(x, y, f"{angle:.0f}°", ha="center", va="center", **look)
    axes.set(aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def draw_figure(key: jax.Array) -> Figure:
    """Draws Figs. 2 and 3: rows for d = 2 and 3, and below them SimRFs and SimRFs+."""
    figure = Figure(figsize=(7, 7.6), layout="constrained")
    above, below = figure.subfigures(2, squeeze=False, height_ratios=[2, 1.15])[:, 0]
    above.suptitle("Geometrical couplings for small d", fontsize=11)
    grid = above.subplots(2, 3)
    for panel, (dim, coupling) in zip(grid.flat, itertools.product((2, 3), COUPLINGS), strict=True):
        draws, color = draw(key, dim, coupling), style.STYLES[coupling]["color"]
        choices, others = draws[:NUM_CHOICES], draws[NUM_CHOICES:]
        if coupling == "iid":
            # Show an acute angle, which the other couplings never have.
            choices = choices[[min(angles(rows)) < 65 for rows in choices]]
        for x, y, _ in others[:NUM_FAINT].reshape(-1, 3):
            panel.plot([0, x], [0, y], color=color, alpha=0.2, linewidth=0.8, zorder=1)
        draw_rows(panel, choices[clearest(choices)], color)
        panel.set(xlim=(-LIMIT, LIMIT), ylim=(-LIMIT, LIMIT))
    for panel, coupling in zip(grid[0], COUPLINGS, strict=True):
        panel.set_title(style.LABELS[coupling], fontsize=10)
    for panel, dim in zip(grid[:, 0], (2, 3), strict=True):
        panel.set_ylabel(f"d = {dim}", fontsize=10)
    caption = f"bold: one draw, dotted where it goes into the page; faint: {NUM_FAINT} more draws"
    above.supxlabel(caption, fontsize=8)
    draw_weights(below, key)
    return figure


def draw_weights(figure: matplotlib.figure.SubFigure, key: jax.Array) -> None:
    """Draws Fig. 3: SimRFs and SimRFs+ with the same norms, in the plane of the rows."""
    figure.suptitle("Random vectors with bigger norms subtend bigger angles (d = 3)", fontsize=11)
    draws = {coupling: draw(key, 3, coupling) for coupling in ("simplex", "simplex_plus")}
    number = typical(np.linalg.norm(draws["simplex"], axis=-1))
    for axes, (coupling, w) in zip(figure.subplots(1, 2), draws.items(), strict=True):
        rows = in_their_plane(w[number])
        draw_rows(axes, rows, style.STYLES[coupling]["color"])
        for row in rows:
            norm = np.linalg.norm(row)
            x, y = row[:2] * (1 + 0.3 / norm)
            axes.text(x, y, f"{norm:.2f}", ha="center", va="center", fontsize=9)
        total = rows.sum(axis=0)
        axes.set(xlim=(-2.4, 2.4), ylim=(-1.8, 2.5))
        axes.set_title(style.LABELS[coupling], fontsize=10)
        axes.set_xlabel(f"$|w_1 + w_2 + w_3|$ = {np.linalg.norm(total):.2f}", fontsize=9)
