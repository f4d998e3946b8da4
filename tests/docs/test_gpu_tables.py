"""The times of a GPU on the pages are those of the files in ``benchmarks/results``."""

import json

import pytest

from benchmarks import gpu_attention
from tests.docs.pages import ROOT

pytestmark = pytest.mark.fast
RESULTS = ROOT / "benchmarks" / "results"


def rows_of(page, head):
    """Returns the cells of each row of the table of a page whose first line begins with a head."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    [start] = [i for i, line in enumerate(lines) if line.startswith(head)]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def rounded(number):
    """Returns a time as the tables have it: two digits below 10, no decimals above."""
    return f"{number:,.2g}" if number < 10 else f"{number:,.0f}"


def test_device_times_of_attention():
    rows = json.loads((RESULTS / "gpu_attention.json").read_text())["rows"]
    names = ("candidate", "mode", "batch", "length", "backward")
    medians = {tuple(row[x] for x in names): row["microseconds"][1] for row in rows}
    both = [(x, mode) for mode in gpu_attention.PLAIN for x in ("kernels", "cuDNN")]
    by_xla = [("XLA", mode) for mode in gpu_attention.MODES]
    heads = {"bidirectional, kernels": (both, 5), "bidirectional | causal": (by_xla, 2)}
    for head, (columns, num_rows) in heads.items():
        table = rows_of("explanation/speed.md", f"| sequences x tokens | {head}")
        assert len(table) == num_rows
        for size, *cells in table:
            batch, length = (int(x.replace(",", "")) for x in size.split(" x "))
            for column, cell in zip(columns, cells, strict=True):
                place = *column, batch, length
                found = " / ".join(rounded(medians[*place, backward]) for backward in (False, True))
                assert cell == found, place


def test_times_of_first_contact():
    pieces = json.loads((RESULTS / "first_contact_h200.json").read_text())["pieces"]
    table = rows_of("how_to/accelerator.md", "| tokens |")
    assert len(table) == 5
    columns = [("bidirectional", name) for name in ("ours", "cudnn", "exact")]
    columns += [("causal", name) for name in ("ours", "pallas_gpu", "cudnn", "exact")]
    for length, *cells in table:
        rows = pieces[f"times, {length.replace(',', '')} tokens"]
        medians = {
            (row["kind"], row["candidate"]): f"{row['milliseconds'][1]:.2g}"
            for row in rows
            if "milliseconds" in row
        }
        for (kind, name), cell in zip(columns, cells, strict=True):
            forward = medians.get((kind, name))
            backward = medians.get((f"{kind}, with backward", name), "-")
            assert cell == ("-" if forward is None else f"{forward} / {backward}"), (length, name)


def test_every_check_of_first_contact_was_right():
    pieces = json.loads((RESULTS / "first_contact_h200.json").read_text())["pieces"]
    checks = [row for name, rows in pieces.items() if name.startswith("check") for row in rows]
    assert len(checks) == 24
    assert not [row for row in checks if row["faults"]]
