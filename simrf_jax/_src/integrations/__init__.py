"""Adapters for Flax and scikit-learn."""
