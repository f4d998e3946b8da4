"""Draws of every law for a thousand keys at once."""

import itertools

import jax
import numpy as np
import pytest

from simrf_jax import DrawOptions, draw_fast_projection
from simrf_jax._src.projections.couplings import COUPLINGS
from simrf_jax._src.projections.norms import NORMS
from simrf_jax._src.projections.rotations import ROTATIONS
from simrf_jax._src.projections.row_blocks import BLOCK_MODES
from simrf_jax.calibration import draw_mixture_projection
from simrf_jax.hybrid import draw_bipolar_projection

NUM_KEYS, DIM = 1_000, 5


def laws():
    """Yields each combination of options that ``draw_projection`` accepts."""
    for options in itertools.product(COUPLINGS, BLOCK_MODES, ROTATIONS, NORMS):
        try:
            yield "-".join(options), DrawOptions(*options)
        except ValueError:  # Not all couplings have the rows that all norms couple.
            continue


LAWS = dict(laws())
OTHERS = {
    **{
        f"fast-{coupling}-{block}": (
            lambda key, coupling=coupling, block=block: draw_fast_projection(
                key, 13, DIM, coupling=coupling, block=block
            )
        )
        for coupling in ("orthogonal", "simplex", "cross_polytope")
        for block in BLOCK_MODES
    },
    "bipolar": lambda key: draw_bipolar_projection(key, 13, 6, DIM),
    "mixture": lambda key: draw_mixture_projection(
        key, np.eye(2, DIM, dtype="f4"), 13, weights=(0.3, 0.7)
    ),
}


def check(draw, least_different=NUM_KEYS):
    keys = jax.random.split(jax.random.key(0), NUM_KEYS)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(jax.vmap(draw))(keys))]
    for number in (0, 1, NUM_KEYS - 1):
        alone = jax.tree.leaves(draw(jax.random.split(jax.random.key(0), NUM_KEYS)[number]))
        for leaf, one in zip(leaves, alone, strict=True):
            np.testing.assert_allclose(leaf[number], one, rtol=1e-5, atol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in leaves)
    flat = np.concatenate([leaf.reshape(NUM_KEYS, -1).astype("f8") for leaf in leaves], axis=1)
    assert len(np.unique(flat, axis=0)) >= least_different


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_a_thousand_draws_of_each_law(name):
    # 13 rows of 5 dimensions make whole row blocks and a remainder, and 8 dimensions with padding.
    # A Hadamard rotation has signs alone to draw, and with fixed norms nothing else is random.
    options = LAWS[name]
    is_finite = options.rotation == "hadamard" and options.norms in ("sqrt_dim", "radau")
    is_finite &= options.coupling != "iid"  # Which rotations leave as it is.
    check(lambda key: options.draw(key, 13, DIM), 900 if is_finite else NUM_KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_thousand_draws_of_each_other_kind(name):
    check(OTHERS[name])
