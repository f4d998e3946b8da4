"""Closed forms beyond the paper: row blocks, small distances, other feature maps."""
