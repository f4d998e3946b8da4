"""Configs, one file for each run."""
