import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import simrf_jax
from experiments.harness.mistakes import UserError
from experiments.vit.metrics import diagnostics
from tests.experiments.vit import tiny
from tests.experiments.vit.test_train import build, make_batch
from tests.experiments.vit.training.test_sharding import mesh_of

REDRAWS = 3
CHANGES = {
    "model__depth": 2,
    "model__num_heads": 4,
    "diagnostics__images": 5,
    "diagnostics__redraws": REDRAWS,
}


def measured(mesh, **changes):
    """Of the first five images."""
    program = build(tiny.get_config(**CHANGES, **changes), mesh)
    with jax.set_mesh(mesh):
        state = program.init()
        images = make_batch()["image"]
        return program, state, program.diagnose(state.model, state.key, images)


@pytest.fixture(scope="module")
def on_one_device():
    return measured(mesh_of())


def numpy_loop(query, key, value, weights, draws):
    """Error of the output and variance of the weights, image by image and head by head."""
    errors, variances = [], []
    for image in range(query.shape[0]):
        for head in range(query.shape[2]):
            q, k, v = (np.float64(x[image, :, head]) for x in (query, key, value))
            q, k = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25

            def normalized(kernel):
                return kernel / kernel.sum(-1, keepdims=True)

            def estimated(w, q=q, k=k):
                of_q, of_k = (np.exp(x @ w.T - (x**2).sum(-1, keepdims=True) / 2) for x in (q, k))
                return normalized(of_q @ of_k.T)

            exact = normalized(np.exp(q @ k.T))
            error = (estimated(np.float64(weights[head])) - exact) @ v
            errors.append(np.linalg.norm(error) / np.linalg.norm(exact @ v))
            drawn = [estimated(np.float64(w[head])) for w in draws]
            variances.append(np.var(drawn, axis=0, ddof=1).sum() / (exact**2).sum())
    return np.mean(errors), np.mean(variances)


@jax.jit
def attended(model, images):
    """Queries, keys, values and W of each layer."""
    layers, x = [], model.embed(images)
    for block in model.blocks:
        h, attention = block.attention_norm(x), block.attention
        qkv = (linear(h) for linear in (attention.query, attention.key, attention.value))
        layers.append((*qkv, attention.attention_fn.projection[...]))
        x = block(x)
    return layers


@pytest.mark.slow
def test_the_measures_are_those_of_a_loop(on_one_device):
    program, state, result = on_one_device
    key = jax.random.fold_in(state.key, diagnostics.DIAGNOSTICS)
    shape = jax.ShapeDtypeStruct((REDRAWS, 4, 34, 8), jnp.float32)
    draws = simrf_jax.redraw_projections(key, shape, options=simrf_jax.DrawOptions("simplex"))
    model = nnx.merge(program.graphdef, state.params, state.projections)
    for layer, arrays in enumerate(attended(model, make_batch(5)["image"])):
        error, variance = numpy_loop(*arrays, draws)
        np.testing.assert_allclose(result["attention_error"][layer], error, rtol=1e-4)
        np.testing.assert_allclose(result["feature_variance"][layer], variance, rtol=1e-4)
    row = diagnostics.row(result)
    assert tuple(row) == diagnostics.columns(depth=2)
    assert row["attention_error"] == pytest.approx(np.mean(result["attention_error"]))
    assert row["feature_variance/layer_1"] == pytest.approx(float(result["feature_variance"][1]))


@pytest.mark.slow
def test_scanned_layers_on_a_mesh_of_all_axes_measure_alike(on_one_device):
    _, _, result = measured(mesh_of(1, 2, 2, 2), model__scan=True)
    for name in diagnostics.NAMES:
        np.testing.assert_allclose(result[name], on_one_device[2][name], rtol=1e-3)


@pytest.mark.fast
@pytest.mark.parametrize("changes", [{"model__attention": "exact"}, {"diagnostics__images": 0}])
def test_nothing_is_measured_without_random_features_or_images(changes):
    assert build(tiny.get_config(**(CHANGES | changes))).diagnose is None


@pytest.mark.slow
def test_the_variance_falls_as_the_features_grow():
    """As one over their number: it is that of means of independent features."""
    query, key = 0.3 * jax.random.normal(jax.random.key(0), (2, 4, 16, 2, 8))

    def variance(num_features):
        shape = jax.ShapeDtypeStruct((64, 2, num_features, 8), jnp.float32)
        options = simrf_jax.DrawOptions("iid")
        draws = simrf_jax.redraw_projections(jax.random.key(1), shape, options=options)
        return float(jax.jit(diagnostics.weight_variance)(query, key, draws))

    assert variance(800) == pytest.approx(variance(200) / 4, rel=0.1)


@pytest.mark.slow
def test_long_queries_and_keys_leave_the_variance_finite():
    query, key = 100 * jax.random.normal(jax.random.key(0), (2, 1, 5, 1, 8))
    draws = jax.random.normal(jax.random.key(1), (4, 1, 18, 8))
    assert 0 < diagnostics.weight_variance(query, key, draws) < 10


@pytest.mark.fast
def test_more_images_than_there_are_are_refused():
    with pytest.raises(UserError, match=r"images must be at most 360, all the .*, got 361"):
        diagnostics.check_images(361, 360)
