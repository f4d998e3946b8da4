"""Attention converges to softmax attention as docs/results/errors.md says, on fewer trials."""

import jax
import numpy as np
import pytest

from benchmarks import convergence
from tests.standard_errors import assert_less, assert_mean

NUM_FEATURES = (256, 1024, 4096)
COUPLINGS = ("iid", "orthogonal", "simplex")


def errors(dim, scale):
    def run(num_features, coupling):
        keys = jax.random.split(jax.random.key(1), 100)  # The same for all: paired trials.
        return convergence.relative_errors(
            keys, dim=dim, scale=scale, num_features=num_features, coupling=coupling
        )

    return {name: np.array([run(m, name) for m in NUM_FEATURES]) for name in COUPLINGS}


@pytest.mark.slow
def test_error_falls_as_one_over_the_root_and_couplings_stand_in_order():
    samples = errors(dim=64, scale=0.25)
    for name in COUPLINGS:
        assert_mean(convergence.slopes(samples[name], NUM_FEATURES), -0.5)
    for row in range(len(NUM_FEATURES)):
        iid, orthogonal, simplex = (np.log(samples[name][row]) for name in COUPLINGS)
        assert_less(orthogonal, iid)
        assert_less(simplex, orthogonal)


@pytest.mark.slow
def test_no_coupling_is_worse_where_theory_sees_little_between_them():
    samples = errors(dim=64, scale=0.5)
    ratios = [convergence.predicted_ratio(name, 64, 0.5) for name in COUPLINGS]
    assert 0.9 < ratios[2] < ratios[1] < ratios[0] == 1
    for better, worse in [("orthogonal", "iid"), ("simplex", "orthogonal")]:
        gap = np.mean(np.log(samples[better] / samples[worse]), axis=0)
        assert gap.mean() < 5 * gap.std(ddof=1) / np.sqrt(len(gap))
