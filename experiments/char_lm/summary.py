"""Summary of the runs: bits per character, the share of the gap that is closed, and curves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.char_lm import corpus
from experiments.harness import markdown, style, trials

LABELS = {
    "softmax": "softmax",
    "far": "far field only",
    "near": "near field only",
    "near_far": "near + far",
    "band_positive": "exact band + positive far field",
    "band_calibrated": "exact band + calibrated far field",
    "band_learned": "exact band + learned far field",
}
LOOKS: dict[str, dict[str, Any]] = {
    "softmax": {"color": "#000000", "linestyle": "-."},
    "far": {"color": "#D55E00", "linestyle": "--"},
    "near": {"color": "#009E73", "linestyle": ":"},
    "near_far": {"color": "#0072B2", "linestyle": "-"},
    "band_positive": {"color": "#E69F00", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    "band_calibrated": {"color": "#CC79A7", "linestyle": "-"},
    "band_learned": {"color": "#56B4E9", "linestyle": (0, (3, 1, 1, 1))},
}


def bits(results: dict[str, Any], attention: str) -> np.ndarray:
    """Returns validation losses in bits per character, ``[seeds, evaluations]``."""
    runs = results["runs"][attention].values()
    return np.array([run["losses"] for run in runs]) / math.log(2)


def gap_closed(results: dict[str, Any], attention: str) -> trials.Estimate:
    """Returns (far - this) / (far - softmax) at the end of training, over paired seeds."""
    far, ours, softmax = (bits(results, name)[:, -1] for name in ("far", attention, "softmax"))
    return trials.ratio(far - ours, far - softmax)


def table(results: dict[str, Any]) -> str:
    """Returns a table with one row for each kind of attention."""
    rows = []
    has_gap = {"far", "softmax"} <= results["runs"].keys()
    for attention in results["runs"]:
        last = bits(results, attention)[:, -1]
        closed = "-"
        if has_gap and attention not in ("softmax", "far"):
            gap = gap_closed(results, attention)
            closed = f"{100 * gap.value:.1f} ± {100 * gap.standard_error:.1f} %"
        seconds = np.median([run["seconds"] for run in results["runs"][attention].values()])
        spread = f"{last.mean():.4f} ± {last.std(ddof=1):.4f}"
        rows.append([LABELS[attention], spread, closed, len(last), f"{seconds:.0f} s"])
    header = ("attention", "bits per character", "gap to softmax closed", "seeds", "time a run")
    return markdown.table(header, rows)


def comparison(results: dict[str, Any]) -> str:
    """Says what the far field, one normalizer and calibration improve, over paired seeds."""
    sentences = {
        ("near", "near_far"): "The far field takes {} bits per character off the near field.",
        ("near_far", "band_positive"): "One normalizer takes {} off near + far.",
        ("band_positive", "band_calibrated"): "Calibration takes {} off the positive far field.",
        ("softmax", "band_calibrated"): "Softmax attention is {} above the calibrated far field.",
        ("softmax", "band_learned"): "Softmax attention is {} above the learned far field.",
    }
    lines = []
    for (one, other), sentence in sentences.items():
        if not {one, other} <= results["runs"].keys():
            continue
        gain = trials.mean(bits(results, one)[:, -1] - bits(results, other)[:, -1])
        found = f"{gain.value:.4f} (standard error {gain.standard_error:.4f})"
        lines.append(sentence.format(found))
    return "\n".join(lines)


def describe_text(results: dict[str, Any]) -> str:
    """Says which text the models read, and whether it is the one of the README."""
    ours = results["text"]
    line = (
        f"Text of Python {results['python']}: {ours['train']} characters to train on and "
        f"{ours['validation']} to validate, of {len(ours['alphabet'])} kinds; SHA-256 "
        f"{ours['sha256']}"
    )
    if ours["sha256"] == corpus.SHA256:
        return f"{line}, the text of the README."
    return f"{line}. It is not the text of the README ({corpus.SHA256}): expect other numbers."


def draw_figure(results: dict[str, Any]) -> Figure:
    """Draws the validation loss by step: the median over the seeds, and their range."""
    figure, axes = style.subplots(5, 3.8)
    steps = results["steps"]
    for attention in results["runs"]:
        curves, look = bits(results, attention), LOOKS[attention]
        style.band(axes, steps, curves.min(axis=0), curves.max(axis=0), color=look["color"])
        axes.plot(steps, np.median(curves, axis=0), **look, label=LABELS[attention])
    axes.set(xlabel="step", ylabel="validation loss (bits per character)")
    style.tidy(axes)
    axes.legend(frameon=False)
    return figure
