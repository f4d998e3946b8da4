"""Figs. 2 to 5 of Simplex Random Features: the couplings and their RF-conformity."""
