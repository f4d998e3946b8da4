"""Tables of the results, in Markdown."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.harness import markdown
from experiments.swap.looks import LABELS, SCORES, TASKS
from experiments.swap.predicted import CASES


def describe(results: dict[str, Any]) -> list[str]:
    """Returns paragraphs and tables for each section of the results."""
    parts: list[str] = []
    if "predicted" in results:
        parts += describe_predicted(results["predicted"])
    if "predicted_heads" in results:
        parts += describe_predicted_heads(results["predicted_heads"])
    if "encoder" in results:
        parts += describe_encoder(results["encoder"])
    for name in TASKS:
        if name in results:
            parts += describe_task(name, results[name])
    return parts


def describe_predicted(section: dict[str, Any]) -> list[str]:
    """Returns the tables of predicted errors and of measured ones over predicted ones."""
    header = ["features", *(f"length {length:g}" for length in section["lengths"])]
    predicted = [
        [CASES[name].label, *(f"{row['predicted']['mean']:.2e}" for row in rows)]
        for name, rows in section["cases"].items()
    ]
    ratios = [
        [CASES[name].label, *(_text(row["ratio"]) for row in rows)]
        for name, rows in section["cases"].items()
    ]
    title = f"Attention to random keys, m = {section['num_features']}"
    return [
        f"{title}: predicted relative squared error\n\n{markdown.table(header, predicted)}",
        f"{title}: measured over predicted error\n\n{markdown.table(header, ratios)}",
        f"{section['seconds']:.0f} seconds.",
    ]


def describe_predicted_heads(section: dict[str, Any]) -> list[str]:
    """Returns the table of predicted and measured errors of the heads of the encoder."""
    rows = [
        [LABELS[name], m, *(_quartiles(errors[one]) for one in ("predicted", "measured"))]
        for name, by_size in section["methods"].items()
        for m, errors in by_size.items()
    ]
    table = markdown.table(["attention", "m", "predicted", "measured"], rows)
    return [
        f"all-MiniLM-L6-v2: relative squared error of a head's outputs, median and quartiles over "
        f"heads and seeds\n\n{table}",
        f"{section['seconds']:.0f} seconds.",
    ]


def describe_encoder(section: dict[str, Any]) -> list[str]:
    """Returns the tables of errors and of cosines, and the mean |x + y|^2 of each layer."""
    tables = [
        f"all-MiniLM-L6-v2: {title}\n\n{_against_features(section, quantity)}"
        for quantity, title in (
            ("error", "mean relative squared error of a head's outputs, given exact inputs"),
            ("cosine", "mean cosine of the embedding to the exact one, all layers swapped"),
        )
    ]
    spreads = ", ".join(f"{value:.1f}" for value in section["mean_squared_sum"])
    return [
        *tables,
        f"Mean |x + y|^2 by layer: {spreads}. {section['seconds']:.0f} seconds.",
    ]


def describe_task(name: str, section: dict[str, Any]) -> list[str]:
    """Returns the tables without and with fine-tuning, and |x + y|^2 before and after it."""
    exact = section["baselines"]["softmax"]["score"]
    title = f"{TASKS[name]}: {SCORES[name]}, {_text(exact)} with softmax"
    header = ["attention", *(f"{steps} steps" for steps in section["steps"])]
    scores = [
        [LABELS[one], *(_text(row["score"]) for row in rows)]
        for one, rows in section["tuned"].items()
    ]
    spreads = [
        [LABELS[one], *(_spread(row["spread_by_layer"]) for row in rows)]
        for one, rows in section["tuned"].items()
    ]
    tuned = f"{TASKS[name]}, {section['tuned_features']} features, fine-tuned"
    return [
        f"{title}\n\n{_against_features(section, 'score')}",
        f"{tuned}: {SCORES[name]}\n\n{markdown.table(header, scores)}",
        f"{tuned}: mean |x + y|^2, by layer\n\n{markdown.table(header, spreads)}",
        f"{section['seconds']:.0f} seconds.",
    ]


def _against_features(section: dict[str, Any], quantity: str) -> str:
    """Returns a table with a column for each number of features."""
    methods = section["methods"]
    sizes = list(next(iter(methods.values()), {}))
    rows = [
        [LABELS[name], _text(one[quantity]), *[""] * (len(sizes) - 1)]
        for name, one in section["baselines"].items()
    ]
    rows += [
        [LABELS[name], *(_text(by_size[m][quantity]) for m in sizes)]
        for name, by_size in methods.items()
    ]
    return markdown.table(["attention", *(f"m = {m}" for m in sizes)], rows)


def _text(summary: dict[str, float]) -> str:
    return f"{summary['mean']:.4f} ± {summary['standard_error']:.4f}"


def _quartiles(values: list[float]) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:.2g} ({low:.2g} to {high:.2g})"


def _spread(layers: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in layers)
