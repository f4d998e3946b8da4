import numpy as np
import pytest

from simrf_jax._src.projections.row_blocks import (
    CrossPolytope,
    RowBlock,
    cross_polytope_blocks,
    orthogonal_blocks,
    simplex_blocks,
    simplex_vertices,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("num_vertices", [2, 3, 4, 9, 65, 512])
def test_vertices_are_those_of_a_regular_simplex(num_vertices):
    vertices = simplex_vertices(num_vertices)
    gram = np.full((num_vertices, num_vertices), -1 / (num_vertices - 1))
    np.fill_diagonal(gram, 1)
    np.testing.assert_allclose(vertices @ vertices.T, gram, atol=1e-13)
    np.testing.assert_allclose(vertices.sum(axis=0), 0, atol=1e-13)


def test_vertices_are_the_rows_of_equation_9():
    d = 5
    ones = np.array([1, 1, 1, 1, 0])
    rows = [
        np.sqrt(d / (d - 1)) * np.eye(d)[i] - (np.sqrt(d) + 1) / (d - 1) ** 1.5 * ones
        for i in range(d - 1)
    ]
    rows.append(ones / np.sqrt(d - 1))
    np.testing.assert_allclose(simplex_vertices(d), np.array(rows)[:, :-1], atol=1e-14)
    np.testing.assert_array_equal(np.array(rows)[:, -1], 0)


def sizes(row_blocks):
    return [block.num_rows for block, count in row_blocks for _ in range(count)]


@pytest.mark.parametrize("dim", [2, 3, 8, 64])
def test_regular_blocks_are_full_and_leave_no_row_alone(dim):
    for num_features in range(1, 5 * dim):
        rows = sizes(simplex_blocks(num_features, dim, "regular"))
        assert sum(rows) == num_features
        assert max(rows) <= dim + 1
        assert min(rows) >= min(2, num_features)
        # No smaller number of row blocks would do.
        assert len(rows) == -(-num_features // (dim + 1))


@pytest.mark.parametrize("blocks", [orthogonal_blocks, simplex_blocks])
def test_square_and_orthogonal_blocks_are_full_but_for_the_last(blocks):
    for num_features in range(1, 30):
        rows = sizes(blocks(num_features, 8, "square"))
        assert sum(rows) == num_features
        assert all(size == 8 for size in rows[:-1])


def test_blocks_of_the_papers_performer():
    assert simplex_blocks(130, 64, "regular") == [(RowBlock(65, 65), 2)]
    assert simplex_blocks(130, 64, "square") == [(RowBlock(64, 64), 2), (RowBlock(2, 64), 1)]
    assert orthogonal_blocks(130, 64, "regular") == [
        (RowBlock(64, None), 2),
        (RowBlock(2, None), 1),
    ]


@pytest.mark.parametrize(
    "block", [RowBlock(5, 5), RowBlock(3, 8), RowBlock(1, 1), RowBlock(1, 4), RowBlock(4, None)]
)
def test_directions_have_the_cosine_they_say(block):
    s = block.directions()
    np.testing.assert_allclose(s @ s.T, np.where(np.eye(len(s)), 1, block.cosine), atol=1e-14)


def test_square_remainder_is_cut_from_a_full_simplex():
    (full, _), (rest, _) = simplex_blocks(11, 8, "square")
    np.testing.assert_array_equal(rest.directions(), full.directions()[:3])


@pytest.mark.parametrize("block", ["regular", "square"])
def test_cross_polytopes_are_full_but_for_the_last(block):
    for num_features in range(1, 40):
        rows = sizes(cross_polytope_blocks(num_features, 8, block))
        assert sum(rows) == num_features
        assert all(size == 16 for size in rows[:-1])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
def test_neighbors_in_a_cross_polytope_are_negatives_of_each_other(num_rows):
    s = CrossPolytope(num_rows).directions()
    row = np.arange(num_rows)
    gram = np.eye(num_rows) - (row[:, None] == (row ^ 1))
    np.testing.assert_array_equal(s @ s.T, gram)
