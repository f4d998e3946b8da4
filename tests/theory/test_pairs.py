import pytest

from simrf_jax._src.theory.pairs import coupled_rows
from tests.theory import oracle

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("block", ["regular", "square"])
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("dim", [2, 3, 8])
def test_against_a_loop_over_blocks(dim, coupling, block):
    for num_features in range(1, 6 * dim):
        expected = {}
        for rows, cosine in oracle.blocks(num_features, dim, coupling, block):
            if rows > 1:
                cosine = cosine[0] / cosine[1]
                expected[cosine] = expected.get(cosine, 0) + rows * (rows - 1) / num_features
        pairs = coupled_rows(num_features, dim, coupling, block).pairs
        assert {p.cosine: p.weight for p in pairs} == pytest.approx(expected, rel=1e-14)
        assert len(pairs) == len(expected)


def test_orthogonal_rows_in_one_dimension_are_not_coupled():
    assert coupled_rows(7, 1, "orthogonal", "regular").pairs == ()


def test_a_trillion_features():
    (pairs,) = coupled_rows(65 * 10**12, 64, "simplex", "regular").pairs
    assert pairs == (64.0, -1 / 64, "independent")
