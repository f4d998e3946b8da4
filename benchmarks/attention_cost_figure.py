"""The picture of ``benchmarks.attention_cost``: time and memory against the length.

It draws the committed results again, or those of a file.

Run: python -m benchmarks.attention_cost_figure [RESULTS.json FIGURE.png]
"""

import json
import pathlib

import matplotlib.figure

from benchmarks import command_line
from experiments.harness import style

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "attention_cost.json"
FIGURE = HERE / "figures" / "attention_cost.png"
PANELS = {
    "forward": "forward",
    "backward": "forward and backward",
    "causal_forward": "causal, forward",
    "causal_backward": "causal, forward and backward",
}
LOOKS = {
    "ours": ("random features", style.STYLES["simplex"]),
    "exact": ("exact", style.STYLES["exact"]),
    "tokamax": ("exact, tokamax", {"color": "#56B4E9", "linestyle": (0, (5, 1, 1, 1, 1, 1))}),
    "splash": ("exact, splash attention", {"color": "#CC79A7", "linestyle": (0, (3, 1, 1, 1))}),
    "textbook": ("textbook form", {"color": "#E69F00", "linestyle": "--"}),
    "performer_pytorch": ("performer-pytorch", {"color": "#009E73", "linestyle": ":"}),
}


def draw(results):
    """Draws the time of each pass, and the memory of the forward pass, for each candidate."""
    figure = matplotlib.figure.Figure(figsize=(11, 6), layout="constrained")
    times, memory = figure.subfigures(1, 2, width_ratios=[2, 1])
    panels = times.subplots(2, 2, sharex=True, sharey=True)
    for axes, name in zip(panels.flat, PANELS, strict=True):
        axes.set(title=PANELS[name], xscale="log", yscale="log")
        draw_rows(axes, results["rows"], name, microseconds)
        style.tidy(axes)
    times.supylabel("microseconds per head and token (median, quartiles)", fontsize="medium")
    times.supxlabel("tokens of a sequence", fontsize="medium")
    axes = memory.subplots()
    axes.set(title="buffers, forward", xscale="log", yscale="log")
    axes.set(xlabel="tokens of a sequence", ylabel="KiB per head and token")
    draw_rows(axes, results["rows"], "forward", kibibytes)
    style.tidy(axes)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def draw_rows(axes, rows, name, numbers):
    """Draws a curve for each candidate of a pass.

    Args:
      axes: Axes to draw in.
      rows: Rows of the results, of any pass.
      name: The pass.
      numbers: Function of a row that returns quartiles, or None.
    """
    for candidate, (label, look) in LOOKS.items():
        points = {
            row["length"]: numbers(row)
            for row in rows
            if (row["pass"], row["candidate"]) == (name, candidate) and numbers(row)
        }
        if points:
            low, median, high = zip(*points.values(), strict=True)
            style.band(axes, list(points), low, high, color=look["color"])
            axes.plot(list(points), median, **look, marker=".", label=label)


def microseconds(row):
    """Returns quartiles of the time, divided by the tokens and by the heads."""
    tokens = row["sequences"] * row["heads"] * row["length"]
    return [1e3 * ms / tokens for ms in row["milliseconds"]]


def kibibytes(row):
    """Returns temporary memory for a token and a head, three times, or None if it is not known."""
    if row["temporary_mib"] is None:
        return None
    return 3 * [2**10 * row["temporary_mib"] / (row["sequences"] * row["heads"] * row["length"])]


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("results", type=pathlib.Path, nargs="?", default=RESULTS)
    parser.add_argument("figure", type=pathlib.Path, nargs="?", default=FIGURE)
    options = parser.parse_args()
    draw(json.loads(options.results.read_text())).savefig(options.figure, dpi=160)


if __name__ == "__main__":
    main()
