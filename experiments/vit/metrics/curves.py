"""Curves of one run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import matplotlib.cm
import matplotlib.colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from experiments.harness import style

# For each column (step, value) where there is a value.
Metrics = dict[str, list[tuple[int, float]]]
# Label and look of each split, in the colors of all figures.
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("train", {"color": "#0072B2", "lw": 1}),
    "held_out": ("held-out", {"color": "#009E73", "lw": 1.5, "marker": "o"}),
    "test": ("test", {"color": "#D55E00", "lw": 1.5, "marker": "o"}),
}

# What is measured in each layer, and its name.
LAYERS = {"attention_error": "error", "feature_variance": "variance"}


def draw_curves(metrics: Metrics) -> Figure:
    """Draws each measurement of a run against the step, in a panel of its own."""
    panels: list[Callable[[Axes, Metrics], None]] = [_loss, _accuracy]
    panels += [_learning_rate, _speed]
    if "attention_error" in metrics:
        panels += [functools.partial(_layers, name=name) for name in LAYERS]
    columns = len(panels) // 2
    layout = ConstrainedLayoutEngine(w_pad=0.12)
    figure = Figure(figsize=(4.5 * columns, 6.5), layout=layout)
    # Filled column by column: what belongs together lies one above the other.
    for axes, panel in zip(figure.subplots(2, columns).T.flat, panels, strict=True):
        panel(axes, metrics)
        axes.set_xlabel("step")
        style.tidy(axes)
    return figure


def _loss(axes: Axes, metrics: Metrics) -> None:
    _splits(axes, metrics, "loss")
    axes.set(title="loss", ylabel="nats", yscale="log")


def _accuracy(axes: Axes, metrics: Metrics) -> None:
    _splits(axes, metrics, "accuracy")
    # While a run with held-out images trains, it has no test accuracy yet.
    split = "test" if metrics["test_accuracy"] else "held_out"
    step, last = metrics[f"{split}_accuracy"][-1]
    title = f"{SPLITS[split][0]} accuracy after step {step:,}: {last:.4f}"
    axes.set(title=title)


def _splits(axes: Axes, metrics: Metrics, name: str) -> None:
    """Draws a measurement of each split for which there is one."""
    for split, (label, look) in SPLITS.items():
        if points := metrics.get(f"{split}_{name}"):
            axes.plot(*zip(*points, strict=True), **look, ms=3, label=label)
    axes.legend()


def _learning_rate(axes: Axes, metrics: Metrics) -> None:
    """Draws the learning rate, and the norm of the gradient on an axis of its own."""
    axes.plot(*zip(*metrics["learning_rate"], strict=True), color="#0072B2", lw=1.5)
    axes.set_title("learning rate and gradient norm")
    axes.set_ylabel("learning rate", color="#0072B2")
    norm = axes.twinx()
    norm.plot(*zip(*metrics["gradient_norm"], strict=True), color="#D55E00", lw=1)
    norm.set_ylabel("gradient norm", color="#D55E00")
    norm.set_yscale("log")
    style.plain_ticks(norm.yaxis)
    norm.spines["top"].set_visible(False)


def _speed(axes: Axes, metrics: Metrics) -> None:
    axes.plot(*zip(*metrics["images_per_second"], strict=True), color="#0072B2", lw=1)
    axes.set(title="speed", ylabel="images per second", ylim=(0, None))


def _layers(axes: Axes, metrics: Metrics, name: str) -> None:
    """Draws a faint line for each layer, in a color of the bar, and their mean."""
    layers = [column for column in metrics if re.fullmatch(rf"{name}/layer_\d+", column)]
    colors = matplotlib.colormaps["viridis"].resampled(len(layers))
    for layer, column in enumerate(layers):
        axes.plot(*zip(*metrics[column], strict=True), color=colors(layer), lw=1)
    axes.plot(*zip(*metrics[name], strict=True), "ko-", ms=3, label="mean of layers")
    title = f"{LAYERS[name]} of attention"
    axes.set(title=title, ylabel=f"relative {LAYERS[name]}", ylim=(0, None))
    axes.legend(frameon=False)
    edges = matplotlib.colors.Normalize(-0.5, len(layers) - 0.5)
    shown = matplotlib.cm.ScalarMappable(edges, colors)
    axes.figure.colorbar(shown, ax=axes, label="layer", ticks=range(len(layers)))
