"""Fig. 6 and Eq. 26 of Simplex Random Features, other kernels, and a blog post's attention.

Shows:     closed forms and trials of mean squared errors
Command:   python -m experiments.kernel_mse.main --workdir=runs/kernel_mse
Hardware:  two CPU cores
Time:      6.5 minutes, and 4.5 for other kernels
Expected:  every mean whose tails the draws can see lies within five standard errors of its closed
           form
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0

    config.ratio = ConfigDict()
    config.ratio.dim = 64  # There are as many features.
    # Distances v = |x + y| of the trials.
    config.ratio.distances = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0)
    config.ratio.num_trials = 51_200

    config.gap = ConfigDict()
    # Dimensions of the curves and of the table of sign changes.
    config.gap.dims = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
    # Trials are made below the first root and where orthogonal features lose most.
    config.gap.trial_dims = (4, 8)
    config.gap.trial_distances = (1.0, 2.0, 3.5)  # z = |x - y|.
    config.gap.num_trials = 524_288

    config.kernels = ConfigDict()
    config.kernels.dims = (2, 8, 64, 128)
    # Trials are made at a distance of one length scale.
    config.kernels.trial_dims = (8, 64)
    config.kernels.num_trials = 100_000

    config.attention = ConfigDict()
    config.attention.length = 1024
    config.attention.dim = 16
    # The post goes from 16 to 192 in steps of 16.
    config.attention.num_features = (*range(16, 193, 16), 384, 768, 1536, 3072)
    config.attention.num_samples = 15
    return config
