"""Tables of the README."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.complexity.measure import FAST, MATRICES
from experiments.harness import markdown
from experiments.harness.style import LABELS

NAMES = (*MATRICES, *FAST)
COUPLINGS = ("orthogonal", "simplex", "simplex_plus")
# Orders of growth from Table 1 and Sec. 4.2 of the paper, by coupling.
PAPER_TIME = {"": ["O(d^3)"] * 3, "fast_": ["O(d log d)", "O(d log d)", "O(d^3)"]}
PAPER_SPACE = {"": ["O(d^2)"] * 3, "fast_": ["O(d)", "O(d)", "O(d^2)"]}


def label(name: str) -> str:
    """Returns the paper's name of a method.

    Example:
      >>> label("simplex"), label("fast_orthogonal")
      ('SimRFs', 'fast ORFs')
    """
    coupling = name.removeprefix("fast_")
    return LABELS[coupling] if coupling == name else f"fast {LABELS[coupling]}"


def report(results: dict[str, Any]) -> str:
    """Returns all tables of the README."""
    tables = (table_1, exponents, draws, ratios, applies, memory, crossings)
    return "\n\n".join(table(results) for table in tables)


def table_1(results: dict[str, Any]) -> str:
    """Returns the paper's orders with the exponents of drawing W and applying it to one vector."""
    rows = []
    for prefix, form in (("", "regular"), ("fast_", "fast")):
        fits = [results["exponents"][prefix + coupling] for coupling in COUPLINGS]
        logs = [" log d" if prefix + coupling in FAST else "" for coupling in COUPLINGS]
        times = [fit["ms"]["draw_and_apply"] for fit in fits]
        rows += [
            [f"time, {form}", "paper", *PAPER_TIME[prefix]],
            ["", "ours", *(_power(p) + log for p, log in zip(times, logs, strict=True))],
            [f"space, {form}", "paper", *PAPER_SPACE[prefix]],
            ["", "ours", *(_power(fit["bytes"]["held"]) for fit in fits)],
        ]
    return markdown.table(["", "", *(LABELS[coupling] for coupling in COUPLINGS)], rows)


def exponents(results: dict[str, Any]) -> str:
    """Returns all exponents, with the dimensions to which they are fitted."""
    rows = []
    for name in NAMES:
        fit = results["exponents"][name]
        log = " log d" if name in FAST else ""
        times = [_power(fit["ms"][what]) + log for what in ("draw", "apply", "apply_batch")]
        memories = [_power(fit["bytes"][what]) for what in ("draw", "apply")]
        rows.append(
            [label(name), f"{fit['first_dim']:,} to {fit['last_dim']:,}", *times, *memories]
        )
    header = ["", "d", "draw", "apply to one", f"to {results['num_vectors']:,}"]
    return markdown.table([*header, "buffers of draw", "of apply"], rows)


def draws(results: dict[str, Any]) -> str:
    """Returns the milliseconds to draw, and the number of rounds."""
    rows = []
    for dim, here in _by_dim(results):
        medians = (_number(here[n]["ms"]["draw"][1]) if n in here else "" for n in NAMES)
        rounds = (here[n]["rounds"] for n in ("simplex", "fast_simplex") if n in here)
        rows.append([f"{dim:,}", *medians, " and ".join(map(str, rounds))])
    return markdown.table(["draw, ms: d", *map(label, NAMES), "rounds"], rows)


def ratios(results: dict[str, Any]) -> str:
    """Returns the ratios of the times to draw: median and quartiles over the rounds."""
    rows = []
    for dim, _ in _by_dim(results):
        cells = []
        for points in results["ratios"].values():
            here = [map(_number, point["quartiles"]) for point in points if point["dim"] == dim]
            cells.append("".join(f"{median} ({low} to {high})" for low, median, high in here))
        rows.append([f"{dim:,}", *cells])
    pairs = [" / ".join(map(label, ratio.split(" / "))) for ratio in results["ratios"]]
    return markdown.table(["draw, ratio: d", *pairs], rows)


def applies(results: dict[str, Any]) -> str:
    """Returns the milliseconds to project one vector and a batch."""
    names = ("simplex", *FAST)
    rows = []
    for dim, here in _by_dim(results):
        cells = [
            _number(here[name]["ms"][quantity][1]) if name in here else ""
            for quantity in ("apply", "apply_batch")
            for name in names
        ]
        rows.append([f"{dim:,}", *cells])
    batch = [f"{label(name)}, {results['num_vectors']:,} vectors" for name in names]
    return markdown.table(["apply, ms: d", *map(label, names), *batch], rows)


def memory(results: dict[str, Any]) -> str:
    """Returns the KiB that projections hold, and that drawing and applying them takes."""
    names = ("orthogonal", "simplex", "simplex_plus", "fast_simplex")
    rows = []
    for dim, here in _by_dim(results):
        points = [here[name]["bytes"] if name in here else {} for name in names]
        sizes = [[_number(p[x] / 1024) for x in ("held", "draw", "apply") if p] for p in points]
        rows.append([f"{dim:,}", *map(" / ".join, sizes)])
    return markdown.table(["held / draw / apply, KiB: d", *map(label, names)], rows)


def crossings(results: dict[str, Any]) -> str:
    """Says from which dimension on fast SimRFs take less time by more than the quartiles."""
    dense, fast = (results["curves"][name] for name in ("simplex", "fast_simplex"))
    whats = {"draw": "draw", "apply": "apply to one vector", "apply_batch": "apply to a batch"}
    lines = []
    for quantity, what in whats.items():
        where = "at none of these d"
        for d, f in reversed([*zip(dense, fast, strict=False)]):
            if d["ms"][quantity][0] <= f["ms"][quantity][2]:
                break
            where = f"from d = {d['dim']:,} on"
        lines.append(f"Fast SimRFs are the faster to {what}: {where}.")
    return "\n".join(lines)


def _by_dim(results: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each dimension with the points of the methods that are measured in it."""
    for dim in [point["dim"] for point in results["curves"]["fast_simplex"]]:
        curves = results["curves"].items()
        yield dim, {name: p for name, points in curves for p in points if p["dim"] == dim}


def _power(fit: tuple[float, float]) -> str:
    return f"d^{fit[0]:.2f} ({fit[1]:.2f})"


def _number(value: float) -> str:
    """Formats a number with three digits and without an exponent."""
    return f"{float(f'{value:.3g}'):,.4g}" if value < 1000 else f"{value:,.0f}"
