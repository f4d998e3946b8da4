"""Fig. 7 of Simplex Random Features: how well random features approximate a Gram matrix."""
