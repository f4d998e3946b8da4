"""Table 1 of Simplex Random Features: what the mechanisms cost, measured."""
