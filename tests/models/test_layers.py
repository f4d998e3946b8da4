import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from simrf_jax._src.models import layers
from simrf_jax._src.models.layers import dropout, sum_bias_gradients_by_products
from simrf_jax._src.models.transformer import POLICIES


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


@pytest.mark.slow
def test_complex_layers_have_the_gradients_of_flax():
    x = jax.random.normal(jax.random.key(1), (4, 6), jnp.complex64)

    def gradient(change):
        layer = nnx.LinearGeneral(6, 3, param_dtype=jnp.complex64, rngs=nnx.Rngs(0))
        change(layer)
        graphdef, params = nnx.split(layer)

        def loss(params):
            return jnp.sum(jnp.abs(nnx.merge(graphdef, params)(x)))

        return jax.grad(loss)(params)

    found, expected = gradient(sum_bias_gradients_by_products), gradient(lambda layer: None)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


def test_a_layer_without_a_bias_stays_as_it_is():
    plain = nnx.LinearGeneral(6, (2, 3), use_bias=False, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 6))
    expected = plain(x)
    sum_bias_gradients_by_products(plain)
    np.testing.assert_array_equal(plain(x), expected)


@pytest.mark.parametrize("rate", [-0.1, 1, float("nan")])
def test_dropout_refuses_rates(rate):
    with pytest.raises(ValueError, match="rate must be at least 0 and below 1, got"):
        dropout(jnp.ones(3), jax.random.key(0), rate)


def test_dropout_refuses_integers():
    with pytest.raises(TypeError, match="x must be a floating-point array, got int32"):
        dropout(jnp.ones(3, jnp.int32), jax.random.key(0), 0.5)


def test_a_rate_of_numpy_changes_no_dtype():
    dropped = dropout(jnp.ones(3, jnp.bfloat16), jax.random.key(0), np.float64(0.1))
    assert dropped.dtype == jnp.bfloat16


@pytest.mark.parametrize(("remat", "draws"), [("none", 1), ("dots", 1), ("block", 2)])
def test_dots_keeps_the_masks(remat, draws):
    def loss(x, key):
        return jnp.sum(jnp.sin(dropout(jnp.sin(x), jax.random.wrap_key_data(key), 0.1)))

    if remat != "none":
        loss = jax.checkpoint(loss, policy=POLICIES[remat])
    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 4)), jnp.zeros(2, jnp.uint32))
    assert str(jaxpr).count("random_bits[") == draws


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


def test_other_layers_are_refused():
    with pytest.raises(TypeError, match=r"must be an nnx\.LinearGeneral, got Linear"):
        sum_bias_gradients_by_products(nnx.Linear(6, 3, rngs=nnx.Rngs(0)))


def test_a_layer_is_changed_once():
    layer = _layer(True)
    sum_bias_gradients_by_products(layer)
    x = jax.random.normal(jax.random.key(1), (4, 6))
    np.testing.assert_array_equal(layer(x), _layer(False)(x))


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_over_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), (getattr(jax.sharding.AxisType, kind),))
    x = jax.random.normal(jax.random.key(1), (8, 4, 6))
    # JAX 0.7 cannot differentiate with respect to the kernel of a layer over Explicit axes.
    graphdef, bias, rest = nnx.split(_layer(True), nnx.PathContains("bias"), ...)

    def loss(bias, x):
        dropped = dropout(x, jax.random.key(3), 0.5)
        return jnp.sum(jnp.sin(nnx.merge(graphdef, bias, rest)(dropped)))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    expected = gradients(bias, x)
    with jax.set_mesh(mesh):
        found = gradients(bias, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.devices(8)
def test_inside_shard_map():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    x = jax.random.normal(jax.random.key(1), (8, 4, 6))
    gradients, params, _ = _gradients(_layer(True), x)
    specs = (jax.P(), jax.P("data"))
    shared = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)
    chex.assert_trees_all_close(
        jax.jit(shared)(params, x), gradients(params, x), rtol=1e-5, atol=1e-6
    )


def test_a_float32_gradient_is_not_rounded_on_a_tpu():
    gradients, *args = _gradients(_layer(True), jnp.ones((5, 4, 6)))
    program = gradients.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("precision = [HIGHEST, HIGHEST]") == 1
