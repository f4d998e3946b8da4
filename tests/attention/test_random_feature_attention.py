import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simrf_jax import draw_projection, random_feature_attention
from tests.attention.inputs import inputs, projection
from tests.attention.reference import attention, relative_error
from tests.standard_errors import assert_mean
from tests.versions import enable_x64


@pytest.fixture(autouse=True)
def _count_traces_anew():
    chex.clear_trace_counter()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "tolerance"), [(0.5, 1e-5), (1, 1e-5), (2, 1e-5), (4, 1e-5), (8, 1e-5), (16, 5e-5)]
)
def test_float32_against_float64(scale, tolerance):
    q, k, v = inputs(length=256, dim=64, scale=scale)
    w = projection(130, 64)
    actual = random_feature_attention(q, k, v, w)
    assert actual.dtype == jnp.float32
    assert relative_error(actual, attention(q, k, v, w)) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float64])
def test_other_dtypes(dtype):
    with enable_x64(True):
        q, k, v = (jnp.asarray(x, dtype) for x in inputs())
        w = jnp.asarray(projection(), jnp.float64 if dtype == jnp.float64 else jnp.float32)
        actual = random_feature_attention(q, k, v, w)
        assert actual.dtype == dtype
        tolerance = 1e-14 if dtype == jnp.float64 else 2e-3
        assert relative_error(actual, attention(q, k, v, w)) < tolerance


@pytest.mark.fast
def test_weights_are_rounded_by_an_operation_of_their_own():
    # XLA for GPUs leaves out a conversion and its inverse, so that numerators would have other
    # weights than denominators.
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs())
    program = str(jax.make_jaxpr(random_feature_attention)(q, k, v, projection()))
    assert "reduce_precision[exponent_bits=8 mantissa_bits=7]" in program


@pytest.mark.slow
@pytest.mark.parametrize("coupling", ["iid", "orthogonal", "simplex"])
@pytest.mark.parametrize("heads", [None, 2])
def test_shared_and_per_head_projections(coupling, heads):
    q, k, v = inputs()
    w = projection(heads=heads, coupling=coupling)
    assert relative_error(random_feature_attention(q, k, v, w), attention(q, k, v, w)) < 1e-5


def test_grouped_queries_with_one_projection():
    q, k, v = inputs(heads=6, key_heads=2)
    w = projection()
    assert relative_error(random_feature_attention(q, k, v, w), attention(q, k, v, w)) < 1e-5


def test_cross_attention_with_wider_values_and_a_scale():
    q, k, v = inputs(length=5, key_length=13, width=3)
    w = projection()
    actual = random_feature_attention(q, k, v, w, scale=0.7)
    assert relative_error(actual, attention(q, k, v, w, scale=0.7)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,), (2, 0)])
def test_any_leading_batch(batch):
    q, k, v = inputs(batch=batch)
    w = projection(heads=2)
    actual = random_feature_attention(q, k, v, w)
    chex.assert_shape(actual, (*batch, 9, 2, 8))
    for index in np.ndindex(batch):
        expected = attention(q[index], k[index], v[index], w)
        assert relative_error(actual[index], expected) < 1e-5


def test_no_queries():
    q, k, v = inputs()
    mask = np.ones((1, 0, 9), bool)
    out = random_feature_attention(q[:0], k, v, projection(), mask=mask)
    assert out.shape == (0, 2, 8)


def test_nan_in_a_visible_key_is_not_hidden():
    q, k, v = inputs()
    k[2, 0] = np.nan
    out = random_feature_attention(q, k, v, projection())
    assert np.isnan(out[:, 0]).all()
    assert np.isfinite(out[:, 1]).all()


@pytest.mark.slow
def test_jit_vmap_one_trace_and_abstract_evaluation():
    q, k, v = inputs(batch=(3,))
    w = projection()
    eager = random_feature_attention(q, k, v, w)
    traced = jax.jit(chex.assert_max_traces(random_feature_attention, n=1))
    chex.assert_trees_all_close(traced(q, k, v, w), eager, rtol=1e-5, atol=1e-6)
    traced(2 * q, k, v, w)
    mapped = jax.vmap(random_feature_attention, in_axes=(0, 0, 0, None))(q, k, v, w)
    chex.assert_trees_all_close(mapped, eager, rtol=1e-5, atol=1e-6)
    abstract = jax.eval_shape(random_feature_attention, q, k, v, w)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, eager)


@pytest.mark.devices(8)
def test_sharding_of_the_batch_is_kept():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    q, k, v = jax.device_put(inputs(batch=(8,)), sharding)
    compiled = jax.jit(random_feature_attention).lower(q, k, v, projection()).compile()
    assert "all-" not in compiled.as_text()
    out = compiled(q, k, v, projection())
    assert out.sharding.is_equivalent_to(sharding, 4)


def test_squared_error_to_softmax_attention_falls_as_one_over_the_features():
    q, k, v = inputs(length=16, dim=8, scale=0.25)
    exact = jax.nn.dot_product_attention(q, k, v)

    def errors(num_features):
        @jax.jit
        @jax.vmap
        def error(key):
            w = draw_projection(key, num_features, 8)
            return jnp.mean(jnp.square(random_feature_attention(q, k, v, w) - exact))

        return np.asarray(error(jax.random.split(jax.random.key(0), 400)))

    # Whole simplices of 9 points in both.
    assert_mean(16 * errors(16 * 18) - errors(18), 0)


F32 = np.float32


BAD = [
    (
        {"query": np.zeros((8, 2), F32)},
        ValueError,
        r"length, heads, dim\], got query \(8, 2\)",
    ),
    ({"query": np.zeros((9, 2, 8), int)}, TypeError, "query must be a floating type, .* got int"),
    ({"key": np.zeros((9, 2, 8), np.float16)}, TypeError, "one dtype, got float32, float16"),
    ({"value": np.zeros((8, 2, 8), F32)}, ValueError, "key and value must have the same length"),
    ({"key": np.zeros((1, 9, 2, 8), F32)}, ValueError, "the same batch shape"),
    ({"query": np.zeros((9, 2, 4), F32)}, ValueError, "query and key must have the same head_dim"),
    ({"query": np.zeros((9, 3, 8), F32)}, ValueError, "multiple of that of key heads, got 3 and 2"),
    ({"query": np.zeros((9, 0, 8), F32)}, ValueError, "at least one head and dimension, got query"),
    (
        {"value": np.zeros((9, 2, 0), F32)},
        ValueError,
        r"dimension, .* value \(9, 2, 0\)",
    ),
    ({"projection": np.zeros((11, 4))}, ValueError, r"for heads of dim 8, got shape \(11, 4\)"),
    ({"projection": np.zeros((3, 11, 8))}, ValueError, "one W for each of the 2 key heads"),
    ({"projection": np.zeros(8)}, ValueError, r"got shape \(8,\)"),
    ({"feature_map": "cosine"}, ValueError, "'positive', 'hyperbolic', .* got 'cosine'"),
    (
        {"implementation": "cudnn"},
        ValueError,
        "must be one of 'xla', 'pallas_tpu', 'pallas_gpu', None, got 'cudnn'",
    ),
    ({"scale": -np.inf}, ValueError, "scale must be finite, got -inf"),
    ({"scale": jnp.float32(jnp.inf)}, ValueError, "scale must be finite, got inf"),
    ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
    ({"scale": "1"}, TypeError, "scale must be one real number, got '1'"),
    ({"scale": np.ones(8)}, TypeError, "scale must be one real number"),
    ({"scale": True}, TypeError, "scale must be one real number, got True"),
    ({"projection": np.zeros((0, 8), F32)}, ValueError, "at least one feature"),
    ({"mask": jnp.ones((9, 9), bool)}, ValueError, "may differ between queries"),
    ({"mask": np.tri(9, dtype=bool)}, ValueError, "What works: is_causal=True for a causal mask"),
    ({"mask": np.ones((1, 8), bool)}, ValueError, r"broadcastable to .* 2, 9, 9\), got"),
    ({"mask": np.ones((2, 1, 1, 9), bool)}, ValueError, r"broadcastable to .* 2, 9, 9\), got"),
    ({"mask": np.ones(9)}, TypeError, "mask must be boolean .* got float"),
    ({"bias": jnp.zeros((9, 9))}, ValueError, "bias .* may differ between queries"),
    ({"bias": np.zeros(9, int)}, TypeError, "bias must be floating, got int"),
    ({"query_seq_lengths": np.ones(2, int)}, ValueError, r"the batch shape \(1,\), got \(2,\)"),
    ({"key_value_seq_lengths": np.float32(3)}, TypeError, "key_value_seq_lengths must be integers"),
    ({"query_seq_lengths": np.array([2**32 + 3])}, ValueError, "query_seq_lengths must fit int32"),
    ({"query_seq_lengths": [2**32 + 3]}, ValueError, "must fit int32, .* got 4294967299"),
    ({"key_value_seq_lengths": np.uint64(2**33)}, ValueError, "must fit uint32, .* got 8589934592"),
    (
        {"segment_ids": np.repeat([7, 7 + 2**32], [4, 5])},
        ValueError,
        "segment_ids must fit int32, as jax_enable_x64 is off, got 4294967303",
    ),
]


@pytest.mark.fast
@pytest.mark.parametrize(("changed", "error", "match"), BAD)
def test_refuses(changed, error, match):
    q, k, v = inputs()
    arguments = {"query": q, "key": k, "value": v, "projection": projection()} | changed
    with pytest.raises(error, match=match):
        random_feature_attention(**arguments)
