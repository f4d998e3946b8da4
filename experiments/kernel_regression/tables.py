"""Tables in Markdown: the paper's Tables 2 and 3 with our numbers, and paired tests."""

from __future__ import annotations

import math
from typing import Any

from experiments.harness import markdown, style
from experiments.kernel_regression import paper

# Pairs (better, worse) according to theory, tested on paired draws. The last two compare fast with
# regular projections.
PAIRS = {
    "table_2": (("orthogonal", "iid"), ("simplex", "orthogonal"), ("simplex_plus", "simplex")),
    "table_3": (
        ("orthogonal", "iid"),
        ("simplex", "orthogonal"),
        ("fast_simplex", "fast_orthogonal"),
        ("fast_orthogonal", "orthogonal"),
        ("fast_simplex", "simplex"),
    ),
}
LABELS = style.LABELS | {"fast_orthogonal": "fast ORFs", "fast_simplex": "fast SimRFs"}


def all_tables(results: dict[str, Any]) -> str:
    """Returns Tables 2 and 3, and the paired tests of each."""
    printed = {"table_2": paper.TABLE_2, "table_3": paper.TABLE_3}
    texts = [sizes(results)]
    for name, published in printed.items():
        texts += [_accuracies(results, name, published), _paired(results, name)]
    return "\n\n".join(texts)


def sizes(results: dict[str, Any]) -> str:
    """Returns the table of the data sets, with the accuracy of the exact kernel."""
    header = ["data set", "rows to train", "to test", "d", "v, paper", "v, ours", "exact kernel"]
    rows: list[list[object]] = []
    for name, row in results.items():
        counts = (row[what] for what in ("num_train", "num_test", "dim"))
        ours = f"{row['mean_distance']:.2f}", f"{row['exact']:.4f}"
        rows.append([name, *counts, paper.MEAN_DISTANCE[name], *ours])
    return markdown.table(header, rows)


def sigmas(results: dict[str, Any]) -> str:
    """Returns the table of the sigmas where the curves of Fig. 10 have their maxima."""
    header = ["data set", "published", "validation, IIDRFs", "test, IIDRFs", "validation, exact"]
    rows = []
    for name, row in results.items():
        held_out = row["validation"]
        maxima = row["published"], held_out["best"], row["test"]["best"], held_out["best_exact"]
        rows.append([name, *map("{:.3f}".format, maxima)])
    return markdown.table(header, rows)


def gains(results: dict[str, Any]) -> str:
    """Returns the table of SimRFs' gain over ORFs in Fig. 8, from paired trials, with z-scores."""
    multiples = next(iter(results.values()))["multiples"]
    rows = []
    for name, row in results.items():
        entries = [paper.Entry(**gain) for gain in row["simplex - orthogonal"]]
        rows.append([name, *map(_score, entries)])
    return markdown.table(["SimRFs - ORFs", *(f"{m}d features" for m in multiples)], rows)


def _accuracies(results: dict[str, Any], table: str, published: dict[str, Any]) -> str:
    """Returns a table with the entries "paper / ours / difference in standard errors"."""
    methods = list(next(iter(results.values()))[table])
    rows: list[list[object]] = []
    for name, row in results.items():
        cells = []
        for method in methods:
            ours = paper.Entry(**row[table][method])
            cell = _entry(ours)
            if theirs := published[name].get(method):
                error = math.hypot(ours.standard_error, theirs.standard_error)
                cell = f"{_entry(theirs)} / {cell} / {(ours.mean - theirs.mean) / error:+.1f}"
            cells.append(cell)
        rows.append([name, *cells])
    return markdown.table(["data set", *(LABELS[m] for m in methods)], rows)


def _paired(results: dict[str, Any], table: str) -> str:
    """Returns a table of mean differences of paired trials, with their z-scores."""
    header = [f"{LABELS[better]} - {LABELS[worse]}" for better, worse in PAIRS[table]]
    rows: list[list[object]] = []
    for name, row in results.items():
        gains = [paper.Entry(**gain) for gain in row[f"{table}_paired"].values()]
        rows.append([name, *map(_score, gains)])
    return markdown.table(["data set", *header], rows)


def _score(gain: paper.Entry) -> str:
    if gain.standard_error == 0:  # Happens if all of a few trials differ by the same amount.
        return f"{gain.mean:+.4f}"
    return f"{gain.mean:+.4f} / {gain.mean / gain.standard_error:+.1f}"


def _entry(entry: paper.Entry) -> str:
    """Formats an entry as 0.1421(2), with the standard error in units of the last digit."""
    return f"{entry.mean:.4f}({1e4 * entry.standard_error:.0f})"
