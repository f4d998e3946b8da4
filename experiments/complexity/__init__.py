"""Table 1 of Simplex Random Features: measured time and memory of ORFs, SimRFs and SimRFs+."""
