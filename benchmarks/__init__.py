"""What is fast and exact, and how we know; run as ``python -m benchmarks.NAME``."""
