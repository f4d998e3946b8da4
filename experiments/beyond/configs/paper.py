"""Numbers and figures of the README, which goes beyond Simplex Random Features (arXiv:2301.13856).

Shows:     regular row blocks compared with those of Eq. 9, SimRFs+ at small distances, the
           couplings of each feature map, and how far the gain of any of them reaches
Command:   python -m experiments.beyond.main --workdir=runs/beyond
Hardware:  two CPU cores
Time:      half a minute
Expected:  ratios to iid at d = 64 and v = 0.5: 0.892 (Eq. 9) and 0.134 (regular) for 8 features,
           0.0425 and 0.0261 for 130 features; at v = 0.1: 0.0004 for SimRFs+, 0.0082 for SimRFs
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0
    config.blocks = ConfigDict()
    config.blocks.dim = 64
    config.blocks.distance = 0.5  # v = |x + y| of the curve by number of features.
    config.blocks.num_features = 130  # For the curve by v; the paper's Performer has 130.
    config.plus = ConfigDict()
    config.plus.dims = (3, 6, 64)  # There are as many features as dimensions.
    config.plus.distances = (0.03, 0.1, 0.3, 0.5, 0.7, 1.0)  # Trials miss the tails beyond 1.
    config.plus.num_entries = 30_000_000  # Entries of all W of one dimension: trials times d^2.
    config.maps = ConfigDict()
    config.maps.dims = (4, 64)
    config.reach = ConfigDict()
    config.reach.dim = 64
    config.reach.num_features = 128
    # The six layers of all-MiniLM-L6-v2 have mean |x + y|^2 from 7.5 to 21.4; see experiments/swap.
    config.reach.trained = (2.74, 4.63)
    return config
