"""The experiments of the papers, one folder each; run as ``python -m experiments.NAME.main``."""
