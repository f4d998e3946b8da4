"""How the estimators look in every figure; colour-blind safe (Okabe and Ito), a line style each."""

from __future__ import annotations

from typing import Any

import matplotlib.axes
import numpy as np

STYLES: dict[str, dict[str, Any]] = {
    "iid": {"color": "#009E73", "linestyle": ":"},
    "orthogonal": {"color": "#D55E00", "linestyle": "--"},
    "simplex": {"color": "#0072B2", "linestyle": "-"},
    "simplex_plus": {"color": "#CC79A7", "linestyle": (0, (3, 1, 1, 1))},
    "exact": {"color": "#000000", "linestyle": "-."},
}
# The names of the paper.
LABELS = {
    "iid": "IIDRFs",
    "orthogonal": "ORFs",
    "simplex": "SimRFs",
    "simplex_plus": "SimRFs+",
}


def tidy(axes: matplotlib.axes.Axes) -> None:
    """A faint grid, and no frame where there is no scale."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def band(
    axes: matplotlib.axes.Axes, x: np.ndarray, mean: np.ndarray, spread: np.ndarray, *, color: str
) -> None:
    """Shades ``mean`` plus and minus ``spread``."""
    axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.3, linewidth=0)
