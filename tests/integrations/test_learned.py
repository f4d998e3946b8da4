import dataclasses
import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax import linen as nn
from flax import nnx

import simrf_jax
from simrf_jax._src.integrations.flax_versions import get_value, view
from simrf_jax.feature_maps import Learned
from simrf_jax.integrations import linen as linen_adapters
from simrf_jax.integrations import nnx as nnx_adapters
from tests.tiers import slow_but

HEADS, DIM, WIDTH, ROWS = 2, 4, 8, 6
PARAMETERS = {"query_rows", "key_rows", "query_offsets", "key_offsets", "log_weights"}


def batch(seed=0):
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, WIDTH + 1) ** -0.7
    return (rng.normal(size=(2, 16, WIDTH)) * spectrum * 3 + 0.5).astype(np.float32)


def tokens(seed=0):
    rng = np.random.default_rng(seed)
    stretch = np.linspace(0.5, 2, HEADS)[:, None]
    return tuple(
        rng.normal(stretch, stretch, (2, 16, HEADS, DIM)).astype(np.float32) for _ in "qkv"
    )


def nnx_adapter(num_features=ROWS, feature_map="learned", **options):
    rngs = nnx.Rngs(0)
    return nnx_adapters.RandomFeatureAttention(
        HEADS, DIM, num_features, feature_map=feature_map, rngs=rngs, **options
    )


def nnx_attention(**options):
    return nnx.MultiHeadAttention(
        HEADS, WIDTH, decode=False, attention_fn=nnx_adapter(**options), rngs=nnx.Rngs(1)
    )


def linen_adapter(num_features=ROWS, feature_map="learned", **options):
    return linen_adapters.RandomFeatureAttention(num_features, feature_map, **options)


def linen_attention(**options):
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=linen_adapter(**options))


def start(adapter, calibration):
    """Returns the map that an NNX adapter starts at, with another calibration."""
    return Learned.start(adapter.learned.query_rows[...], calibration)


@pytest.mark.slow
def test_starts_at_hyperbolic_features_of_a_w_for_each_head():
    q, k, v = tokens()
    adapter, hyperbolic = nnx_adapter(), nnx_adapter(feature_map="hyperbolic")
    np.testing.assert_allclose(adapter(q, k, v), hyperbolic(q, k, v), rtol=1e-4, atol=1e-5)
    assert adapter.projection is None
    params = nnx.to_pure_dict(nnx.state(adapter, nnx.Param))["learned"]
    assert set(params) == PARAMETERS
    np.testing.assert_array_equal(params["query_rows"], hyperbolic.projection[...])


@pytest.mark.slow
def test_linen_starts_at_hyperbolic_features_of_a_w_for_each_head():
    q, k, v = tokens()
    adapter, hyperbolic = linen_adapter(), linen_adapter(feature_map="hyperbolic")
    variables, expected = (one.init(jax.random.key(0), q, k, v) for one in (adapter, hyperbolic))
    assert set(variables) == {"params", "calibration"}
    assert set(variables["params"]) == PARAMETERS
    np.testing.assert_array_equal(
        variables["params"]["key_rows"], expected["random_features"]["projection"].value
    )
    np.testing.assert_allclose(
        adapter.apply(variables, q, k, v), hyperbolic.apply(expected, q, k, v), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [None, 2])
def test_starts_at_calibrated_features_once_calibrated(bandwidth):
    q, k, v = tokens()
    adapter = nnx_adapter(exact_bandwidth=bandwidth)
    nnx_adapters.calibrate(adapter, [(q, k)], call=lambda call, x: call(*x, x[1]))
    w = adapter.learned.query_rows[...]
    expected = simrf_jax.random_feature_attention(
        q,
        k,
        v,
        jnp.concatenate([w, -w], axis=1),
        feature_map=simrf_jax.calibrate(q, k),
        exact_bandwidth=bandwidth,
    )
    np.testing.assert_allclose(adapter(q, k, v), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_linen_starts_at_calibrated_features_once_calibrated():
    q, k, v = tokens()
    adapter = linen_adapter()
    variables = adapter.init(jax.random.key(0), q, k, v)
    calibrated = linen_adapters.calibrate(
        adapter,
        variables,
        [(q, k)],
        call=lambda model, given, x, mutable: model.apply(given, *x, x[1], mutable=mutable),
    )
    w = calibrated["params"]["query_rows"]
    expected = simrf_jax.random_feature_attention(
        q, k, v, jnp.concatenate([w, -w], axis=1), feature_map=simrf_jax.calibrate(q, k)
    )
    out = adapter.apply(calibrated, q, k, v)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)
    assert calibrated["params"]["log_weights"] is variables["params"]["log_weights"]


@pytest.mark.slow
def test_a_loss_of_the_model_gives_the_parameters_gradients():
    model = nnx_attention()
    grads = nnx.grad(lambda model: jnp.sum(model(batch()) ** 2))(model)
    for name, gradient in nnx.to_pure_dict(grads)["attention_fn"]["learned"].items():
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0, name


def nnx_loss(options, x):
    """Returns the loss of the model, that of the adapter's map, and both gradients."""
    model = nnx_attention(**options)
    nnx_adapters.calibrate(model, [x])
    loss, grads = nnx.value_and_grad(nnx_adapters.distillation_loss)(model, x)
    adapter = model.attention_fn
    one = start(adapter, get_value(adapter.feature_map))
    grads = nnx.to_pure_dict(grads)
    of_map = grads.pop("attention_fn")["learned"]
    return loss, of_map, grads, one, (model.query(x), model.key(x))


def linen_loss(options, x):
    model = linen_attention(**options)
    variables = linen_adapters.calibrate(model, model.init(jax.random.key(0), x), [x])
    loss, grads = jax.value_and_grad(
        lambda params: linen_adapters.distillation_loss(model, {**variables, "params": params}, x)
    )(variables["params"])
    one = Learned.start(
        variables["params"]["attention_fn"]["query_rows"],
        variables["calibration"]["attention_fn"]["feature_map"],
    )
    grads = dict(grads)
    of_map = grads.pop("attention_fn")
    params = variables["params"]

    def project(name):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        return jnp.einsum("btw,wkh->btkh", x, kernel) + bias[None, None]

    return loss, of_map, grads, one, (project("query"), project("key"))


@pytest.mark.slow
@pytest.mark.parametrize("measure", [nnx_loss, linen_loss])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"exact_bandwidth": 2}])
def test_the_loss_of_a_model_is_that_of_its_maps_and_trains_them_alone(measure, options):
    loss, of_map, others, one, (q, k) = measure(options, batch())
    expected, gradient = jax.value_and_grad(
        lambda one: simrf_jax.distillation_loss(q, k, None, feature_map=one, **options)
    )(one)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    for name in PARAMETERS:
        np.testing.assert_allclose(of_map[name], getattr(gradient, name), rtol=1e-2, atol=1e-4)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(others))


@pytest.mark.parametrize(("name", "padding"), [("mask", np.nan), ("mask", 3.0), ("bias", 3.0)])
def test_padding_has_no_part_in_the_loss(name, padding):
    lengths = np.array([16, 5])
    real = np.arange(16) < lengths[:, None]
    q, k, v = (np.where(real[..., None, None], x, np.float32(padding)) for x in tokens())
    adapter = nnx_adapter()
    one = start(adapter, get_value(adapter.feature_map))
    options = {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths}
    expected = simrf_jax.distillation_loss(q, k, None, feature_map=one, **options)
    masks = {"mask": real, "bias": np.where(real, np.float32(0), np.float32(-1e9))}

    def call(adapter, tokens):
        return adapter(*tokens, **{name: masks[name][:, None, None]})

    loss, grads = nnx.value_and_grad(nnx_adapters.distillation_loss)(adapter, (q, k, v), call)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    chex.assert_tree_all_finite(nnx.to_pure_dict(grads))


SEGMENTS = np.repeat([[0, 1]], [11, 5], axis=1) * np.ones((2, 1), int)
REAL = np.arange(16) < np.array([[16], [5]])
# Fields of an adapter, a mask of a call, and what the loss of functions takes for it.
PAIRS_OF_TOKENS = {
    "causal": ({"is_causal": True}, nn.make_causal_mask(REAL), {"is_causal": True}),
    "padding": (
        {"masks": "factored"},
        nn.make_attention_mask(REAL, REAL),
        {"query_seq_lengths": [16, 5], "key_value_seq_lengths": [16, 5]},
    ),
    "packed": (
        {"masks": "packed"},
        nn.make_attention_mask(SEGMENTS, SEGMENTS, jnp.equal),
        {"segment_ids": SEGMENTS},
    ),
}


@pytest.mark.parametrize("name", slow_but(["padding"], [*PAIRS_OF_TOKENS]))
def test_the_loss_reads_masks_of_pairs_of_tokens(name):
    fields, mask, options = PAIRS_OF_TOKENS[name]
    adapter = nnx_adapter(**fields)
    one = start(adapter, get_value(adapter.feature_map))
    q, k, v = tokens()
    expected = simrf_jax.distillation_loss(q, k, None, feature_map=one, **options)
    if name == "padding":
        q, k, v = (np.where(REAL[..., None, None], x, np.float32("nan")) for x in (q, k, v))

    def call(adapter, tokens):
        return adapter(*tokens, mask=mask)

    loss, grads = nnx.value_and_grad(nnx_adapters.distillation_loss)(adapter, (q, k, v), call)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    chex.assert_tree_all_finite(nnx.to_pure_dict(grads))


def test_queries_that_a_mask_hides_from_one_head_do_not_count_there():
    adapter, (q, k, v) = nnx_adapter(masks="factored"), tokens()
    one, lengths = start(adapter, get_value(adapter.feature_map)), (16, 10)
    mask = np.arange(16)[:, None] < np.array(lengths)[:, None, None] * np.ones((2, 1, 1, 16), int)

    def call(adapter, tokens):
        return adapter(*tokens, mask=mask)

    loss = nnx_adapters.distillation_loss(adapter, (q, k, v), call)
    of_heads = []
    for head, length in enumerate(lengths):
        own = jax.tree.map(lambda leaf, head=head: leaf[head : head + 1], one)
        queries, keys = q[:, :length, [head]], k[:, :, [head]]
        of_heads.append(simrf_jax.distillation_loss(queries, keys, None, feature_map=own))
    assert float(loss) == pytest.approx(np.average(of_heads, weights=lengths), rel=1e-5)


@pytest.mark.slow
def test_linen_reads_causal_masks_and_the_loss_is_the_mean_over_calls():
    adapter, batches = linen_adapter(is_causal=True), [tokens(), tokens(1)]
    variables = adapter.init(jax.random.key(0), *tokens())

    def loss(batches, **options):
        def call(model, given, batch, mutable):
            def attend(model):
                return [model(*x, **options) for x in batch]

            return nn.apply(attend, model, mutable=mutable)(given)

        return linen_adapters.distillation_loss(adapter, variables, batches, call=call)

    expected = float(loss(batches))
    masked = loss(batches, mask=nn.make_causal_mask(np.ones((2, 16))))
    assert float(masked) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(np.mean([loss([x]) for x in batches]), rel=1e-5)


class Scaled(nnx.Module):
    """An adapter with a scale and a bias that are parameters."""

    def __init__(self):
        self.adapter = nnx_adapter()
        self.scale = nnx.Param(jnp.float32(0.4))
        self.bias = nnx.Param(jnp.linspace(0, 1, 16)[None])

    def __call__(self, *batches):
        return [self.adapter(*x, scale=self.scale[...], bias=self.bias[...]) for x in batches]


def test_the_loss_is_the_mean_over_calls_and_trains_no_scale_or_bias():
    model, batches = Scaled(), [tokens(), tokens(1)]
    loss = functools.partial(nnx_adapters.distillation_loss, call=lambda model, x: model(*x))
    with jax.numpy_dtype_promotion("strict"):
        both, gradients = nnx.value_and_grad(loss)(model, batches)
    apart = [loss(model, [x]) for x in batches]
    assert float(both) == pytest.approx(np.mean(apart), rel=1e-5)
    assert apart[0] != apart[1]
    gradients = nnx.to_pure_dict(gradients)
    assert not np.any(gradients.pop("scale"))
    assert not np.any(gradients.pop("bias"))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_the_mean_over_layers_that_are_stacked():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        rngs = nnx.Rngs(key)
        adapter = nnx_adapters.RandomFeatureAttention(
            HEADS, DIM, ROWS, feature_map="learned", rngs=rngs
        )
        return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, attention_fn=adapter, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return x + layer(x)

    stack = make(jax.random.split(jax.random.key(0), 3))
    layers = [nnx.clone(jax.tree.map(lambda leaf, i=i: leaf[i], stack)) for i in range(3)]
    x, losses = batch(), []
    loss = nnx_adapters.distillation_loss(stack, x, call=lambda stack, x: forward(stack, x))
    for layer in layers:
        losses.append(float(nnx_adapters.distillation_loss(layer, x)))
        x = x + layer(x)
    assert float(loss) == pytest.approx(np.mean(losses), rel=1e-4)


class Scanned(nn.Module):
    collections: tuple[str, ...] = ("params", "calibration", "distillation")

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + linen_attention()(x), None

        axes = dict.fromkeys(self.collections, 0)
        split = {"params": True, "features": True}
        return nn.scan(Layer, variable_axes=axes, split_rngs=split, length=3)()(x, None)[0]


def test_a_loss_that_a_transformation_drops_is_not_zero():
    model = Scanned(("params", "calibration"))
    loss = functools.partial(linen_adapters.distillation_loss, model, batch=batch())
    variables = model.init(jax.random.key(0), batch())
    with pytest.raises(ValueError, match=r"saw no call: .* by distillation in"):
        loss(variables)
    with pytest.raises(ValueError, match="saw no call"):
        jax.jit(loss)(variables)

    def apart(model, x):
        graph, state = nnx.split(model)
        return jax.jit(lambda state: nnx.merge(graph, state)(x))(state)

    with pytest.raises(ValueError, match=r"saw no call: .* by an axis of the layers"):
        nnx_adapters.distillation_loss(nnx_attention(), batch(), apart)


@pytest.mark.slow
def test_linen_layers_that_are_scanned_have_a_loss():
    model = Scanned()
    variables = model.init(jax.random.key(0), batch())
    grads = jax.grad(lambda v: linen_adapters.distillation_loss(model, v, batch()))(variables)
    [rows] = [
        leaf
        for path, leaf in flax.traverse_util.flatten_dict(grads["params"]).items()
        if path[-1] == "key_rows"
    ]
    assert rows.shape == (3, HEADS, ROWS, DIM)
    assert (np.abs(rows).max(axis=(1, 2, 3)) > 0).all()


loss_and_gradients_of_rows = nnx.value_and_grad(
    nnx_adapters.distillation_loss, argnums=nnx.DiffState(0, nnx_adapters.LearnedRows)
)


@pytest.mark.slow
def test_training_steps_that_donate_the_model_lower_the_loss():
    model = nnx_attention()
    nnx_adapters.calibrate(model, [batch()])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx_adapters.LearnedRows)

    @functools.partial(nnx.jit, donate_argnames=("optimizer",))
    def step(model, optimizer, x):
        loss, grads = loss_and_gradients_of_rows(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch())) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.05
    assert model.attention_fn.observer is None


# A step with a decay that would be seen in all parameters.
DECAYING = optax.adamw(1e-2, weight_decay=0.1)


def changed(before, after):
    """Returns the names of the parameters that differ."""
    after = dict(jax.tree_util.tree_leaves_with_path(after))
    return {
        getattr(path[-1], "key", path[-1])
        for path, leaf in jax.tree_util.tree_leaves_with_path(before)
        if not np.array_equal(leaf, after[path])
    }


@pytest.mark.slow
def test_a_step_trains_the_rows_and_nothing_else():
    model = nnx_attention()
    nnx_adapters.calibrate(model, [batch()])
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    optimizer = nnx.Optimizer(model, DECAYING, wrt=nnx_adapters.LearnedRows)
    loss, grads = loss_and_gradients_of_rows(model, batch())
    optimizer.update(model, grads)
    assert nnx_adapters.distillation_loss(model, batch()) < loss
    assert changed(before, nnx.to_pure_dict(nnx.state(model))) == PARAMETERS


@pytest.mark.slow
def test_a_step_of_linen_trains_the_rows_and_nothing_else():
    model = linen_attention()
    variables = linen_adapters.calibrate(model, model.init(jax.random.key(0), batch()), [batch()])
    params = variables["params"]

    def loss_of(params):
        return linen_adapters.distillation_loss(model, {**variables, "params": params}, batch())

    transforms = {True: DECAYING, False: optax.set_to_zero()}
    optimizer = optax.partition(transforms, linen_adapters.learned_rows)
    loss, grads = jax.value_and_grad(loss_of)(params)

    def after(grads):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    assert loss_of(after(grads)) < loss
    # Another loss has gradients of all parameters.
    for given in (grads, jax.tree.map(jnp.ones_like, params)):
        assert changed(params, after(given)) == PARAMETERS


def test_a_mask_that_would_train_nothing_raises():
    model = linen_attention(feature_map="positive")
    params = model.init(jax.random.key(0), batch())["params"]
    with pytest.raises(ValueError, match="no learned features"):
        optax.partition({True: DECAYING}, linen_adapters.learned_rows).init(params)


@pytest.mark.slow
def test_is_saved_and_restored_with_the_state(tmp_path):
    model, other = nnx_attention(), nnx_attention()
    nnx_adapters.calibrate(model, [batch()])
    learned = model.attention_fn.learned
    learned.log_weights[...] = learned.log_weights[...] + jnp.arange(ROWS, dtype=float)[None]
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.state(model))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(tmp_path / "saved", nnx.state(other)))
    np.testing.assert_array_equal(other(batch()), model(batch()))


@pytest.mark.slow
def test_linen_variables_are_saved_and_restored():
    model = linen_attention()
    fresh = model.init(jax.random.key(0), batch())
    variables = linen_adapters.calibrate(model, fresh, [batch()])
    restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(variables))
    np.testing.assert_array_equal(model.apply(restored, batch()), model.apply(variables, batch()))


@pytest.mark.slow
def test_the_map_itself_is_saved_and_restored():
    adapter = nnx_adapter()
    one = start(adapter, get_value(adapter.feature_map))
    moved = dataclasses.replace(one, key_offsets=one.key_offsets + 1)
    restored = flax.serialization.from_bytes(one, flax.serialization.to_bytes(moved))
    for actual, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [None, 2])
def test_decodes_as_it_attends(bandwidth):
    model = nnx_attention(is_causal=True, exact_bandwidth=bandwidth)
    nnx_adapters.calibrate(model, [batch()])
    x = batch()[:, :6]
    decoder = view(model, only=nnx_adapters.RandomFeatureAttention, decode=True, batch_size=2)
    parts = [decoder(x[:, :3]), *(decoder(x[:, t : t + 1]) for t in range(3, 6))]
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_takes_a_map_that_was_learned_elsewhere(api):
    q, k, v = tokens()
    one = Learned.start(nnx_adapter().learned.key_rows[...], simrf_jax.calibrate(q, k))
    bent = one.log_weights + jnp.arange(ROWS, dtype=float)[None]
    one = dataclasses.replace(one, log_weights=bent)
    if api == "nnx":
        adapter = nnx_adapter(None, one)
        out = adapter(q, k, v)
        assert isinstance(adapter.learned.key_rows, nnx_adapters.LearnedRows)
    else:
        adapter = linen_adapter(None, one)
        variables = adapter.init(jax.random.key(0), q, k, v)
        assert set(variables["params"]) == PARAMETERS
        out = adapter.apply(variables, q, k, v)
    expected = simrf_jax.random_feature_attention(q, k, v, None, feature_map=one)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def nnx_call(**options):
    return nnx_adapter(**options)(*tokens())


def linen_call(**options):
    adapter = linen_adapter(**options)
    return adapter.init_with_output(jax.random.key(0), *tokens())[0]


@pytest.mark.parametrize("call", [nnx_call, linen_call])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_features": None}, "feature_map='learned' needs num_features"),
        ({"norms": "sqrt_dim"}, "norms='sqrt_dim' fixes the norms"),
        ({"norms": "radau", "coupling": "cross_polytope"}, "norms='radau' fixes the norms"),
    ],
)
def test_refuses_options(call, options, match):
    with pytest.raises(ValueError, match=match):
        call(**options)


@pytest.mark.parametrize("call", [nnx_call, linen_call])
def test_refuses_a_number_of_features_beside_a_map_with_rows(call):
    q, k, _ = tokens()
    one = Learned.start(jnp.zeros((ROWS, DIM)), simrf_jax.calibrate(q, k))
    with pytest.raises(ValueError, match="num_features must be None, got 3"):
        call(num_features=3, feature_map=one)


def nnx_distil(**options):
    return nnx_adapters.distillation_loss(nnx_attention(**options), batch())


def linen_distil(**options):
    model = linen_attention(**options)
    variables = model.init(jax.random.key(0), batch())
    return linen_adapters.distillation_loss(model, variables, batch())


@pytest.mark.slow
@pytest.mark.parametrize("distil", [nnx_distil, linen_distil])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"feature_map": "calibrated"}, 'feature_map="learned"'),
        ({"decode": True}, "decode=True"),
    ],
)
def test_distillation_refuses(distil, options, match):
    with pytest.raises(ValueError, match=match):
        distil(**options)
