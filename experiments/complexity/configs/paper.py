"""Table 1 of Simplex Random Features, measured.

Shows:     time and memory of drawing and applying ORFs, SimRFs and SimRFs+, regular and fast
Command:   python -m experiments.complexity.main --workdir=runs/complexity
Hardware:  two CPU cores
Time:      6.5 minutes
Expected:  SimRFs take the time of ORFs at every d; exponents of matrices near 3 to draw and 2 in
           space, of fast ORFs and SimRFs near 1, times divided by log d
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    # As many features as dimensions; powers of two, which fast forms need no padding for.
    config.dims = (64, 128, 256, 512, 1024, 2048, 4096)
    # Where matrices would take too long.
    config.fast_dims = (8192, 16384, 32768, 65536, 131072, 262144)
    config.fit_points = 4  # Exponents are fitted to the largest dimensions of each curve.
    config.num_vectors = 64  # Of a batch; one vector is measured too.
    config.rounds = 200  # Calls of each mechanism, in turn.
    config.seconds = 5.0  # For each quantity at one dimension; then 3 rounds are enough.
    return config
