"""Compares FLOPs with a count by hand, and with XLA's count where there is no loop."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import flops, pod_compile
from experiments.vit.configs import imagenet2012
from experiments.vit.training import sharding
from experiments.vit.training.train_step import build_program

ONE = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def count(function, *arguments):
    return flops.matmul_flops(jax.jit(function).trace(*arguments).jaxpr)


@pytest.mark.fast
def test_as_xla_without_loops():
    def function(x, y):
        return jnp.einsum("bij,bjk->bik", x, y) @ y[0].T

    x, y = (
        jax.ShapeDtypeStruct((5, 3, 4), jnp.float32),
        jax.ShapeDtypeStruct((5, 4, 7), jnp.float32),
    )
    compiled = jax.jit(function).lower(x, y).compile()
    assert count(function, x, y) == compiled.cost_analysis()["flops"]


@pytest.mark.fast
def test_scans_count_as_often_as_they_run():
    def scanned(x):
        return jax.lax.scan(lambda carry, _: (carry @ x, None), x, length=7)[0]

    assert count(scanned, ONE) == 7 * count(jnp.matmul, ONE, ONE) == 7 * 2 * 16**3


@pytest.mark.fast
def test_of_branches_the_dearest_counts():
    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert count(branches, ONE) == 2 * count(jnp.matmul, ONE, ONE)


@pytest.mark.fast
def test_the_branch_of_a_platform_counts():
    def branches(x):
        return jax.lax.platform_dependent(
            x, cpu=lambda x: x @ x, tpu=lambda x: x @ x @ x, default=lambda x: x
        )

    jaxpr, once = jax.jit(branches).trace(ONE).jaxpr, count(jnp.matmul, ONE, ONE)
    found = [flops.matmul_flops(jaxpr, name) for name in ("cpu", "tpu", "cuda", None)]
    assert found == [once, 2 * once, 0, 2 * once]
    of_two = jax.jit(lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos))
    with pytest.raises(ValueError, match="No branch is for cuda, only for cpu, tpu"):
        flops.matmul_flops(of_two.trace(ONE).jaxpr, "cuda")


@pytest.mark.fast
def test_what_cannot_be_counted_is_refused():
    def unbounded(x):
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)

    with pytest.raises(ValueError, match="Operations of while are not counted"):
        count(unbounded, ONE)
    image, kernel = (jax.ShapeDtypeStruct((1, 1, n, n), jnp.float32) for n in (8, 3))
    with pytest.raises(ValueError, match="Operations of conv_general_dilated are not counted"):
        count(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), image, kernel)


def traced_step(attention, *, depth, scan):
    """Returns the paper's training step for two images, traced."""
    config = imagenet2012.get_config()
    config.batch_size, config.model.depth = 2, depth
    config.model.attention, config.model.scan, config.model.remat = attention, scan, "none"
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    built = build_program(config, mesh, channels=3, num_classes=1000)
    return pod_compile.trace_step(config, built)


def step_flops(attention, *, depth, scan):
    """Returns the FLOPs of a training step for one image."""
    # A TPU also multiplies by ones, for the gradients of biases.
    return flops.matmul_flops(traced_step(attention, depth=depth, scan=scan).jaxpr, "cuda") / 2


# Tokens, width, hidden width, layers, heads, head dimension, features.
T, D, HIDDEN, L, H, DIM, M = 197, 768, 3072, 12, 12, 64, 130


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "of_a_head"),
    [
        # The products are logits and averages, each with the gradients of both factors.
        pytest.param("exact", 3 * 2 * (2 * T * T * DIM), marks=pytest.mark.slow),
        # The products are features of queries and keys, without gradients of the projection, the
        # values weighted by the features of the keys, and these sums and that of the keys' features
        # themselves, which is no product, weighted by the features of the queries.
        ("simplex", 2 * 2 * (2 * T * DIM * M) + 3 * 2 * T * M * (DIM + (DIM + 1))),
    ],
)
def test_the_paper_s_step_by_hand(attention, of_a_head):
    products = 3 * 2 * T * (4 * D * D + 2 * D * HIDDEN) * L + 3 * 2 * D * 1000
    patches = 2 * 2 * (T - 1) * (16 * 16 * 3) * D  # Images have no gradient.
    assert step_flops(attention, depth=L, scan=True) == products + patches + L * H * of_a_head


@pytest.mark.slow
def test_unrolled_layers_are_as_many_operations_as_scanned_ones():
    unrolled, scanned = (step_flops("simplex", depth=2, scan=scan) for scan in (False, True))
    assert unrolled == scanned


@pytest.mark.slow
def test_couplings_share_the_step():
    programs = {
        traced_step(coupling, depth=1, scan=False).lower().as_text()
        for coupling in ("simplex", "orthogonal")
    }
    assert len(programs) == 1
