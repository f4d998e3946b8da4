import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from simrf_jax.models import layers
from simrf_jax.models.layers import dropout, sum_bias_gradients_by_products


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rate", [0, 0.1, 0.5])
def test_dropout_is_that_of_flax_bit_for_bit(rate, dtype):
    x = jax.random.normal(jax.random.key(4), (3, 5, 64), dtype)

    def found(x):
        return dropout(x, jax.random.key(3), rate)

    def expected(x):
        return nnx.Dropout(rate)(x, deterministic=False, rngs=jax.random.key(3))

    def gradient(drop):
        return jax.grad(lambda x: jnp.sum(jnp.sin(drop(x))))(x)

    assert found(x).dtype == dtype
    np.testing.assert_array_equal(found(x), expected(x))
    np.testing.assert_array_equal(gradient(found), gradient(expected))


def test_a_mask_is_drawn_once_for_the_output_and_the_gradient():
    def loss(x, weights, key):
        return jnp.sum(jnp.square(dropout(x, key, 0.1) @ weights))

    args = jnp.ones((8, 128)), jnp.ones((128, 16)), jax.random.key(0)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*args)
    program = traced.lower(lowering_platforms=("tpu",)).as_text()
    # What lies behind a barrier is computed once, by whatever reads it.
    [barrier] = [line for line in program.splitlines() if "optimization_barrier" in line]
    assert "tensor<8x128xi1>" in barrier
    assert program.count("call @_bernoulli") == 1


def _layer(sums_by_products):
    layer = nnx.LinearGeneral(
        6, (2, 3), bias_init=nnx.initializers.normal(), dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    if sums_by_products:
        sum_bias_gradients_by_products(layer)
    return layer


def _gradients(layer, x):
    graphdef, params = nnx.split(layer)

    def loss(params, x):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)))

    return jax.jit(jax.grad(loss, argnums=(0, 1))), params, x


@pytest.mark.parametrize("shape", [(6,), (4, 6), (5, 4, 6)])
def test_a_layer_computes_what_it_did(shape):
    x = jax.random.normal(jax.random.key(1), shape)
    np.testing.assert_array_equal(_layer(True)(x), _layer(False)(x))
    results = []
    for sums_by_products in (True, False):
        gradients, *args = _gradients(_layer(sums_by_products), x)
        results.append(jax.tree.leaves(gradients(*args)))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_only_a_tpu_sums_by_a_product():
    counts = {}
    for platform in ("tpu", "cpu"):
        gradients, *args = _gradients(_layer(True), jnp.ones((5, 4, 6)))
        program = gradients.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        # Forward, and the gradients of x, the kernel and, on a TPU, the bias.
        counts[platform] = program.count("stablehlo.dot_general"), program.count("stablehlo.reduce")
    assert counts == {"tpu": (4, 0), "cpu": (3, 1)}


def test_the_product_with_ones_is_the_sum_in_float32():
    x = 1 + jax.random.uniform(jax.random.key(1), (30, 50, 2, 3)).astype(jnp.bfloat16)
    found = layers._sum_by_product(x, axes=(0, 1))
    assert found.dtype == jnp.bfloat16
    expected = np.sum(np.asarray(x, np.float64), axis=(0, 1))
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8)


def test_a_layer_without_a_bias_stays_as_it_is():
    plain = nnx.LinearGeneral(6, (2, 3), use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 6))
    expected = plain(x)
    sum_bias_gradients_by_products(plain)
    np.testing.assert_array_equal(plain(x), expected)


@pytest.mark.parametrize("rate", [-0.1, 1, float("nan")])
def test_dropout_refuses(rate):
    with pytest.raises(ValueError, match="rate must be at least 0 and below 1, got"):
        dropout(jnp.ones(3), jax.random.key(0), rate)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"batch_axis": {0: 4}}, "batch_axis={0: 4}"),
        ({"dot_general": jax.lax.dot_general}, "dot_general=<function"),
        ({"promote_dtype": lambda x, **_: x}, "promote_dtype=<function"),
    ],
)
def test_layers_that_compute_otherwise_are_refused(options, got):
    layer = nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match=f"layer must have no batch axes .*{got}"):
        sum_bias_gradients_by_products(layer)
    changed = nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(0))
    sum_bias_gradients_by_products(changed)
    with pytest.raises(ValueError, match="layer must have no batch axes"):
        sum_bias_gradients_by_products(changed)
