"""Tables and figures of both parts."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.harness import markdown, style
from experiments.recall import library
from experiments.recall.kinds import LABELS, LOOKS


def describe(results: dict[str, Any]) -> list[str]:
    """Returns the tables of the parts that were run."""
    tables = []
    if "recall" in results:
        tables.append(recall_table(results["recall"]))
    if "equal_time" in results:
        tables += [equal_time_table(results["equal_time"]), describe_text(results["equal_time"])]
    return tables


def spread(values: list[float] | np.ndarray, digits: int) -> str:
    """Returns the mean of the values of all seeds and, if there are several, their range."""
    text = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return text
    return f"{text} ({np.min(values):.{digits}f} to {np.max(values):.{digits}f})"


def recall_table(section: list[dict[str, Any]]) -> str:
    """Returns the accuracies, with the numbers of pairs that were learned on the way."""
    rows = []
    for row in sorted(section, key=lambda row: (row["num_pairs"], row["num_features"])):
        runs = row["runs"].values()
        features, keys = row["num_features"] or "-", row["exact_keys"] or "-"
        last = ", ".join(f"{run['trained']:.0f}" for run in runs)
        steps = ", ".join(f"{run['steps']:.0f}" for run in runs)
        accuracy = spread([run["accuracy"] for run in runs], 3)
        rows.append(
            [row["num_pairs"], features, LABELS[row["attention"]], keys, accuracy, last, steps]
        )
    header = [
        "N",
        "m",
        "attention",
        "exact keys",
        "accuracy",
        "last number of pairs trained",
        "steps",
    ]
    return markdown.table(header, rows)


def equal_time_table(section: dict[str, Any]) -> str:
    """Returns times of steps, numbers of steps, and the bits after half the time and at its end."""
    rows = []
    for context, models in section["contexts"].items():
        for name, model in models.items():
            low, median, high = model["milliseconds"]
            bits = np.array([*model["bits"].values()])
            half = bits[:, bits.shape[1] // 2 - 1]
            times = f"{median:.0f} ({low:.0f} to {high:.0f})"
            ends = spread(half, 3), spread(bits[:, -1], 3)
            rows.append([context, LABELS[name], times, model["steps"][-1], *ends, len(bits)])
    header = [
        "context",
        "attention",
        "ms a step",
        "steps",
        "bits at half the time",
        "bits",
        "seeds",
    ]
    return markdown.table(header, rows)


def describe_text(section: dict[str, Any]) -> str:
    """Says which text the models read, and whether it is the one of the README."""
    ours = section["text"]
    line = f"{ours['train']} characters to train on and {ours['validation']} to validate"
    if ours["sha256"] == library.SHA256:
        return f"{line}, of the text of the README."
    return f"{line}. It is not the text of the README ({library.SHA256}): expect other numbers."


def draw(results: dict[str, Any]) -> dict[str, Figure]:
    """Returns the figure of each part that was run."""
    figures = {}
    if "recall" in results:
        figures["recall"] = draw_recall(results["recall"])
    if "equal_time" in results:
        figures["equal_time"] = draw_equal_time(results["equal_time"])
    return figures


def draw_recall(section: list[dict[str, Any]]) -> Figure:
    """Draws the mean accuracy of each row as a dot with the range over seeds, for each N."""
    sizes = sorted({row["num_pairs"] for row in section})
    names = [*dict.fromkeys(map(row_label, section))]
    shape = 3.2 + 3.4 * len(sizes), 1 + 0.3 * len(names)
    figure, axes = style.subplots(*shape, 1, len(sizes), squeeze=False, sharey=True)
    for one, size in zip(axes[0], sizes, strict=True):
        for row in section:
            if row["num_pairs"] == size:
                found = [run["accuracy"] for run in row["runs"].values()]
                place, color = names.index(row_label(row)), LOOKS[row["attention"]]["color"]
                one.plot([min(found), max(found)], [place, place], color=color)
                one.plot(np.mean(found), place, "o", color=color)
        one.set(xlabel="accuracy", xlim=(-0.03, 1.03), title=f"{size} pairs")
        style.tidy(one)
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    return figure


def row_label(row: dict[str, Any]) -> str:
    """Returns the name of a row in the figure."""
    numbers = f"m = {row['num_features']}" if row["num_features"] else ""
    keys = f"{row['exact_keys']} keys" if row["exact_keys"] else ""
    return ", ".join(filter(None, [LABELS[row["attention"]], numbers, keys]))


def draw_equal_time(section: dict[str, Any]) -> Figure:
    """Draws the validation loss against the time of training, for each context."""
    contexts = section["contexts"]
    figure, axes = style.subplots(4.6 * len(contexts), 4, 1, len(contexts), squeeze=False)
    for one, (context, models) in zip(axes[0], contexts.items(), strict=True):
        for name, model in models.items():
            seconds = np.array(model["steps"]) * model["milliseconds"][1] / 1e3
            bits, look = np.array([*model["bits"].values()]), LOOKS[name]
            style.band(one, seconds, bits.min(0), bits.max(0), color=look["color"])
            one.plot(seconds, bits.mean(0), **look, label=LABELS[name])
        one.set(xlabel="seconds of training", ylabel="validation loss (bits per character)")
        one.set_title(f"{context} characters")
        style.tidy(one)
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure
