"""Measurements of speed, memory and accuracy; run one as ``python -m benchmarks.NAME``."""
