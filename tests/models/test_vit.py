import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from simrf_jax import redraw_projections
from simrf_jax._src.models.config import ATTENTIONS
from simrf_jax.integrations.nnx import FeatureMapState, RandomProjection, calibrate
from simrf_jax.models import ViT, ViTConfig
from tests.tiers import slow_but
from tests.versions import enable_x64

SMALL = ViTConfig(
    image_size=(8, 8),
    channels=1,
    num_classes=10,
    patch_size=2,
    width=16,
    depth=2,
    num_heads=2,
    mlp_dim=32,
    num_features=9,
    pooling="average",
    dtype="float32",
)


def build(config=SMALL, **changes):
    rngs = nnx.Rngs(params=0, features=1)
    return ViT(dataclasses.replace(config, **changes), rngs=rngs)


def images(n=3, seed=0):
    return jax.random.normal(jax.random.key(seed), (n, 8, 8, 1))


def with_random_head(model):
    # The head starts at zero, which would hide all other layers.
    head = model.head.kernel
    head[...] = jax.random.normal(jax.random.key(7), head.shape)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # Published numbers for a class token and 1,000 classes.
        ("Ti/16", 5_717_416),
        pytest.param("S/16", 22_050_664, marks=pytest.mark.slow),
        ("B/16", 86_567_656),
        pytest.param("L/16", 304_326_632, marks=pytest.mark.slow),
    ],
)
def test_parameter_counts_of_the_named_models(name, parameters):
    config = ViTConfig.named(name, scan=True)
    model = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters
    [w] = jax.tree.leaves(nnx.state(model, RandomProjection))
    assert w.shape == (config.depth, config.num_heads, 130, 64)


@pytest.mark.fast
def test_vit_b_16_is_the_papers():
    config = ViTConfig.named("B/16")
    assert (config.depth, config.num_heads, config.width, config.mlp_dim) == (12, 12, 768, 3072)
    assert (config.dropout_rate, config.num_features, config.patch_size) == (0.1, 130, 16)


EVERY = {
    f"{attention}, {pooling}, {dtype}": (attention, pooling, dtype)
    for attention in ATTENTIONS
    for pooling in ("average", "token")
    for dtype in ("float32", "bfloat16")
}
# Couplings change nothing but W, and in each of these something else changes.
DIFFERENT = [
    name for name in EVERY if name.endswith("average, float32") or "simplex, token" in name
]


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(DIFFERENT, EVERY))
def test_every_attention_pooling_and_dtype(case):
    attention, pooling, dtype = case
    model = with_random_head(build(attention=attention, pooling=pooling, dtype=dtype))
    logits = nnx.jit(lambda model, x: model(x))(model, images())
    assert logits.shape == (3, 10)
    assert logits.dtype == jnp.float32
    assert jnp.isfinite(logits).all()
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {x.dtype for x in params} == {jnp.dtype("float32")}
    reference = with_random_head(build(attention=attention, pooling=pooling))(images())
    tolerance = 0.1 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(logits, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_parameters_start_the_same_whatever_the_attention():
    states = [nnx.state(build(attention=name), nnx.Param) for name in ATTENTIONS]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state, states[0])


@pytest.mark.slow
def test_a_band_of_all_tokens_is_exact_attention():
    bands = [build(exact_bandwidth=SMALL.num_tokens), build(attention="exact")]
    one, other = (with_random_head(model)(images()) for model in bands)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_random_features_come_close_to_exact_attention_as_they_grow():
    def logits(**changes):
        model = with_random_head(build(**changes))
        for block in model.blocks:  # The kernel of short queries and keys is easy to estimate.
            block.attention.query.kernel[...] *= 0.3
            block.attention.key.kernel[...] *= 0.3
        return model(images())

    exact = logits(attention="exact")
    errors = [
        float(jnp.linalg.norm(logits(num_features=m) - exact) / jnp.linalg.norm(exact))
        for m in (9, 90, 9000)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


def test_patches_are_cut_row_by_row():
    from simrf_jax._src.models.vit import _patches

    image = jnp.arange(16.0).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(
        _patches(image, 2)[0], [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    )


@pytest.mark.devices(4)
@pytest.mark.parametrize("pooling", slow_but(["token"], ["average", "token"]))
def test_images_over_an_explicit_axis(pooling):
    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    model, x = with_random_head(build(pooling=pooling)), images(8)
    want = model(x), nnx.grad(loss)(model, x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        got = nnx.jit(lambda model, x: (model(x), nnx.grad(loss)(model, x)))(model, on_mesh)
    assert jax.typeof(got[0]).sharding.spec[0] == "data"
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_dropout_is_active_only_with_keys_and_depends_on_them():
    model = with_random_head(build(dropout_rate=0.5))
    x = images()

    def dropped(seed):
        return model(x, rngs=nnx.Rngs(dropout=seed))

    np.testing.assert_array_equal(model(x), model(x))
    np.testing.assert_array_equal(dropped(0), dropped(0))
    assert not np.allclose(dropped(0), dropped(1))
    assert not np.allclose(dropped(0), model(x))


def test_each_dropout_of_each_layer_has_a_key_of_its_own(monkeypatch):
    seen = []

    def record(y, key, rate):
        assert rate == 0.5
        seen.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        return y

    monkeypatch.setattr("simrf_jax._src.models.transformer.dropout", record)
    build(dropout_rate=0.5)(images(), rngs=nnx.Rngs(dropout=0))
    assert len(set(seen)) == len(seen) >= 3 * SMALL.depth


@pytest.mark.slow
def test_every_layer_and_head_has_its_own_projection():
    first, second = jax.tree.leaves(nnx.state(build(), RandomProjection))
    rows = np.concatenate([np.reshape(w, (2, -1)) for w in (first, second)])
    assert len(np.unique(rows.round(5), axis=0)) == 4


def loss_and_grads(**changes):
    """Returns the loss of a model with dropout, and its gradients, stacked over the layers."""
    graphdef, params, rest = nnx.split(
        with_random_head(build(dropout_rate=0.5, **changes)), nnx.Param, ...
    )

    def loss(params):
        logits = nnx.merge(graphdef, params, rest)(images(), rngs=nnx.Rngs(dropout=5))
        return jnp.sum(logits**2)

    traced = jax.jit(jax.value_and_grad(loss)).trace(params)
    products = str(traced.jaxpr).count("dot_general")
    value, grads = traced.lower().compile()(params)
    grads = nnx.to_pure_dict(grads)
    if not changes.get("scan"):
        layers = [grads["blocks"][layer] for layer in range(2)]
        grads["blocks"] = jax.tree.map(lambda *layers: jnp.stack(layers), *layers)
    return value, grads, products


@pytest.fixture(scope="module")
def unrolled():
    return loss_and_grads()


# Each with the number of its products relative to those of the unrolled model.
LAYERS = {
    "dots": ({"remat": "dots"}, (1, 1.5)),
    "block": ({"remat": "block"}, (1.5, 2)),
    "scan": ({"scan": True}, (0.4, 0.75)),
    "scan, block": ({"scan": True, "remat": "block"}, (0.75, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but(["dots", "scan, block"], LAYERS))
def test_remat_and_scan_change_nothing_but_what_is_kept_and_compiled(case, unrolled):
    changes, (least, most) = case
    value, grads, products = loss_and_grads(**changes)
    np.testing.assert_allclose(value, unrolled[0], rtol=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, grads, unrolled[1])
    assert least < products / unrolled[2] < most


def test_a_scanned_model_has_the_arrays_of_the_unrolled_one_stacked():
    for kind in (nnx.Param, RandomProjection):
        stacked = nnx.to_pure_dict(nnx.state(build(scan=True), kind))["blocks"]
        layers = nnx.to_pure_dict(nnx.state(build(), kind))["blocks"]
        expected = jax.tree.map(lambda *layers: np.stack(layers), layers[0], layers[1])
        jax.tree.map(np.testing.assert_array_equal, stacked, expected)


def test_redraw_changes_the_output_and_not_the_parameters():
    model = with_random_head(build())
    before, params = model(images()), nnx.state(model, nnx.Param)
    projections = nnx.state(model, RandomProjection)
    nnx.update(model, redraw_projections(jax.random.key(3), projections))
    assert not np.allclose(model(images()), before)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [pytest.param({}, marks=pytest.mark.slow), {"scan": True, "remat": "block"}]
)
def test_calibration_reaches_every_layer_inside_jit_too(changes):
    model = build(feature_map="calibrated", **changes)
    graphdef, state = nnx.split(model)
    before = jax.device_get(jax.tree.leaves(nnx.state(model, FeatureMapState)))

    @jax.jit
    def fitted(state):
        inside = nnx.merge(graphdef, state)
        calibrate(inside, [images()])
        return nnx.state(inside, FeatureMapState)

    inside = jax.tree.leaves(fitted(state))
    calibrate(model, [images()])
    outside = jax.tree.leaves(nnx.state(model, FeatureMapState))
    for one, other, plain in zip(inside, outside, before, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert not np.allclose(other, plain)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"attention": "linear"}, ValueError, "one of 'iid', .*'exact', got 'linear'"),
        ({"pooling": "max"}, ValueError, "'average', 'token', got 'max'"),
        ({"block": "round"}, ValueError, "'regular', 'square', got 'round'"),
        ({"dtype": "int8"}, ValueError, "'float32', 'bfloat16', got 'int8'"),
        ({"remat": "all"}, ValueError, "'none', 'block', 'dots', got 'all'"),
        ({"scan": "no"}, TypeError, "scan must be True or False, got 'no'"),
        ({"patch_size": 3}, ValueError, r"multiples of patch_size=3, got \(8, 8\)"),
        ({"num_heads": 3}, ValueError, "multiple of num_heads, got 16 and 3"),
        ({"num_features": 0}, ValueError, "num_features must be at least 1"),
        ({"depth": 2.0}, TypeError, "depth must be an integer"),
        ({"image_size": 8}, TypeError, r"image_size must be \(height, width\), got 8"),
        ({"image_size": (8,)}, TypeError, r"image_size must be \(height, width\), got \(8,\)"),
        ({"image_size": (8.0, 8.0)}, TypeError, "image_size must be an integer, got 8.0"),
        ({"image_size": (8, 0)}, ValueError, "image_size must be at least 1, got 0"),
        ({"sequence_axis": 3}, TypeError, "sequence_axis must be the name of a mesh axis"),
        ({"dropout_rate": "0.1"}, TypeError, "dropout_rate must be a number, got '0.1'"),
        ({"num_heads": 16}, ValueError, "simplex' needs heads of at least 2 dimensions"),
        (
            {"num_heads": 16, "attention": "simplex_plus"},
            ValueError,
            "simplex_plus' needs heads of at least 2 dimensions",
        ),
        ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must be in \[0, 1\)"),
        ({"exact_bandwidth": -1}, ValueError, "exact_bandwidth must be at least 0, got -1"),
        (
            {"exact_bandwidth": 2, "attention": "exact"},
            ValueError,
            "exact_bandwidth is for random-feature attention, got 2 for attention='exact'",
        ),
        (
            {"exact_bandwidth": 2, "feature_map": "relu"},
            ValueError,
            "exact_bandwidth is for .* that estimate softmax .*, got 2 for feature_map='relu'",
        ),
        ({"feature_map": "elu"}, ValueError, "'positive', 'relu', 'calibrated', got 'elu'"),
        (
            {"feature_map": "calibrated", "attention": "exact"},
            ValueError,
            "feature_map is for .*, got 'calibrated' for attention='exact'",
        ),
    ],
)
def test_config_refuses(changes, error, match):
    with pytest.raises(error, match=match):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "match"), [("XL/16", "'Ti', 'S', 'B', 'L', got 'XL'"), ("B", "as in 'B/16', got 'B'")]
)
def test_named_refuses(name, match):
    with pytest.raises(ValueError, match=match):
        ViTConfig.named(name)


@pytest.mark.fast
def test_named_refuses_a_second_patch_size():
    with pytest.raises(TypeError, match="patch_size is in the name 'B/16'"):
        ViTConfig.named("B/16", patch_size=32)


@pytest.mark.slow
def test_parameters_are_float32_in_x64_mode_too():
    with enable_x64(True):
        params = nnx.state(build(pooling="token"), nnx.Param)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("shape", [(8, 8, 1), (2, 8, 8, 3), (2, 10, 8, 1)])
def test_model_refuses_images_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"\[batch, 8, 8, 1\], got shape"):
        build()(jnp.zeros(shape))
