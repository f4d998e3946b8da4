"""Tables of the results, in Markdown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.harness import markdown
from experiments.swap.looks import LABELS, SCORES, TASKS
from experiments.swap.predicted import CASES


def describe(results: dict[str, Any]) -> list[str]:
    """Returns paragraphs and tables for each section of the results."""
    sections: dict[str, Callable[[dict[str, Any]], list[str]]] = {
        "predicted": describe_predicted,
        "predicted_heads": describe_predicted_heads,
        "encoder": describe_encoder,
        "kinds": describe_kinds,
    }
    sections |= {name: functools.partial(describe_task, name) for name in TASKS}
    texts: list[str] = []
    for name, describe_section in sections.items():
        if name in results:
            texts += describe_section(results[name])
            texts.append(f"{results[name]['seconds']:.0f} seconds.")
    return texts


def describe_predicted(section: dict[str, Any]) -> list[str]:
    """Returns the tables of predicted errors and of measured ones over predicted ones."""
    header = ["features", *(f"length {length:g}" for length in section["lengths"])]
    cases = {CASES[name].label: rows for name, rows in section["cases"].items()}
    title = f"Attention to random keys, m = {section['num_features']}"
    errors = "predicted relative squared error"
    return [
        _table(f"{title}: {errors}", header, cases, lambda row: f"{row['predicted']['mean']:.2e}"),
        _table(
            f"{title}: measured over predicted error", header, cases, lambda x: _text(x["ratio"])
        ),
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
        f"heads and seeds\n\n{table}"
    ]


def describe_encoder(section: dict[str, Any]) -> list[str]:
    """Returns the tables of errors and of cosines, and the mean |x + y|^2 of each layer."""
    error = "mean relative squared error of a head's outputs, given exact inputs"
    cosine = "mean cosine of the embedding to the exact one, all layers swapped"
    return [
        _against_features(f"all-MiniLM-L6-v2: {error}", section, "error"),
        _against_features(f"all-MiniLM-L6-v2: {cosine}", section, "cosine"),
        f"Mean |x + y|^2 by layer: {_spread(section['mean_squared_sum'])}.",
    ]


def describe_kinds(section: dict[str, Any]) -> list[str]:
    """Returns the tables of errors and cosines on kinds of text that nothing was fitted to."""
    texts = []
    for length, methods in section["lengths"].items():
        title = f"all-MiniLM-L6-v2, {length} tokens, m = {section['num_features']}"
        header = ["attention", *next(iter(methods.values()))]
        for quantity in ("error", "cosine"):
            rows = {
                LABELS[name]: [found[quantity] for found in by_kind.values()]
                for name, by_kind in methods.items()
            }
            texts += [_table(f"{title}: {quantity}", header, rows, _text)]
    return texts


def describe_task(name: str, section: dict[str, Any]) -> list[str]:
    """Returns the tables without and with fine-tuning, and |x + y|^2 before and after it."""
    exact = _text(section["baselines"]["softmax"]["score"])
    header = ["attention", *(f"{steps} steps" for steps in section["steps"])]
    rows = {LABELS[one]: row for one, row in section["tuned"].items()}
    tuned = f"{TASKS[name]}, {section['tuned_features']} features, fine-tuned"
    spread = f"{tuned}: mean |x + y|^2, by layer"
    title = f"{TASKS[name]}: {SCORES[name]}, {exact} with softmax"
    return [
        _against_features(title, section, "score"),
        _table(f"{tuned}: {SCORES[name]}", header, rows, lambda row: _text(row["score"])),
        _table(spread, header, rows, lambda row: _spread(row["spread_by_layer"])),
    ]


def _table(
    title: str, header: list[str], rows: Mapping[str, list[Any]], cell: Callable[[Any], str]
) -> str:
    """Returns a table with a title, whose rows have a label and cells."""
    return f"{title}\n\n{markdown.table(header, [[x, *map(cell, row)] for x, row in rows.items()])}"


def _against_features(title: str, section: dict[str, Any], quantity: str) -> str:
    """Returns a table with a column for each number of features."""
    sizes = list(next(iter(section["methods"].values()), {}))
    rows = {
        LABELS[name]: [one[quantity], *[None] * (len(sizes) - 1)]
        for name, one in section["baselines"].items()
    }
    for name, by_size in section["methods"].items():
        rows[LABELS[name]] = [by_size[m][quantity] for m in sizes]
    header = ["attention", *(f"m = {m}" for m in sizes)]
    return _table(title, header, rows, lambda found: _text(found) if found else "")


def _text(summary: dict[str, float]) -> str:
    return f"{summary['mean']:.4f} ± {summary['standard_error']:.4f}"


def _quartiles(values: list[float]) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:.2g} ({low:.2g} to {high:.2g})"


def _spread(layers: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in layers)
