"""Tables 2 and 3, Figs. 8 and 10 of Simplex Random Features (arXiv:2301.13856).

Shows:     accuracy of kernel regression on eight UCI data sets, with exact and random features
Command:   python -m experiments.kernel_regression.main --workdir=runs/kernel_regression
Hardware:  two CPU cores
Time:      8 minutes: tables 234 seconds (69 with 1,000 trials), curves 182, search 60
Expected:  SimRFs > ORFs > IIDRFs with d features in paired trials on all data sets, except that
           ORFs and IIDRFs do not differ on yeast; accuracies within 0.05 of the paper's on wifi
           and within 0.01 on the others
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # Of all projections.
    config.data_dir = ""  # Stands for SIMRF_DATA_DIR or, without it, a download to a cache.
    config.datasets = ("abalone", "banknote", "car", "yeast", "cmc", "nursery", "wifi", "chess")
    config.parts = ("tables", "curves", "search")
    config.num_trials = (
        10_000  # Of each entry of the tables; gives standard errors similar to the paper's.
    )
    config.curve_trials = 500  # Of each point of Fig. 8, as published.
    config.multiples = (1, 2, 4, 10)  # Numbers of features over dim in Fig. 8, as published.
    config.search_trials = 40  # Of each point of Fig. 10.
    config.search_multiple = 10  # Number of features over dim, as in Fig. 10.
    config.num_sigmas = 20  # As published, from 0.1 to 2; this grid has the published sigmas.
    return config
