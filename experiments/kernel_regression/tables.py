"""Tables 2 and 3 with ours beside them, in Markdown."""

from __future__ import annotations

from typing import Any

from experiments import harness, style
from experiments.kernel_regression import paper

# (better, worse) by the theory, tested on paired draws; then fast against regular.
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


def all_tables(results: dict[str, Any]) -> list[str]:
    """Tables 2 and 3, and the paired tests of each."""
    printed = {"table_2": paper.TABLE_2, "table_3": paper.TABLE_3}
    texts = [sizes(results)]
    for name, published in printed.items():
        texts += [_accuracies(results, name, published), _paired(results, name)]
    return texts


def sizes(results: dict[str, Any]) -> str:
    """What the data sets are, and the accuracy of the exact kernel."""
    header = ["data set", "rows to train", "to test", "d", "v, paper", "v, ours", "exact kernel"]
    rows = [
        [
            name,
            row["num_train"],
            row["num_test"],
            row["dim"],
            paper.MEAN_DISTANCE[name],
            f"{row['mean_distance']:.2f}",
            f"{row['exact']:.4f}",
        ]
        for name, row in results.items()
    ]
    return harness.markdown_table(header, rows)


def sigmas(results: dict[str, Any]) -> str:
    """Where the curves of Fig. 10 have their maxima."""
    header = ["data set", "published", "validation, IIDRFs", "test, IIDRFs", "validation, exact"]
    rows = [
        [
            name,
            f"{row['published']:.3f}",
            f"{row['validation']['best']:.3f}",
            f"{row['test']['best']:.3f}",
            f"{row['validation']['best_exact']:.3f}",
        ]
        for name, row in results.items()
    ]
    return harness.markdown_table(header, rows)


def _accuracies(results: dict[str, Any], table: str, published: dict[str, Any]) -> str:
    methods = list(next(iter(results.values()))[table])
    rows: list[list[object]] = []
    for name, row in results.items():
        cells = []
        for method in methods:
            ours = f"{row[table][method]['mean']:.4f} ({row[table][method]['standard_error']:.4f})"
            if theirs := published[name].get(method):
                ours = f"{theirs.mean:.4f} ({theirs.standard_error:.4f}) / {ours}"
            cells.append(ours)
        rows.append([name, *cells])
    return harness.markdown_table(["data set", *(LABELS[m] for m in methods)], rows)


def _paired(results: dict[str, Any], table: str) -> str:
    header = [f"{LABELS[better]} - {LABELS[worse]}" for better, worse in PAIRS[table]]
    rows: list[list[object]] = []
    for name, row in results.items():
        gains = row[f"{table}_paired"].values()
        rows.append([name, *(f"{g['mean']:+.4f} ({g['standard_error']:.4f})" for g in gains)])
    return harness.markdown_table(["data set", *header], rows)
