import functools
import os
import typing

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from simrf_jax import theory
from simrf_jax._src import checks
from simrf_jax._src.attention.fmm import blend
from simrf_jax._src.attention.inputs.call import contract
from simrf_jax._src.attention.random_features.state import AttentionState
from simrf_jax._src.features.log_space import half_squared_norm
from simrf_jax._src.projections import couplings, hadamard, rotations, row_blocks
from simrf_jax._src.theory import arguments
from simrf_jax._src.theory.quadrature import log_hyp0f1
from tests import run_time_types

pytestmark = pytest.mark.fast
# conftest.py installs the checks only then; CI runs the fast tier with them.
checks_installed = pytest.mark.skipif(
    os.environ.get("SIMRF_CHECK_TYPES") != "1", reason="SIMRF_CHECK_TYPES=1 checks annotations."
)


@checks_installed
def test_a_wrong_type_is_found():
    with pytest.raises(jaxtyping.TypeCheckError, match=r"quadrature(.|\n)*Float64"):
        log_hyp0f1(0.5, np.ones(3, np.float32))


@checks_installed
def test_a_wrong_shape_is_found():
    signs = jnp.ones((4, 8), jnp.int8)  # rotate_back ignores the fourth factor.
    with pytest.raises(jaxtyping.TypeCheckError, match=r"rotate_back(.|\n)*3 n"):
        hadamard.rotate_back(jnp.ones((2, 8)), signs)


# Each would broadcast, or return something else, if nobody looked.
WRONG_IN_ATTENTION = {
    "the length of a far field": (
        lambda: blend(jnp.ones((3, 2, 4)), [jnp.ones((1, 2, 4))], 1.0, 1.0),
        r"blend(.|\n)*\*lead N D",
    ),
    "the batch of maxima": (
        lambda: AttentionState(jnp.ones((2, 3, 5, 4)), jnp.ones((2, 3, 5))).in_units_of(
            jnp.ones((1, 3, 5))
        ),
        r"in_units_of(.|\n)*B K num_features columns",
    ),
    "a condition without heads": (
        lambda: AttentionState(jnp.ones((3, 3, 5, 4)), jnp.ones((3, 3, 5))).poison(
            jnp.ones((3, 1, 1), bool)
        ),
        r"poison(.|\n)*B K",
    ),
    "a condition of two axes, under jit": (
        lambda: jax.jit(AttentionState.where)(
            AttentionState(jnp.ones((3, 3, 5, 4)), jnp.ones((3, 3, 5))), jnp.ones((3, 1), bool)
        ),
        r"where(.|\n)* B",
    ),
    "products of integers": (
        lambda: contract("ab,bc->ac", jnp.ones((2, 2), int), jnp.ones((2, 2), int)),
        r"contract(.|\n)*Float",
    ),
}


@checks_installed
@pytest.mark.parametrize("name", WRONG_IN_ATTENTION)
def test_a_wrong_shape_inside_attention_is_found(name):
    call, match = WRONG_IN_ATTENTION[name]
    jax.clear_caches()  # A program that is known is not traced again.
    with pytest.raises(jaxtyping.TypeCheckError, match=match):
        call()


@checks_installed
def test_a_wrong_name_is_found():
    with pytest.raises(
        jaxtyping.TypeCheckError, match=r"orthogonal_blocks(.|\n)*'regular', 'square'"
    ):
        row_blocks.orthogonal_blocks(8, 4, "triangular")


@checks_installed
def test_shapes_are_checked_under_transformations():
    norms = jax.jit(jax.vmap(functools.partial(half_squared_norm, dtype=jnp.float32)))
    assert norms(jnp.ones((3, 4))).shape == (3, 1)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"half_squared_norm(.|\n)*\*batch dim"):
        norms(jnp.ones((3, 4), int))


@jaxtyping.jaxtyped(typechecker=run_time_types.checked)
def doubled(x: jaxtyping.Float[np.ndarray, " n"], refuse: bool) -> jaxtyping.Float[np.ndarray, "2"]:
    if refuse:
        checks.positive_int("x", x)
    return 2 * x


def test_what_the_library_refuses_keeps_its_message():
    with pytest.raises(TypeError, match="x must be an integer") as raised:
        doubled(np.ones((2, 2)), refuse=True)
    assert not isinstance(raised.value, jaxtyping.TypeCheckError)


@pytest.mark.parametrize("shape", [(2, 2), (3,)])
def test_what_the_library_does_not_refuse_is_found(shape):
    with pytest.raises(jaxtyping.TypeCheckError, match="doubled"):
        doubled(np.ones(shape), refuse=False)


def test_lists_of_names_and_tables_of_rules_agree():
    rules = couplings.COUPLED
    assert ("iid", *rules) == typing.get_args(couplings.Coupling)
    fixed = tuple(name for name, rule in rules.items() if not rule.weight_dependent)
    assert fixed == typing.get_args(couplings.FixedCoupling)
    of_one_angle = {
        name
        for name in fixed
        if all(
            isinstance(each.block, row_blocks.RowBlock)
            for each in rules[name].blocks(4, 4, "regular")
        )
    }
    assert {"iid", *of_one_angle} == {*typing.get_args(arguments.PairCoupling)}
    with_closed_forms = {*typing.get_args(arguments.ClosedFormCoupling)}
    assert {"iid", *of_one_angle, "cross_polytope"} == with_closed_forms
    assert tuple(rotations.ROTATIONS) == typing.get_args(rotations.Rotation)


def test_numbers_are_floats_of_any_kind():
    assert theory.log_conformity(1, 4, coupling="iid") == 1
