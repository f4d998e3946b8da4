"""Programs before and after a run: prepare, compare, report, evaluate and export."""
