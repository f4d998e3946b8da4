import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import simrf_jax
from simrf_jax import feature_maps, random_feature_attention
from simrf_jax._src.features import FEATURE_MAPS, LogFeatures
from simrf_jax._src.features.feature_map import named
from tests import conformance, formulas
from tests.attention.reference import attention, relative_error

POSITIVE = {"positive": formulas.positive, "hyperbolic": formulas.hyperbolic}
POSITIVE |= {"relu": formulas.relu, "elu": formulas.elu}
SIGNED = {"trigonometric": formulas.trigonometric, "phase": formulas.phase}


def inputs(length=32, heads=2, dim=16, scale=1.0):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, length, heads, dim))
    return tuple(x.astype(np.float32) for x in (scale * q, scale * k, v))


def projection(num_features=40, dim=16, coupling="simplex"):
    options = conformance.COUPLINGS[coupling]
    return simrf_jax.draw_projection(jax.random.key(1), num_features, dim, **options)


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("scale", [0.5, 1, 2, 4, 8, 16])
def test_positive_maps_against_float64(name, scale):
    q, k, v = inputs(scale=scale)
    w = projection()
    expected = attention(q, k, v, w, formula=POSITIVE[name])
    actual = random_feature_attention(q, k, v, w, feature_map=name)
    assert relative_error(actual, expected) < (1e-5 if scale < 16 else 5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNED)
@pytest.mark.parametrize("scale", [0.25, 0.5, 1])
def test_signed_maps_against_float64(name, scale):
    # Wide projections, so that no denominator is near zero and the problem well posed.
    q, k, v = inputs(scale=scale)
    w = projection(2_000, coupling="orthogonal")
    expected = attention(q, k, v, w, formula=SIGNED[name])
    actual = random_feature_attention(q, k, v, w, feature_map=name)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POSITIVE, *SIGNED])
def test_bfloat16(name):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(scale=0.5))
    w = projection(400)
    actual = random_feature_attention(q, k, v, w, feature_map=name)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    assert actual.dtype == jnp.bfloat16
    assert relative_error(actual, random_feature_attention(*wide, w, feature_map=name)) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POSITIVE, *SIGNED])
@pytest.mark.parametrize("coupling", conformance.COUPLINGS)
def test_every_map_works_with_every_coupling(name, coupling):
    q, k, v = inputs(length=5, scale=0.3)
    w = projection(400, coupling=coupling)
    out = random_feature_attention(q, k, v, w, feature_map=name)
    expected = attention(q, k, v, w, formula=(POSITIVE | SIGNED)[name])
    assert relative_error(out, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POSITIVE, *SIGNED])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_gradients_are_finite_at_any_scale(name, scale):
    q, k, v = inputs(length=6, scale=scale)
    w = projection()

    def loss(q, k, v):
        return random_feature_attention(q, k, v, w, feature_map=name).sum()

    chex.assert_tree_all_finite(jax.grad(loss, argnums=(0, 1, 2))(q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("name", POSITIVE)
def test_gradients_against_float64(name):
    q, k, v = inputs(length=12, heads=1, dim=8)
    w = projection(24, 8)

    def loss(q, k, v, w):
        return jnp.sum(jnp.sin(random_feature_attention(q, k, v, w, feature_map=name)))

    actual = jax.grad(loss, argnums=(0, 1, 2))(q, k, v, w)
    step = 1e-6
    for number, gradient in enumerate(actual):
        arguments = [np.asarray(x, np.float64) for x in (q, k, v)]
        rng = np.random.default_rng(number)
        direction = rng.normal(size=arguments[number].shape)

        def at(shift, arguments=arguments, number=number, direction=direction):
            moved = list(arguments)
            moved[number] = moved[number] + shift * direction
            return np.sum(np.sin(attention(*moved, w, formula=POSITIVE[name])))

        expected = (at(step) - at(-step)) / (2 * step)
        scale = np.linalg.norm(direction) * np.linalg.norm(gradient)
        assert abs(np.sum(np.asarray(gradient, np.float64) * direction) - expected) < 1e-4 * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu", "elu", "trigonometric"])
def test_masked_keys_and_queries_that_see_none(name):
    q, k, v = inputs(length=6, scale=0.3)
    k[4:] = np.nan
    w = projection(200)
    call = functools.partial(random_feature_attention, feature_map=name)
    hidden = call(q[None], k[None], v[None], w, key_value_seq_lengths=np.array([4]))[0]
    expected = attention(q, k[:4], v[:4], w, formula=(POSITIVE | SIGNED)[name])
    assert relative_error(hidden, expected) < 1e-5
    none = call(q[None], k[None], v[None], w, key_value_seq_lengths=np.array([0]))
    np.testing.assert_array_equal(none, 0)


@pytest.mark.slow
def test_a_feature_that_is_zero_for_all_keys_does_not_silence_the_others():
    q, k = np.float32([[[1e30, 1e-10]]]), np.float32([[[-1, 1e-6]]])
    one = np.ones((1, 1, 1), np.float32)
    out = random_feature_attention(q, k, one, np.eye(2, dtype=np.float32), feature_map="relu")
    np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.slow
def test_queries_with_no_active_relu_get_zeros_and_finite_gradients():
    q, k, v = -np.ones((1, 1, 2), np.float32), *np.ones((2, 3, 1, 2), np.float32)
    w = np.ones((4, 2), np.float32)
    call = functools.partial(random_feature_attention, feature_map="relu")
    np.testing.assert_array_equal(call(q, k, v, w), 0)
    gradients = jax.grad(lambda *x: call(*x, w).sum(), argnums=(0, 1, 2))(q, k, v)
    chex.assert_tree_all_finite(gradients)


@pytest.mark.slow
def test_a_callable_is_called_with_scaled_vectors_and_the_projection():
    q, k, v = inputs(scale=0.5)
    w = projection()
    by_name = random_feature_attention(q, k, v, w, feature_map="positive")

    def softmax_features(x, w):
        return simrf_jax.positive_features(x, w, kernel="softmax")

    by_callable = random_feature_attention(q, k, v, w, feature_map=softmax_features)
    np.testing.assert_allclose(by_callable, by_name, rtol=1e-5, atol=1e-6)
    pair = feature_maps.Custom(softmax_features, softmax_features)
    by_pair = random_feature_attention(q, k, v, w, feature_map=pair)
    np.testing.assert_allclose(by_pair, by_callable, rtol=1e-6)
    by_object = random_feature_attention(q, k, v, w, feature_map=feature_maps.Positive())
    np.testing.assert_array_equal(by_object, by_name)
    gaussian = feature_maps.Positive(kernel="gaussian")
    assert (
        relative_error(random_feature_attention(q, k, v, w, feature_map=gaussian), by_name) > 0.01
    )


@pytest.mark.parametrize("numbers", [(1, 6), (6, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"segment_ids": np.repeat([0, 1], 16)}, {"exact_bandwidth": 3}],
    ids=["bidirectional", "causal", "packed", "exact band"],
)
def test_queries_and_keys_have_equal_numbers_of_features(numbers, options):
    first, second = (lambda x, w, n=n: jnp.repeat(jnp.exp(x[..., :1]), n, axis=-1) for n in numbers)
    custom = feature_maps.Custom(first, second)
    match = f"equal numbers of features, got {numbers[0]} and {numbers[1]}"
    with pytest.raises(ValueError, match=match):
        random_feature_attention(*inputs(), projection(), feature_map=custom, **options)
    with pytest.raises(ValueError, match=match):
        simrf_jax.attention_matrix(*inputs()[:2], projection(), feature_map=custom)


@pytest.mark.parametrize(
    "options",
    [{"segment_ids": np.repeat([0, 1], 16)}, {"exact_bandwidth": 3}],
    ids=["packed", "exact band"],
)
def test_a_callable_may_call_the_host_under_jit(options):
    q, k, v = inputs(scale=0.5)

    def on_host(x):
        return jax.pure_callback(np.exp, jax.typeof(x), x)  # It has no rule for vmap.

    @functools.partial(jax.jit, static_argnums=0)
    def attend(exp, q, k, v, w):
        def features(x, w):
            return exp(x @ w.T - jnp.sum(jnp.square(x), axis=-1, keepdims=True) / 2)

        return random_feature_attention(q, k, v, w, feature_map=features, **options)

    actual = attend(on_host, q, k, v, projection())
    np.testing.assert_allclose(actual, attend(jnp.exp, q, k, v, projection()), atol=1e-5)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_feature_maps_are_pytrees_that_share_their_programs_with_no_other(name):
    leaves, structure = jax.tree.flatten(FEATURE_MAPS[name])
    another = type(FEATURE_MAPS[name])()
    equal = [n for n, m in FEATURE_MAPS.items() if jax.tree.structure(m) == structure]
    assert equal == [name]
    assert jax.tree.structure(another) == structure
    assert jax.tree.unflatten(structure, leaves).projection_type is another.projection_type


@dataclasses.dataclass(frozen=True)
class Powers(simrf_jax.FeatureMap):
    """A user's feature map with an array of its own; not finite at zero."""

    exponents: jax.Array

    def log_features(self, x, projection, *, side):
        logs = jnp.log(jnp.abs(simrf_jax.project(x, projection)))
        logits = jnp.broadcast_to(self.exponents, logs.shape) * logs
        return LogFeatures(logits, jnp.zeros_like(logits[..., :1]))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_a_feature_map_of_ones_own_has_gradients_and_is_compiled_once(options):
    q, k, v = inputs(scale=0.5)
    w, exponents = projection(), jnp.linspace(0.5, 1.5, 40)

    chex.clear_trace_counter()

    @jax.jit
    @functools.partial(chex.assert_max_traces, n=1)
    def attend(feature_map):
        out = random_feature_attention(q, k, v, w, feature_map=feature_map, **options)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradient = jax.value_and_grad(attend, has_aux=True)(Powers(exponents))

    def formula(x, w, kernel):
        return np.asarray(exponents) * np.log(np.abs(x @ w.T)), np.ones((*x.shape[:-1], len(w)))

    visible = np.tri(len(q), dtype=bool) if options else None
    expected = attention(q, k, v, w, formula=formula, visible=visible)
    assert relative_error(out, expected) < 1e-5
    chex.assert_tree_all_finite(gradient.exponents)
    assert float(jnp.abs(gradient.exponents).max()) > 0
    attend(Powers(2 * exponents))


def test_phases_of_ones_own():
    q, k, v = inputs(scale=0.5)
    w, phases = projection(400), np.linspace(0, 6, 400, dtype=np.float32)
    own = feature_maps.Phase(phases)
    actual = random_feature_attention(q, k, v, w, feature_map=own)
    formula = functools.partial(formulas.phase, phases=phases)
    assert relative_error(actual, attention(q, k, v, w, formula=formula)) < 1e-4


@pytest.mark.slow
def test_callables_with_a_projection_for_each_head_and_with_none():
    q, k, v = inputs(scale=0.5)
    w = jnp.stack([projection(), 2 * projection()])

    def features(x, w):
        return jnp.square(simrf_jax.project(x, w))

    def formula(x, w, kernel):
        return np.log(np.square(x @ w.T)), np.ones((*x.shape[:-1], len(w)))

    actual = random_feature_attention(q, k, v, w, feature_map=features)
    assert relative_error(actual, attention(q, k, v, w, formula=formula)) < 1e-5
    linear = random_feature_attention(
        q, k, v, None, feature_map=lambda x, _: jax.nn.elu(x) + 1, scale=1.0
    )
    np.testing.assert_allclose(
        linear,
        random_feature_attention(q, k, v, None, feature_map="elu", scale=1.0),
        rtol=1e-5,
        atol=1e-6,
    )
    expected = attention(q, k, v, None, formula=formulas.elu, scale=1.0)
    assert relative_error(linear, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("name", ["positive", "trigonometric"])
def test_fast_projections(heads, name):
    q, k, v = inputs(scale=0.3)

    def draw(key):
        return simrf_jax.draw_fast_projection(key, 400, 16)

    if heads:
        fast = jax.vmap(draw)(jax.random.split(jax.random.key(0), heads))
        dense = jax.vmap(lambda p: simrf_jax.project(jnp.eye(16), p).T)(fast)
    else:
        fast = draw(jax.random.key(0))
        dense = simrf_jax.project(jnp.eye(16), fast).T
    actual = random_feature_attention(q, k, v, fast, feature_map=name)
    expected = random_feature_attention(q, k, v, dense, feature_map=name)
    np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-5)


def test_a_name_stands_for_one_feature_map():
    def define():
        @named("constant")
        @dataclasses.dataclass(frozen=True)
        class Constant(simrf_jax.FeatureMap):
            def log_features(self, x, projection, *, side):
                zero = jnp.zeros_like(x[..., :1])
                return LogFeatures(zero, zero)

    q, k, v = inputs()
    try:
        define()
        define()  # As a notebook does.
        uniform = random_feature_attention(q, k, v, None, feature_map="constant")
        mean = np.broadcast_to(v.mean(axis=0), v.shape)
        np.testing.assert_allclose(uniform, mean, atol=1e-6)
        with pytest.raises(
            ValueError, match=r"must be new, got 'constant', which is that of .*Constant"
        ):
            named("constant")(feature_maps.Relu)
    finally:
        FEATURE_MAPS.pop("constant", None)


@dataclasses.dataclass(frozen=True)
class Inherited(feature_maps.Positive):
    """A subclass of a map with a static field, with a field of its own."""

    factor: float = 2.0

    def log_features(self, x, projection, *, side):
        return super().log_features(self.factor * x, projection, side=side)


@dataclasses.dataclass(frozen=True, slots=True)
class WithSlots(simrf_jax.FeatureMap, static=("repeats",)):
    """A map whose class is made twice by ``dataclasses``."""

    repeats: int = 2
    is_finite = True

    def log_features(self, x, projection, *, side):
        features = feature_maps.Positive().log_features(x, projection, side=side)
        for _ in range(self.repeats):
            features = features._replace(exponent=2 * features.exponent)
        return features


@pytest.mark.parametrize("feature_map", [Inherited(), WithSlots()], ids=["inherited", "slots"])
def test_static_fields_stay_static(feature_map):
    leaves, structure = jax.tree.flatten(feature_map)
    assert all(isinstance(leaf, float) for leaf in leaves)
    assert jax.tree.unflatten(structure, leaves) == feature_map
    q, k, v = inputs(scale=0.25)
    actual = random_feature_attention(q, k, v, projection(), feature_map=feature_map)
    plain = random_feature_attention(2 * q, 2 * k, v, projection())
    assert (relative_error(actual, plain) < 1e-5) == isinstance(feature_map, Inherited)


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["itself", "inside another"])
def test_a_function_of_the_user_is_called_each_time(holder):
    @dataclasses.dataclass(frozen=True)
    class Wrapper(simrf_jax.FeatureMap):
        inner: simrf_jax.FeatureMap

        def log_features(self, x, projection, *, side):
            return self.inner.log_features(x, projection, side=side)

    shift = [0.0]
    custom = feature_maps.Custom(lambda x, w: shift[0] + jnp.exp(simrf_jax.project(x, w)))
    feature_map = custom if holder == "itself" else Wrapper(custom)
    q, k, v = inputs(scale=0.5)
    first = random_feature_attention(q, k, v, projection(), feature_map=feature_map)
    shift[0] = 100.0
    second = random_feature_attention(q, k, v, projection(), feature_map=feature_map)
    assert relative_error(second, first) > 0.1


@pytest.mark.fast
@pytest.mark.parametrize(
    ("static", "fields", "match"),
    [
        (
            (),
            {"kernel": "softmax"},
            r"field kernel of Faulty is not an array, .* static=\('kernel',\)",
        ),
        ((), {"is_finite": True}, "is_finite must be attributes of the class Faulty, got fields"),
        (
            ("kernels",),
            {"kernel": 1.0},
            r"names \['kernels'\] as static, which must be among its fields",
        ),
    ],
)
def test_refuses_fields(static, fields, match):
    body = {"__annotations__": {name: type(x) for name, x in fields.items()}, **fields}
    body["log_features"] = lambda self, x, projection, *, side: None
    faulty = dataclasses.dataclass(frozen=True)(
        type(simrf_jax.FeatureMap)("Faulty", (simrf_jax.FeatureMap,), body, static=static)
    )
    with pytest.raises(TypeError, match=match):
        random_feature_attention(*inputs(), projection(), feature_map=faulty())


def test_features_of_a_map_without_a_projection():
    x = np.array([-1.0, 0.0, 2.0], np.float32)
    np.testing.assert_array_equal(feature_maps.Elu().features(x, None), simrf_jax.elu_features(x))
    with pytest.raises(TypeError, match=r"projection must be an array .* got None"):
        feature_maps.Positive().features(x, None)


class NoDataclass(simrf_jax.FeatureMap):
    def log_features(self, x, projection, *, side):
        raise AssertionError


W = np.ones((40, 16), np.float32)  # Which no case gets as far as using.


@pytest.mark.fast
@pytest.mark.parametrize(
    ("feature_map", "w", "error", "match"),
    [
        ("cosine", W, ValueError, "'positive', 'hyperbolic', .* got 'cosine'"),
        (
            3,
            W,
            TypeError,
            "feature_map must be one of .* or a function .*, got 3",
        ),
        (feature_maps.Positive, W, TypeError, "must be one of .* a FeatureMap"),
        (
            simrf_jax.positive_features,
            W,
            TypeError,
            r"must be simrf_jax.feature_maps.Positive\(...\) .* got the function positive_features",
        ),
        (
            functools.partial(simrf_jax.relu_features),
            W,
            TypeError,
            r"must be simrf_jax.feature_maps.Relu\(...\)",
        ),
        (NoDataclass(), W, TypeError, "The feature map NoDataclass must be a dataclass"),
        ("positive", None, TypeError, "projection must be an array .* got None"),
        (feature_maps.Positive(), None, TypeError, "projection must be an array .* got None"),
        (lambda x, w: x[..., 0], W, ValueError, "feature_map must map"),
        (lambda x, w: x.sum(), W, ValueError, "feature_map must map"),
        (lambda x, w: x > 0, W, TypeError, "must be a floating type, .* got bool"),
        ("angular_hybrid", W, TypeError, "must be a Bipolar.* got an array"),
        ("clustered_hybrid", None, TypeError, "must be a ClusteredProjection, got None"),
        (
            "positive",
            simrf_jax.hybrid.BipolarProjection(*(W,) * 3),
            TypeError,
            "an array .* or a Projection, got BipolarProjection",
        ),
    ],
)
def test_refuses(feature_map, w, error, match):
    with pytest.raises(error, match=match):
        random_feature_attention(*inputs(), w, feature_map=feature_map)


def narrow_maps():
    """Maps and W for heads of dim 4."""
    query, key = np.random.default_rng(0).normal(size=(2, 20, 2, 4)).astype(np.float32)
    w, calibrated = jnp.asarray(key[:6, 0]), simrf_jax.calibrate(query, key)
    return {
        "Calibrated": (calibrated, w),
        "Learned": (feature_maps.Learned.start(w, calibrated), None),
        "Folded": (feature_maps.Folded.of(calibrated, w), None),
    }


CALLS = {
    "attention": random_feature_attention,
    "causal": functools.partial(random_feature_attention, is_causal=True),
    "kernels": functools.partial(random_feature_attention, implementation="pallas_tpu"),
    "report": lambda q, k, v, w, feature_map: simrf_jax.attention_report(
        q, k, w, feature_map=feature_map
    ),
    "loss": lambda q, k, v, w, feature_map: simrf_jax.distillation_loss(
        q, k, w, feature_map=feature_map
    ),
    "state": lambda q, k, v, w, feature_map: simrf_jax.RandomFeatureMechanism(w, feature_map).init(
        num_key_heads=2, head_dim=8, value_dim=8
    ),
}


@pytest.mark.parametrize("name", ["Calibrated", "Learned", "Folded"])
@pytest.mark.parametrize("call", CALLS)
def test_refuses_a_map_for_heads_of_another_dim(call, name):
    q, k, v = np.ones((3, 5, 2, 8), np.float32)
    feature_map, w = narrow_maps()[name]
    with pytest.raises(ValueError, match=f"for heads of dim 8, got a {name} of dim 4"):
        CALLS[call](q, k, v, w, feature_map=feature_map)
