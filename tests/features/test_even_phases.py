"""Phases that need no randomness."""

import numpy as np
import pytest

from simrf_jax._src.features.trigonometric import even_phases

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("num_features", [2, 3, 7, 130])
def test_the_bias_of_random_phases_is_removed_exactly(num_features):
    # cos(u + b) cos(v + b) = (cos(u - v) + cos(u + v + 2b)) / 2, of which the second term must go.
    phases = even_phases(num_features)
    np.testing.assert_allclose(np.exp(2j * phases).sum(), 0, atol=1e-12)


def test_of_one_feature_at_zero():
    np.testing.assert_allclose(np.cos(2 * even_phases(1)), 0, atol=1e-15)
