"""Figs. 2 to 5 of Simplex Random Features: couplings, and how alike they make random features."""
