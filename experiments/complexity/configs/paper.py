"""Table 1 of Simplex Random Features (arXiv:2301.13856), measured.

Shows:     time and memory to draw and apply ORFs, SimRFs and SimRFs+, regular and fast
Command:   python -m experiments.complexity.main --workdir=runs/complexity
Hardware:  two CPU cores
Time:      6.5 minutes
Expected:  SimRFs take the time of ORFs at every d. Matrices have exponents near 3 for the time to
           draw and 2 for space. Fast ORFs and SimRFs have exponents near 1, after their times are
           divided by log d.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    # There are as many features as dimensions. Fast forms pad other sizes to powers of two.
    config.dims = (64, 128, 256, 512, 1024, 2048, 4096)
    # Matrices would take too long in these dimensions.
    config.fast_dims = (8192, 16384, 32768, 65536, 131072, 262144)
    config.fit_points = 4  # Exponents are fitted to the largest dimensions of each curve.
    config.num_vectors = 64  # Vectors in a batch; a single vector is measured too.
    config.rounds = 200  # Calls of each method, which alternate.
    config.seconds = 5.0  # Time budget for each quantity in one dimension.
    return config
