"""The picture at the head of the README: the error in a trained model, and the time by length.

It draws numbers that stand elsewhere: the tables of ``experiments/swap/README.md``, and the
results that ``benchmarks.attention_cost_figure`` draws as well.

Run: python -m benchmarks.overview [FIGURE.png]
"""

import json
import pathlib

from benchmarks import attention_cost_figure, command_line
from experiments.harness import style

ROOT = pathlib.Path(__file__).parents[1]
FIGURE = ROOT / "benchmarks" / "figures" / "overview.png"
TABLES = ROOT / "experiments" / "swap" / "README.md"
# Labels of the bars, by the rows of the tables.
BARS = {
    "uniform attention": "uniform attention",
    "positive, simplex": "positive features",
    "calibrated, cross-polytope": "calibrated",
    "exact band and calibrated, cross-polytope": "calibrated + band",
    "exact band and keys, calibrated": "calibrated + band\n+ 16 exact keys",
    "exact band and keys, learned": "learned + band\n+ 16 exact keys",
}
PASSES = {"forward": ("forward", "--"), "backward": ("forward and backward", "-")}


def errors():
    """Returns the mean and the standard error of each bar, over kinds of text, for 128 tokens."""
    _, table = TABLES.read_text().split("| 128 tokens, error |")
    table, *_ = table.split("\n\n")
    rows = (line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    found = {name: tuple(map(float, mean.split(" ± "))) for name, *_, mean in rows}
    return {name: found[name] for name in BARS}


def speedups(rows, passed):
    """Returns quartiles of the time of exact attention over that of random features, by length."""
    return {
        row["length"]: row["over_ours"]
        for row in rows
        if (row["pass"], row["candidate"]) == (passed, "exact")
    }


def draw(results):
    """Draws the errors of a trained encoder's heads, and the ratios of times."""
    figure, (left, right) = style.subplots(8.5, 3.2, 1, 2, width_ratios=[1.15, 1])
    numbers = errors()
    bars = left.barh(
        list(BARS.values()),
        [mean for mean, _ in numbers.values()],
        xerr=[error for _, error in numbers.values()],
        color=style.STYLES["simplex"]["color"],
        error_kw={"linewidth": 1},
    )
    left.bar_label(bars, [f"{mean:.3f}" for mean, _ in numbers.values()], padding=6, fontsize=9)
    left.invert_yaxis()
    left.set(
        xlim=(0, 1.15),
        title="a trained encoder, on new kinds of text",
        xlabel="relative squared error of a head",
    )
    for name, (label, line) in PASSES.items():
        points = speedups(results["rows"], name)
        low, medians, high = zip(*points.values(), strict=True)
        look = style.STYLES["simplex"] | {"linestyle": line, "marker": ".", "label": label}
        style.band(right, list(points), low, high, color=look["color"])
        right.plot(list(points), medians, **look)
    right.axhline(1, color="black", linewidth=1)
    right.text(8192, 0.9, "exact attention", ha="right", va="top", fontsize=9)
    right.set(
        xscale="log",
        yscale="log",
        title="times as fast as exact attention",
        xlabel="tokens (two CPU cores, 130 features)",
    )
    lengths = [128, 512, 2048, 8192]
    style.ticks(right, lengths, [f"{length:,}" for length in lengths])
    right.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    right.yaxis.minorticks_off()
    right.legend(frameon=False)
    for axes in (left, right):
        style.tidy(axes)
    left.grid(visible=False, axis="y")
    return figure


def main():
    parser = command_line.parser(__doc__)
    parser.add_argument("figure", type=pathlib.Path, nargs="?", default=FIGURE)
    options = parser.parse_args()
    results = json.loads(attention_cost_figure.RESULTS.read_text())
    draw(results).savefig(options.figure, dpi=160)


if __name__ == "__main__":
    main()
