"""Closed forms in float64 NumPy."""
