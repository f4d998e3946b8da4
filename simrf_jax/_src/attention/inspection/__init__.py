"""Attention matrices that random features imply, and their error."""
