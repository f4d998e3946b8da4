"""Fig. 7 of Simplex Random Features, with more features, trials and couplings.

Shows:     the squared error of the Gram matrix of 64 points, against the number of features
Command:   python -m experiments.gram.main --workdir=runs/gram
Hardware:  two CPU cores
Time:      3.5 minutes
Expected:  simplex < orthogonal < iid at every size; closed forms at m = d, in the mean over data
           sets, of 0.0051, 0.0110 and 0.0151
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.dim = 64
    config.num_points = 64
    config.scale = 0.1  # Standard deviation of the coordinates of the points.
    # Numbers of features, in multiples of dim; the paper's plot goes from 1 to 10.
    config.multiples = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 32)
    # Projections of d features; of 2 d features half as many, and so on: squared errors have heavy
    # tails, which the mean over more features tames.
    config.num_trials = 20_000
    config.batch_size = 125  # Trials at a time; divides the numbers of most sizes.
    return config
