"""Measurements of a run, its log, and its figures."""
