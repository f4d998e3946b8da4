"""Tests of the transformers of the examples and of the same models with one line changed."""

import difflib
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import examples
import simrf_jax
from examples import linen_performer, linen_transformer, nnx_performer, nnx_transformer
from simrf_jax._src.integrations.flax_versions import set_value, view
from simrf_jax.integrations.nnx import RandomFeatureAttention
from tests.attention.reference import relative_error

ROOT = pathlib.Path(examples.__file__).parent
VOCABULARY, LENGTH, HEADS, DIM = 7, 12, 2, 16
SIZES = {"vocabulary": VOCABULARY, "max_length": LENGTH, "num_layers": 1}
TOKENS = jnp.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY  # The sequence is easy to learn.


@pytest.mark.fast
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_one_line_and_its_import_differ_as_the_readme_shows(api):
    plain, changed = (
        (ROOT / f"{api}_{name}.py").read_text().splitlines()
        for name in ("transformer", "performer")
    )
    lines = list(difflib.unified_diff(plain, changed, n=0, lineterm=""))[2:]
    added = [line for line in lines if line[0] == "+" and line != "+"]
    removed = [line for line in lines if line[0] == "-"]
    imported, argument = added
    assert imported.startswith("+from simrf_jax.integrations")
    assert argument.startswith("+            attention_fn=RandomFeatureAttention(")
    assert len(removed) <= 1
    page = ROOT.parent / "docs" / "how_to" / "own_model.md"
    assert {*added, *removed} <= {*page.read_text().splitlines()}


def nll(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


@pytest.mark.slow
def test_the_nnx_performer_trains_and_generates():
    model = nnx_performer.Transformer(**SIZES, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(lambda m: nll(m(tokens), tokens))(model)
        optimizer.update(model, gradients)
        return loss

    losses = [train_step(model, optimizer, TOKENS) for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]

    model.eval()
    decoder = view(model, only=RandomFeatureAttention, decode=True, batch_size=2)
    step = nnx.jit(lambda m, tokens, start: m(tokens, start))
    prompt = 5
    logits, tokens = [step(decoder, TOKENS[:, :prompt], 0)], TOKENS[:, :prompt]
    for t in range(prompt, LENGTH):
        token = jnp.argmax(logits[-1][:, -1:], axis=-1)
        tokens = jnp.concatenate([tokens, token], axis=1)
        logits.append(step(decoder, token, t))
    assert (tokens == TOKENS).mean() > 0.8
    parallel = nnx.jit(lambda m, tokens: m(tokens))(model, tokens)
    assert relative_error(jnp.concatenate(logits, axis=1), parallel) < 1e-5


@pytest.mark.slow
def test_a_thousand_tokens_have_the_logits_of_the_parallel_form():
    length = 1_000
    model = nnx_performer.Transformer(**SIZES | {"max_length": length}, rngs=nnx.Rngs(0))
    model.eval()
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, VOCABULARY)
    decoder = view(model, only=RandomFeatureAttention, decode=True, batch_size=1)
    graphdef, state = nnx.split(decoder)

    def step(state, start):
        decoder = nnx.merge(graphdef, state)
        logits = decoder(jax.lax.dynamic_slice_in_dim(tokens, start, 1, axis=1), start)
        return nnx.state(decoder), logits[:, 0]

    _, logits = jax.jit(lambda state: jax.lax.scan(step, state, np.arange(length)))(state)
    parallel = nnx.jit(lambda m, tokens: m(tokens))(model, tokens)
    assert relative_error(jnp.swapaxes(logits, 0, 1), parallel) < 1e-5


@pytest.mark.slow
def test_the_linen_performer_trains_and_generates():
    model = linen_performer.Transformer(**SIZES)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    params = variables["params"]
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, key):
        def loss(params):
            held = {**variables, "params": params}
            logits = model.apply(held, TOKENS, train=True, rngs={"dropout": key})
            return nll(logits, TOKENS)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    losses = []
    for step_key in jax.random.split(jax.random.key(1), 30):
        params, opt_state, value = train_step(params, opt_state, step_key)
        losses.append(value)
    assert losses[-1] < 0.3 * losses[0]

    decoder = linen_performer.Transformer(**SIZES, decode=True)
    held = {**variables, "params": params}
    parallel = jax.jit(model.apply)(held, TOKENS)
    held["cache"] = jax.jit(decoder.init)(jax.random.key(0), TOKENS[:, :1])["cache"]
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    prompt = 10
    for first, last in [(0, prompt), *((t, t + 1) for t in range(prompt, LENGTH))]:
        logits, updates = step(held, TOKENS[:, first:last], first)
        assert relative_error(logits, parallel[:, first:last]) < 1e-5
        held |= updates


@functools.cache
def draw(num_features):
    """Returns a projection for every head."""
    keys = jax.random.split(jax.random.key(5), HEADS)
    return jax.vmap(lambda key: simrf_jax.draw_projection(key, num_features, DIM))(keys)


def shorter(path, leaf):
    """Divides the parameters of queries and keys by 3, so that fewer features are enough."""
    names = {getattr(entry, "key", None) for entry in path}
    return leaf / 3 if names & {"query", "key"} else leaf


def assert_approached(errors):
    few, many = errors
    assert many < 0.02
    assert many < 0.2 * few


@pytest.mark.slow
def test_with_many_features_the_logits_are_those_of_exact_attention_in_nnx():
    exact, performer = (
        module.Transformer(**SIZES, rngs=nnx.Rngs(0)) for module in (nnx_transformer, nnx_performer)
    )
    params = jax.tree.map_with_path(shorter, nnx.state(exact, nnx.Param))
    call = nnx.jit(lambda model, tokens: model(tokens))
    errors = []
    for model in (exact, performer):
        nnx.update(model, params)
        model.eval()
    for num_features in (34, 8192):
        set_value(performer.blocks[0].attention.attention_fn.projection, draw(num_features))
        errors.append(relative_error(call(performer, TOKENS), call(exact, TOKENS)))
    assert_approached(errors)


@pytest.mark.slow
def test_with_many_features_the_logits_are_those_of_exact_attention_in_linen():
    exact, performer = (
        module.Transformer(**SIZES) for module in (linen_transformer, linen_performer)
    )
    variables = jax.jit(performer.init)(jax.random.key(0), TOKENS)
    params = jax.tree.map_with_path(shorter, variables["params"])
    expected = jax.jit(exact.apply)({"params": params}, TOKENS)
    errors = []
    for num_features in (34, 8192):
        w = jax.tree.map(lambda _, m=num_features: draw(m), variables["random_features"])
        out = jax.jit(performer.apply)({"params": params, "random_features": w}, TOKENS)
        errors.append(relative_error(out, expected))
    assert_approached(errors)
