"""Checks of numbers that the papers print, or that follow from them, to the printed digits."""

import numpy as np
import pytest

from simrf_jax.theory import log_conformity, mse_ratio

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("coupling", "expected"),
    [
        ("orthogonal", [0.99525, 0.95906, 0.73109, 0.73741, 0.87876, 0.99698]),
        ("simplex", [0.0082139, 0.0128266, 0.1704984, 0.4956880, 0.8176122, 0.9964066]),
    ],
)
def test_figure_6(coupling, expected):
    ratio = mse_ratio([0.1, 0.3, 1, 1.5, 2, 3], 64, 64, coupling=coupling)
    np.testing.assert_allclose(ratio, expected, atol=5.1e-6)


def test_minimum_of_figure_6():
    v = np.linspace(0.5, 2.5, 201)
    ratio = mse_ratio(v, 64, 64, coupling="orthogonal")
    assert v[ratio.argmin()] == pytest.approx(1.23)
    np.testing.assert_allclose(ratio.min(), 0.7068, atol=5.1e-5)


@pytest.mark.parametrize(
    ("dim", "expected"),
    [(2, 0.2146), (3, 0.1512), (4, 0.1164), (6, 0.0796), (16, 0.0307), (128, 0.0039)],
)
def test_simplex_at_small_distances(dim, expected):
    np.testing.assert_allclose(mse_ratio(0, dim, dim, coupling="simplex"), expected, atol=5.1e-5)
    # This holds for any number of features, if each row block is a regular simplex.
    more = mse_ratio(0, 5 * dim + 1, dim, coupling="simplex")
    np.testing.assert_allclose(more, mse_ratio(0, dim, dim, coupling="simplex"), rtol=1e-12)


def test_prefactor_of_section_5():
    np.testing.assert_allclose(mse_ratio(0, 64, 64, coupling="simplex"), 0.00778175, atol=5e-9)


@pytest.mark.parametrize(("dim", "orthogonal", "simplex"), [(64, 0.0455, 0.0608), (2, 0.75, 1.25)])
def test_even_features_at_small_distances(dim, orthogonal, simplex):
    for features in ["hyperbolic", "trigonometric"]:
        for coupling, expected in [("orthogonal", orthogonal), ("simplex", simplex)]:
            ratio = mse_ratio(0, dim, dim, coupling=coupling, features=features)
            np.testing.assert_allclose(ratio, expected, atol=5.1e-5)


@pytest.mark.parametrize(
    ("dim", "percent", "atol"),
    [(3, 8.5, 0.05), (4, 4.8, 0.05), (6, 1.8, 0.05), (8, 0.8, 0.05), (16, 0.05, 0.005)],
)
def test_simplex_beats_orthogonal_for_trigonometric_features_near_2_9(dim, percent, atol):
    z = np.linspace(2, 4, 201)
    gap = mse_ratio(z, dim, dim, coupling="orthogonal", features="trigonometric")
    gap -= mse_ratio(z, dim, dim, coupling="simplex", features="trigonometric")
    np.testing.assert_allclose(100 * gap.max(), percent, atol=atol)


@pytest.mark.parametrize(
    ("dim", "root"),
    [(3, 3.311), (4, 3.081), (5, 2.990), (6, 2.955), (8, 2.960), (12, 3.082), (16, 3.262)],
)
def test_orthogonal_trigonometric_features_lose_beyond_the_first_root(dim, root):
    z = np.array([root - 1e-3, root + 1e-3])
    before, after = mse_ratio(z, dim, dim, coupling="orthogonal", features="trigonometric")
    assert before < 1 < after


def test_conformity_in_six_dimensions():
    for coupling, expected in [("iid", 2.718282), ("orthogonal", 2.579562), ("simplex", 2.181826)]:
        rho = np.exp(log_conformity(1.0, 6, coupling=coupling))
        np.testing.assert_allclose(rho, expected, atol=5.1e-7)


@pytest.mark.parametrize(
    ("num_features", "orthogonal", "first_rows", "regular"),
    [(2, 0.998, 0.985, 0.227), (8, 0.988, 0.892, 0.134), (32, 0.949, 0.522, 0.082)],
)
def test_fewer_features_than_dimensions(num_features, orthogonal, first_rows, regular):
    ratios = [
        mse_ratio(0.5, num_features, 64, coupling="orthogonal"),
        mse_ratio(0.5, num_features, 64, coupling="simplex", block="square"),
        mse_ratio(0.5, num_features, 64, coupling="simplex"),
    ]
    np.testing.assert_allclose(ratios, [orthogonal, first_rows, regular], atol=5.1e-4)


@pytest.mark.parametrize(
    ("num_features", "block", "v", "expected", "atol"),
    [
        (70, "regular", [0.1, 0.5, 1, 2], [0.00854, 0.0349, 0.189, 0.825], 5.1e-4),
        (130, "regular", [0.1, 0.5, 1, 2], [0.00814, 0.0261, 0.166, 0.816], 5.1e-4),
        (256, "regular", [0.1, 0.5, 1, 2], [0.00821, 0.0277, 0.170, 0.818], 5.1e-4),
        (130, "regular", [0, 0.1], [0.00778, 0.00814], 5.1e-6),
        (130, "square", [0, 0.5, 1], [0.0228, 0.0425, 0.183], 5.1e-4),
    ],
)
def test_blocks_in_64_dimensions(num_features, block, v, expected, atol):
    ratio = mse_ratio(v, num_features, 64, coupling="simplex", block=block)
    np.testing.assert_allclose(ratio, expected, atol=atol)


def test_no_row_is_left_alone():
    np.testing.assert_allclose(mse_ratio(0.1, 10, 8, coupling="simplex"), 0.064, atol=5.1e-4)
