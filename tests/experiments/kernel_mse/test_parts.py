import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import integrate, stats

import simrf_jax
from experiments.kernel_mse import blog as attention
from experiments.kernel_mse import mse_ratio, trigonometric_gap
from experiments.kernel_mse.blog import Curve
from simrf_jax import theory


@pytest.mark.fast
@pytest.mark.parametrize(("v", "power"), [(0.2, 2), (1.3, 2), (1.3, 4)])
def test_visible_share_is_that_of_the_integral(v, power):
    largest = stats.norm.isf(1e-4)

    def weighted(g):
        return math.exp(power * v * g) * stats.norm.pdf(g)

    seen, whole = (integrate.quad(weighted, -10, end)[0] for end in (largest, 16))
    assert mse_ratio.visible_share(np.array(v), 10**4, power) == pytest.approx(seen / whole)


@pytest.mark.fast
def test_relative_gap_is_what_the_ratio_lacks():
    z = np.array([0.01, 0.5, 1.4, 3.0, 4.0])
    for dim in (2, 5, 64):
        ratio = theory.mse_ratio(z, dim, dim, coupling="orthogonal", features="trigonometric")
        np.testing.assert_allclose(
            trigonometric_gap.relative_gap(z, dim), 1 - ratio, rtol=1e-9, atol=1e-12
        )


def exact_gap(z, dim):
    """Returns Eq. 26 divided by (m - 1) / m, with fifty digits."""
    with mpmath.workdps(50):
        t = mpmath.mpf(z) ** 2
        return mpmath.exp(-t) - mpmath.hyp1f1(dim, mpmath.mpf(dim) / 2, -t / 2)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("dim", "first"),
    [(3, 3.311), (4, 3.081), (5, 2.990), (6, 2.955), (8, 2.960), (16, 3.262), (32, 4.770)],
)
def test_sign_changes_are_roots(dim, first):
    roots = trigonometric_gap.sign_changes(dim)
    assert roots[0] == pytest.approx(first, abs=6e-4)
    signs = [mpmath.sign(exact_gap(z, dim)) for z in (1.0, *(root + 1e-3 for root in roots))]
    assert signs == [(-1) ** i for i in range(len(roots) + 1)]
    for root in roots:
        assert exact_gap(root - 1e-3, dim) * exact_gap(root + 1e-3, dim) < 0
    assert all(exact_gap(z, dim) > 0 for z in np.linspace(0.1, roots[0] - 1e-3, 100))


@pytest.mark.fast
def test_no_sign_change_is_made_of_rounding():
    assert trigonometric_gap.sign_changes(2) == []
    assert all(exact_gap(z, 2) > 0 for z in np.linspace(0.1, 12, 100))
    # In 64 dimensions there is one change, where the gap is far below the resolution of float64.
    assert trigonometric_gap.sign_changes(64) == []
    assert all(exact_gap(z, 64) > 0 for z in np.linspace(0.1, 6.909, 200))
    assert -1e-20 < exact_gap(6.911, 64) < 0


def published(x, w, feature_map):
    """Returns the features of the post, which leave out the root of m."""
    product = np.einsum("...d,rd->...r", x, w)
    half = np.square(x).sum(axis=-1, keepdims=True) / 2
    if feature_map == "positive":
        return np.exp(product - half)
    waves = [np.sin(2 * np.pi * product), np.cos(2 * np.pi * product)]
    return np.exp(half) * np.concatenate(waves, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "curve", [Curve("iid", "trigonometric"), Curve("orthogonal", "trigonometric"),
              Curve("orthogonal", "positive")]
)  # fmt: skip
def test_as_written_is_the_estimate_of_the_post(curve):
    length, dim, size = 12, 4, 24
    with jax.enable_x64(True):
        key = jax.random.key(0)
        inputs = attention.draw_inputs(key, length, dim, 0.7)
        written = attention.draw_projection(key, size, dim, curve, as_written=True)
        found = attention.squared_error(inputs, written, feature_map=curve.feature_map)
    # The post's own w is N(0, I), or orthonormal rows divided by sqrt(m / d).
    w = np.asarray(written) / (2 * np.pi if curve.feature_map == "trigonometric" else 1)
    if curve.coupling == "orthogonal":
        for block in w.reshape(-1, dim, dim):
            np.testing.assert_allclose(block @ block.T, np.eye(dim) * dim / size, atol=1e-12)
    else:
        with jax.enable_x64(True):
            projection_key = jax.random.fold_in(jax.random.key(0), attention.PROJECTION)
            normal = simrf_jax.draw_projection(
                projection_key, size, dim, coupling="iid", dtype=jnp.float64
            )
        np.testing.assert_allclose(w, normal, rtol=1e-12)
    q, k, v = np.asarray(inputs)
    query, keys = (published(x / dim**0.25, w, curve.feature_map) for x in (q, k))
    weights = query @ keys.T
    estimate = weights @ v / weights.sum(axis=1, keepdims=True)
    logits = np.exp(q @ k.T / dim**0.5)
    exact = logits @ v / logits.sum(axis=1, keepdims=True)
    assert float(found) == pytest.approx(np.mean((estimate - exact) ** 2), rel=1e-9)
    uniform = np.mean((v.mean(axis=0) - exact) ** 2)
    with jax.enable_x64(True):
        assert float(attention.uniform_error(inputs)) == pytest.approx(uniform, rel=1e-9)


@pytest.mark.slow
def test_as_written_positive_attention_tends_to_one_answer_for_all_queries():
    curve = Curve("orthogonal", "positive")
    with jax.enable_x64(True):
        key = jax.random.key(0)
        inputs = attention.draw_inputs(key, 12, 4, 1.0)
        w = attention.draw_projection(key, 4096, 4, curve, as_written=True)
        found = float(attention.squared_error(inputs, w, feature_map="positive"))
        exact = np.asarray(attention.exact_attention(inputs))
    _, k, v = np.asarray(inputs)
    weights = np.exp(-np.square(k).sum(axis=1) / 4)  # The weights of keys k / d^(1/4).
    expected = np.mean((weights @ v / weights.sum() - exact) ** 2)
    assert found == pytest.approx(expected, rel=0.01)
    assert expected > 0.1 * np.mean(exact**2)
