"""Fig. 6 and Eq. 26 of Simplex Random Features, and the errors of attention in a blog post.

Shows:     closed forms of mean squared errors with trials upon them
Command:   python -m experiments.kernel_mse.main --workdir=runs/kernel_mse
Hardware:  two CPU cores
Time:      6.5 minutes
Expected:  every mean that the draws can see within five standard errors of its closed form
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.seed = 0

    config.ratio = ml_collections.ConfigDict()
    config.ratio.dim = 64  # And as many features.
    config.ratio.distances = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0, 1.5, 2.0, 3.0)
    config.ratio.num_trials = 51_200

    config.gap = ml_collections.ConfigDict()
    config.gap.dims = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
    # Where trials are made: below the first root and where orthogonal features lose most.
    config.gap.trial_dims = (4, 8)
    config.gap.trial_distances = (1.0, 2.0, 3.5)
    config.gap.num_trials = 524_288

    config.attention = ml_collections.ConfigDict()
    config.attention.length = 1024
    config.attention.dim = 16
    # The post has 16, 32, ..., 192.
    config.attention.num_features = (*range(16, 193, 16), 384, 768, 1536, 3072)
    config.attention.num_samples = 15
    return config
