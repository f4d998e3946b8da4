"""Figures of the swap experiment."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import style
from experiments.swap.looks import LABELS, LOOKS, PREDICTED_LOOKS, SCORES, TASKS
from experiments.swap.predicted import CASES
from simrf_jax._src.selection.prediction import FIRST_ORDER_LIMIT

# Predictions for a few heads are far larger yet, and are drawn here.
LARGEST_PREDICTION = 1e25
ENCODER = {
    "error": "mean relative squared error of a head",
    "cosine": "cosine of the embedding to the exact one",
}
# Neighboring curves are moved apart by this factor, so that none hides another.
APART = 1.03


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """Returns all figures by file name."""
    drawn = {}
    if "predicted" in results:
        drawn["predicted"] = draw_predicted(results["predicted"])
    if "predicted_heads" in results:
        drawn["predicted_heads"] = draw_predicted_heads(results["predicted_heads"])
    if "encoder" in results:
        for quantity, label in ENCODER.items():
            drawn[f"encoder_{quantity}"] = draw_encoder(results["encoder"], quantity, label)
    sections = {name: results[name] for name in TASKS if name in results}
    if sections:
        drawn["swapped"] = draw_swapped(sections)
        drawn["fine_tuned"] = draw_tuned(sections, "score")
        drawn["spread"] = draw_tuned(sections, "spread")
    return drawn


def draw_predicted(section: dict[str, Any]) -> Figure:
    """Draws predicted errors as lines, and measured ones as markers, against the length."""
    figure, axes = style.subplots(7, 4)
    lengths = np.array(section["lengths"])
    for name, rows in section["cases"].items():
        look = PREDICTED_LOOKS[name] | {"linewidth": 1.3}
        axes.plot([], [], **look, label=CASES[name].label)  # The legend has line and marker.
        marks = {"fmt": look.pop("marker"), "color": look["color"]}
        axes.plot(lengths, [row["predicted"]["mean"] for row in rows], **look)
        measured = style.moments(row["measured"] for row in rows)
        style.dots(axes, lengths, *measured, **marks, markersize=5)
    axes.axhline(FIRST_ORDER_LIMIT, color="#000000", linewidth=0.8)
    note, place = "above, first order is far too high", (lengths[0], FIRST_ORDER_LIMIT)
    axes.annotate(note, place, xytext=(0, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="|x| = |y|", ylabel="relative squared error of attention", yscale="log")
    style.tidy(axes)
    title = "lines: predicted\nmarkers: measured"
    options: dict[str, Any] = {"title": title, "title_fontsize": 9, "handlelength": 3.5}
    figure.legend(frameon=False, loc="outside right upper", fontsize=9, **options)
    return figure


def draw_predicted_heads(section: dict[str, Any]) -> Figure:
    """Draws the measured error of each head against the predicted one, for the most features."""
    figure, axes = style.subplots(6.2, 4)
    for name, by_size in section["methods"].items():
        errors = by_size[max(by_size, key=int)]
        predicted = np.minimum(errors["predicted"], LARGEST_PREDICTION)
        look = LOOKS[name] | {"linestyle": "none", "markersize": 3, "label": LABELS[name]}
        axes.plot(predicted, errors["measured"], **look)
    limit = f"first order holds below {FIRST_ORDER_LIMIT:g}"
    axes.axvline(FIRST_ORDER_LIMIT, color="#000000", linewidth=0.8, label=limit)
    as_predicted = {"linestyle": "--", "linewidth": 0.8, "label": "measured = predicted"}
    axes.axline((1, 1), slope=1, color="#777777", **as_predicted)
    axes.set(xlabel="predicted relative squared error of a head", ylabel="measured error")
    axes.set(xscale="log", yscale="log")
    style.tidy(axes)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return figure


def draw_encoder(section: dict[str, Any], quantity: str, label: str) -> Figure:
    """Draws one quantity of the sentence encoder against the number of features."""
    figure, axes = style.subplots(7, 4)
    _draw_against_features(axes, section, quantity)
    axes.set(xlabel="number of features m", ylabel=label)
    figure.legend(frameon=False, loc="outside right upper", fontsize=9)
    return figure


def draw_swapped(sections: dict[str, dict[str, Any]]) -> Figure:
    """Draws the score without fine-tuning against the number of features, a panel for each task."""
    figure, panels = _panels(sections)
    for axes, (name, section) in zip(panels, sections.items(), strict=True):
        _draw_against_features(axes, section, "score")
        axes.set(xlabel="number of features m", ylabel=SCORES[name])
        axes.set_title(f"{TASKS[name]}, no fine-tuning", fontsize=10)
    _legend(figure, panels)
    return figure


def draw_tuned(sections: dict[str, dict[str, Any]], quantity: str) -> Figure:
    """Draws a quantity against the steps of fine-tuning, with one panel for each task.

    Args:
      sections: Results of the tasks by name.
      quantity: ``"score"``, or ``"spread"`` for the mean |x + y|^2 over the layers.
    """
    figure, panels = _panels(sections)
    for axes, (name, section) in zip(panels, sections.items(), strict=True):
        steps = np.array(section["steps"])
        for number, (one, rows) in enumerate(section["tuned"].items()):
            x = (steps + 1) * APART**number
            _errorbar(axes, x, [row[quantity] for row in rows], one)
        axes.set(xlabel="steps of fine-tuning", xscale="log")
        if quantity == "spread":
            axes.set_ylabel("mean $|x + y|^2$")
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        else:
            axes.set_ylabel(SCORES[name])
        style.ticks(axes, steps + 1, steps)
        axes.set_title(f"{TASKS[name]}, m = {section['tuned_features']}", fontsize=10)
    _legend(figure, panels)
    return figure


def _panels(sections: dict[str, dict[str, Any]]) -> tuple[Figure, list[Axes]]:
    count = len(sections)
    figure, [panels] = style.subplots(3.4 * count + 3.2, 3.6, 1, count, squeeze=False)
    return figure, list(panels)


def _draw_against_features(axes: Axes, section: dict[str, Any], quantity: str) -> None:
    """Draws the methods with standard errors, and the baselines as level lines."""
    for name, one in section["baselines"].items():
        look = LOOKS[name]
        axes.axhline(one[quantity]["mean"], **look, linewidth=1.2, label=LABELS[name])
    sizes = np.array([])
    for number, (name, by_size) in enumerate(section["methods"].items()):
        sizes = np.array([int(m) for m in by_size])
        x = sizes * APART ** (number - len(section["methods"]) / 2)
        _errorbar(axes, x, [one[quantity] for one in by_size.values()], name)
    axes.set_xscale("log")
    style.ticks(axes, sizes)


def _errorbar(axes: Axes, x: np.ndarray, summaries: list[dict[str, float]], name: str) -> None:
    look = LOOKS[name] | {"fmt": "", "linewidth": 1.3, "label": LABELS[name]}
    style.dots(axes, x, *style.moments(summaries), **look)
    style.tidy(axes)


def _legend(figure: Figure, panels: list[Axes]) -> None:
    """Draws one legend for all panels, with each attention once."""
    entries: dict[str, Any] = {}
    for axes in panels:
        drawn, names = axes.get_legend_handles_labels()
        entries |= dict(zip(names, drawn, strict=True))
    handles, labels = [*entries.values()], [*entries]
    figure.legend(handles, labels, frameon=False, loc="outside right upper", fontsize=9)
