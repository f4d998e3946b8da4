import numpy as np
import pytest
from mpmath import mp

from simrf_jax._src.theory.series import kummer

pytestmark = pytest.mark.fast


@pytest.mark.slow
@pytest.mark.parametrize("dims", [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [31, 32, 127, 128, 513]])
def test_kummer_to_absolute_precision(dims):
    y = np.array([0, 1e-6, 0.3, 1.2, 5, 12, 32, 60, 89.9, 90.1, 150, 5000])
    with mp.workdps(60):
        for dim in dims:
            exact = [float(mp.hyp1f1(dim, mp.mpf(dim) / 2, -mp.mpf(float(a)))) for a in y]
            np.testing.assert_allclose(kummer(y, dim), exact, rtol=0, atol=1e-15)
