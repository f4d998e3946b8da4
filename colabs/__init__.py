"""Notebooks, and the tools that keep their outputs and their addresses."""
