import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from tests.features.vectors import vectors


@pytest.mark.slow
def test_the_general_combination_of_three_estimators():
    rng = np.random.default_rng(0)
    widths, offsets = (3, 4, 2), (0.5, 0.0)

    def one_side(n):
        return (
            [rng.normal(size=(n, m)).astype(np.float32) for m in widths],
            [rng.normal(size=(n, r)).astype(np.float32) for r in (2, 3)],
        )

    (phi_1, rho_1), (phi_2, rho_2) = one_side(5), one_side(6)
    bases = [a @ b.T for a, b in zip(phi_1, phi_2, strict=True)]
    weights = [a + r @ s.T for a, r, s in zip(offsets, rho_1, rho_2, strict=True)]
    expected = weights[0] * bases[0] + weights[1] * bases[1]
    expected += (1 - weights[0] - weights[1]) * bases[2]
    psi_1 = simrf_jax.hybrid.hybrid_features(phi_1, rho_1, offsets, side="query")
    psi_2 = simrf_jax.hybrid.hybrid_features(phi_2, rho_2, offsets, side="key")
    np.testing.assert_allclose(jnp.dot(psi_1, psi_2.T), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda x: simrf_jax.hybrid.hybrid_features([x, x[:2]], [x], [0.5], side="key"),
            ValueError,
            "bases and weights must have one leading shape",
        ),
        (
            lambda x: simrf_jax.hybrid.hybrid_features([x, x], [x], ["a"], side="key"),
            TypeError,
            "offsets must be numbers, got",
        ),
        (
            lambda x: simrf_jax.hybrid.hybrid_features([x[0, 0], x], [x], [0.5], side="key"),
            ValueError,
            r"each of bases must be \[\.\.\., dim\], got shape \(\)",
        ),
        (
            lambda x: simrf_jax.hybrid.hybrid_features([x], [], [], side="key"),
            ValueError,
            "p at least 1; got 0, 0 and 1",
        ),
        (
            lambda x: simrf_jax.hybrid.hybrid_features([x, x], [x, x], [0.5], side="key"),
            ValueError,
            "got 2, 1 and 2",
        ),
    ],
)
def test_refuses(call, error, match):
    with pytest.raises(error, match=match):
        call(jnp.asarray(vectors()))
