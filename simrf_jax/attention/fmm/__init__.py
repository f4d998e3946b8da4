"""Near and far field blended."""
