"""One file for each run."""
