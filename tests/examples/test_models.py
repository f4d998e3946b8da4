"""Tests of the models of others with random-feature attention: they train, save, redraw, decode."""

import functools
import pathlib
import re
import types
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import train_state
from jax import export

import examples
from examples.models import big_vision_vit, bonsai_vit, gemma, lm1b
from simrf_jax import AttentionState, redraw_projections
from simrf_jax._src.integrations.flax_versions import view
from simrf_jax.integrations import linen as linen_adapter
from simrf_jax.integrations import nnx as nnx_adapter
from simrf_jax.integrations.nnx import RandomFeatureAttention, RandomProjection
from tests.attention.reference import relative_error

ROOT = pathlib.Path(examples.__file__).parent
MODELS = ROOT / "models"
IMAGES = jax.random.uniform(jax.random.key(0), (8, 8, 8, 1))
LABELS = jnp.arange(8)
TOKENS = 1 + jnp.arange(2 * 12).reshape(2, 12) % 7  # The sequence is easy to learn.


def classification_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class TrainState(train_state.TrainState):
    """A train state that keeps W, as the page for models of others shows it."""

    random_features: Any

    @property
    def variables(self):
        return {"params": self.params, "random_features": self.random_features}


def linen_state(model, *inputs, seed=0):
    variables = jax.jit(model.init)(jax.random.key(seed), *inputs)
    return TrainState.create(apply_fn=model.apply, tx=optax.adam(1e-2), **variables)


def train(state, loss_fn, num_steps=20):
    """Returns a trained state; ``loss_fn(variables, key)``."""

    @jax.jit
    def step(state, key):
        def loss(params):
            variables = {"params": params, "random_features": state.random_features}
            return loss_fn(variables, key)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for key in jax.random.split(jax.random.key(1), num_steps):
        state, value = step(state, key)
        losses.append(value)
    assert losses[-1] < 0.6 * losses[0]
    return state


def assert_redrawn(before, after):
    """Checks that all of W is other numbers of the same shapes."""
    for one, other in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert one.shape == other.shape
        assert float(jnp.abs(one - other).min()) > 0


def train_nnx(model, loss_fn, num_steps=20):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    projections = jax.tree.map(jnp.copy, nnx.state(model, RandomProjection))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer) for _ in range(num_steps)]
    assert losses[-1] < 0.6 * losses[0]
    for one, other in zip(
        *map(jax.tree.leaves, (projections, nnx.state(model, RandomProjection))), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    model.eval()


@pytest.mark.slow
def test_the_bonsai_vit_trains_saves_restores_and_redraws(tmp_path):
    config = bonsai_vit.ModelConfig(num_layers=1)
    make = functools.partial(bonsai_vit.ViTClassificationModel, config)
    model = make(rngs=nnx.Rngs(params=0, dropout=1))  # Its trainer has no default stream.
    train_nnx(model, lambda m: classification_loss(m(IMAGES), LABELS), num_steps=60)
    call = nnx.jit(lambda m: m(IMAGES))
    logits = call(model)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model, (nnx.Param, RandomProjection)))
        checkpointer.wait_until_finished()
        fresh = make(rngs=nnx.Rngs(params=7, dropout=8))
        fresh.eval()
        state = nnx.state(fresh, (nnx.Param, RandomProjection))
        nnx.update(fresh, checkpointer.restore(tmp_path / "model", state))
    np.testing.assert_array_equal(call(fresh), logits)

    projections = nnx.state(fresh, RandomProjection)
    redrawn = redraw_projections(jax.random.key(5), projections)
    assert_redrawn(projections, redrawn)
    nnx.update(fresh, redrawn)
    assert 0 < relative_error(call(fresh), logits) < 1

    report = nnx_adapter.attention_report(model, IMAGES[:2])
    assert [*report] == [f"layers.{n}.attention.attention_fn" for n in range(1)]
    assert all(np.isfinite(layer.relative_error).all() for layer in report.values())


LM1B = lm1b.TransformerConfig(num_layers=1, deterministic=True)
LENGTHS = [[5, 4, 3], [7, 6]]  # Of packed sequences in rows of 16 tokens.


def packed_batch():
    """Returns tokens, positions and segments of packed sequences, and the sequences themselves."""
    rng = np.random.default_rng(0)
    tokens, positions, segments = np.zeros((3, 2, LM1B.max_len), np.int32)
    sequences = []
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for number, length in enumerate(lengths):
            one = rng.integers(1, LM1B.vocab_size, length)
            where = slice(start, start + length)
            tokens[row, where], positions[row, where] = one, np.arange(length)
            segments[row, where] = number + 1
            sequences.append(np.pad(one, (0, LM1B.max_len - length)))
            start += length
    return (tokens, positions, segments), np.stack(sequences)


def lm1b_loss(model, variables, tokens, *packing, rngs=None):
    logits = model.apply(variables, tokens, *packing, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return jnp.sum(losses * (tokens > 0)) / jnp.sum(tokens > 0)


@pytest.mark.slow
def test_packed_training_of_lm1b_has_the_loss_and_gradients_of_unpacked_training():
    model = lm1b.TransformerLM(LM1B)
    (tokens, positions, segments), sequences = packed_batch()
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    grad = jax.jit(jax.value_and_grad(functools.partial(lm1b_loss, model)))
    loss, gradients = grad(variables, tokens, positions, segments)
    expected, expected_gradients = grad(variables, sequences)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    gradients, expected_gradients = (
        jax.flatten_util.ravel_pytree(x["params"])[0] for x in (gradients, expected_gradients)
    )
    assert relative_error(gradients, expected_gradients) < 1e-5
    # Unpacked training of the rows as they are is another thing.
    assert abs(grad(variables, tokens)[0] - expected) > 1e-4


@pytest.mark.slow
def test_lm1b_trains_saves_restores_redraws_and_decodes(tmp_path):
    model = lm1b.TransformerLM(LM1B.replace(deterministic=False))
    batch = (
        TOKENS,
        jnp.arange(12)[None].repeat(2, 0) % 6,
        1 + jnp.arange(12)[None].repeat(2, 0) // 6,
    )
    evaluated = lm1b.TransformerLM(LM1B)
    state = train(
        linen_state(evaluated, TOKENS),
        lambda variables, key: lm1b_loss(model, variables, *batch, rngs={"dropout": key}),
        num_steps=40,
    )
    call = jax.jit(evaluated.apply)
    logits = call(state.variables, TOKENS)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        fresh = linen_state(evaluated, TOKENS, seed=9)
        restored = checkpointer.restore(tmp_path / "state", fresh)
    np.testing.assert_array_equal(call(restored.variables, TOKENS), logits)
    assert restored.step == 40

    redrawn = redraw_projections(jax.random.key(5), restored.random_features)
    assert_redrawn(restored.random_features, redrawn)
    redrawn = restored.replace(random_features=redrawn)
    assert 0 < relative_error(call(redrawn.variables, TOKENS), logits) < 1

    decoder = lm1b.TransformerLM(LM1B.replace(decode=True))
    cache = jax.jit(decoder.init)(jax.random.key(0), TOKENS[:, :1])["cache"]
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    previous = jnp.pad(TOKENS, ((0, 0), (1, 0)))  # The first token follows a zero.
    for t in range(12):
        out, cache = step({**state.variables, **{"cache": cache}}, previous[:, t : t + 1])
        cache = cache["cache"]
        assert relative_error(out[:, 0], logits[:, t]) < 1e-5


@pytest.mark.slow
def test_a_step_of_decoding_of_lm1b_can_be_exported():
    pytest.importorskip("flatbuffers")
    export.register_namedtuple_serialization(AttentionState, serialized_name="AttentionState")
    decoder = lm1b.TransformerLM(LM1B.replace(decode=True))
    variables = nn.meta.unbox(jax.jit(decoder.init)(jax.random.key(0), TOKENS[:, :1]))
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    data = export.export(step)(variables, TOKENS[:, :1]).serialize()
    again = export.deserialize(data).call(variables, TOKENS[:, :1])
    chex.assert_trees_all_close(again, step(variables, TOKENS[:, :1]), rtol=1e-5)


def big_vision_model(**options):
    return big_vision_vit.ViT(num_classes=10, depth=2, **options)


@pytest.mark.slow
def test_the_big_vision_vit_trains_saves_restores_and_redraws():
    model = big_vision_model(scan=True, dropout=0.1)

    def loss(variables, key):
        logits, _ = model.apply(variables, IMAGES, train=True, rngs={"dropout": key})
        return classification_loss(logits, LABELS)

    state = train(linen_state(model, IMAGES), loss, num_steps=30)
    call = jax.jit(lambda variables: model.apply(variables, IMAGES)[0])
    logits = call(state.variables)

    fresh = linen_state(model, IMAGES, seed=9)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    np.testing.assert_array_equal(call(restored.variables), logits)

    redrawn = redraw_projections(jax.random.key(5), restored.random_features)
    assert_redrawn(restored.random_features, redrawn)
    variables = {**restored.variables, "random_features": redrawn}
    assert 0 < relative_error(call(variables), logits) < 1

    report = linen_adapter.attention_report(model, state.variables, IMAGES[:2])
    name = "Transformer.encoderblock.MultiHeadDotProductAttention_0.attention_fn"
    assert [*report] == [f"{name}[0]", f"{name}[1]"]
    assert report[f"{name}[1]"].relative_error.shape == (2,)

    with pytest.raises(ValueError, match="lack the collection random_features, which holds W"):
        model.apply({"params": state.params}, IMAGES)


@pytest.mark.slow
def test_scanned_layers_of_the_big_vision_vit_are_those_one_after_the_other():
    plain, scanned = big_vision_model(), big_vision_model(scan=True)
    variables = jax.jit(plain.init)(jax.random.key(0), IMAGES)
    stacked = {}
    for name, collection in variables.items():
        transformer = dict(collection["Transformer"])
        layers = [transformer.pop(f"encoderblock_{n}") for n in range(2)]
        transformer["encoderblock"] = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        stacked[name] = {**collection, "Transformer": transformer}
    _, one = jax.jit(plain.apply)(variables, IMAGES)
    _, other = jax.jit(scanned.apply)(stacked, IMAGES)
    assert relative_error(other["head_input"], one["head_input"]) < 1e-5


@pytest.mark.slow
def test_gemma_trains_saves_restores_redraws_and_decodes():
    make = functools.partial(gemma.Transformer, gemma.TransformerConfig(num_layers=1))
    model = make(rngs=nnx.Rngs(0))
    positions = jnp.arange(12)[None].repeat(2, 0)

    def loss(model):
        logits = model(TOKENS[:, :-1], positions[:, :-1])
        return classification_loss(logits, TOKENS[:, 1:])

    train_nnx(model, loss)
    call = nnx.jit(lambda m, tokens, positions: m(tokens, positions))
    logits = call(model, TOKENS, positions)

    saved = serialization.to_bytes(nnx.to_pure_dict(nnx.state(model)))
    fresh = make(rngs=nnx.Rngs(9))
    state = nnx.state(fresh)
    pure = serialization.from_bytes(nnx.to_pure_dict(state), saved)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(fresh, state)
    np.testing.assert_array_equal(call(fresh, TOKENS, positions), logits)

    projections = nnx.state(fresh, RandomProjection)
    redrawn = redraw_projections(jax.random.key(5), projections)
    assert_redrawn(projections, redrawn)
    nnx.update(fresh, redrawn)
    assert 0 < relative_error(call(fresh, TOKENS, positions), logits) < 1

    decoder = view(model, only=RandomFeatureAttention, decode=True, batch_size=2)
    for where in (slice(0, 9), slice(9, 10), slice(10, 11)):
        out = call(decoder, TOKENS[:, where], positions[:, where])
        assert relative_error(out, logits[:, where]) < 1e-5


def documented_changes(name):
    """Returns the lines that the page takes away and adds, in pairs."""
    page = (ROOT.parent / "docs" / "how_to" / "models_of_others.md").read_text()
    section = page.split(f"`models/{name}.py`")[1].split("\n### ")[0]
    for block in re.findall(r"```diff\n(.*?)```", section, flags=re.DOTALL):
        lines = block.splitlines()
        removed = [line[1:] for line in lines if line[0] == "-"]
        [added] = [line[1:] for line in lines if line[0] == "+"]
        yield "".join(f"{line}\n" for line in removed), f"{added}\n"


def before(name):
    """Returns the module of a model without the changes that the page documents."""
    source = (MODELS / f"{name}.py").read_text()
    changes = list(documented_changes(name))
    assert changes
    for removed, added in changes:
        assert source.count(added) == 1, f"{name}.py lacks {added}"
        source = source.replace(added, removed)
    assert source.count("RandomFeatureAttention") == 1  # The import.
    module = types.ModuleType(f"before_{name}")
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    return module


def shapes_of_linen(module, make, inputs):
    model = make(module)
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    return jax.tree.map(jnp.shape, shapes["params"])


LINEN = {
    "lm1b": (lm1b, lambda m: m.TransformerLM(m.TransformerConfig(deterministic=True)), TOKENS),
    "big_vision_vit": (big_vision_vit, lambda m: m.ViT(num_classes=10), IMAGES),
    "big_vision_vit, scanned": (big_vision_vit, lambda m: m.ViT(10, scan=True), IMAGES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINEN)
def test_without_the_documented_lines_linen_models_have_the_same_parameters(name):
    module, make, inputs = LINEN[name]
    plain = before(name.split(",")[0])
    assert shapes_of_linen(plain, make, inputs) == shapes_of_linen(module, make, inputs)


NNX = {
    "bonsai_vit": (
        bonsai_vit,
        lambda m: m.ViTClassificationModel(m.ModelConfig(), rngs=nnx.Rngs(0)),
        (IMAGES,),
    ),
    "gemma": (
        gemma,
        lambda m: m.Transformer(m.TransformerConfig(), rngs=nnx.Rngs(0)),
        (TOKENS, jnp.arange(12)[None].repeat(2, 0)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NNX)
def test_without_the_documented_lines_nnx_models_have_the_same_parameters(name):
    module, make, inputs = NNX[name]
    shapes = []
    for one in (before(name), module):
        model = nnx.eval_shape(lambda one=one: make(one))
        shapes.append(jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(model, nnx.Param))))
        assert nnx.eval_shape(lambda one=one: make(one)(*inputs)).shape[0] == len(inputs[0])
    assert shapes[0] == shapes[1]
