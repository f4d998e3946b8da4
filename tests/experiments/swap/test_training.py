import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.char_lm import corpus
from experiments.swap import training
from experiments.swap.methods import METHODS, Method
from experiments.swap.swapping import record, swapped
from experiments.swap.training import language_task, vision_task
from simrf_jax.integrations.nnx import RandomProjection
from tests.experiments.swap import tiny
from tests.tiers import slow_but

OPTIMIZER = optax.sgd(0.1)


@pytest.fixture(scope="module")
def digits():
    return vision_task("digits", tiny.get_config().digits, "")


@pytest.fixture(scope="module")
def char_lm():
    return language_task(corpus.load(), tiny.get_config().char_lm)


def trained(task, model, steps, **changes):
    """Returns the model after each of some numbers of steps."""
    options = {"seed": 0, "first_step": 5} | changes
    return list(training.train(task, model, OPTIMIZER, milestones=steps, **options))


def with_scaled_features(task, model):
    """Returns the model with fitted random features."""
    layers, _ = record(model, task.logits, task.fit_inputs)
    method = Method("scaled", tiny.fit_scaled, "simplex")
    attentions = method.attentions(jax.random.key(0), layers, 5, schedule=tiny.SCHEDULE)
    return swapped(model, attentions)


@pytest.mark.slow
def test_milestones_are_stops_of_one_run(digits):
    model = training.initial_model(digits, 0)
    start, first, second = trained(digits, model, (0, 1, 3))
    np.testing.assert_array_equal(training.parameters(start), training.parameters(model))
    assert not np.array_equal(training.parameters(first), training.parameters(start))
    [whole] = trained(digits, model, (3,))
    np.testing.assert_array_equal(training.parameters(whole), training.parameters(second))
    [rest] = trained(digits, first, (2,), first_step=6)  # Gradient descent has no state.
    np.testing.assert_array_equal(training.parameters(rest), training.parameters(second))


@pytest.mark.slow
def test_a_step_descends_the_mean_loss_with_dropout_and_its_batch(digits):
    model = training.initial_model(digits, 0)
    [after] = trained(digits, model, (1,), seed=3)
    graphdef, params = nnx.split(model)
    images, labels = digits.train_batches(3)(5)
    prng_key = jax.random.fold_in(jax.random.key(3), training.DROPOUT)
    prng_key = jax.random.fold_in(prng_key, 5)

    def mean_loss(params):
        logits = nnx.merge(graphdef, params)(images, rngs=nnx.Rngs(dropout=prng_key))
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    expected = jax.tree.map(lambda x, g: x - 0.1 * g, params, jax.grad(mean_loss)(params))
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(after)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["digits"], ["digits", "char_lm"]))
def test_fine_tuning_leaves_projections_and_maps_alone(name, request):
    task = request.getfixturevalue(name)
    model = with_scaled_features(task, training.initial_model(task, 0))
    [after] = trained(task, model, (2,))
    before, now = (nnx.split(m, nnx.Param, ...)[1:] for m in (model, after))
    assert len(jax.tree.leaves(now[1])) == 4  # A projection and a factor in each layer.
    jax.tree.map(np.testing.assert_array_equal, now[1], before[1])
    assert len(jax.tree.leaves(nnx.state(after, RandomProjection))) == 2
    assert any(
        not np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(now[0]), jax.tree.leaves(before[0]), strict=True)
    )


@pytest.mark.slow
def test_fine_tuning_trains_learned_rows_in_fixed_coordinates(digits):
    model = training.initial_model(digits, 0)
    layers, _ = record(model, digits.logits, digits.fit_inputs)
    method = METHODS["learned"]
    attentions = method.attentions(jax.random.key(0), layers, 6, schedule=tiny.SCHEDULE)
    before = swapped(model, attentions)
    # The head of a new model is zeros, which stop all gradients in the first step.
    [after] = trained(digits, before, (2,))
    for own, start in zip(after.blocks, attentions, strict=True):
        now = own.attention.attention_fn
        calibrations = (one.feature_map.get_value() for one in (now, start))
        jax.tree.map(np.testing.assert_array_equal, *calibrations)
        assert not np.array_equal(now.learned.query_rows[...], start.learned.query_rows[...])


@pytest.mark.slow
def test_parameters_come_back_from_their_vector(digits):
    model = training.initial_model(digits, 7)
    back = training.with_parameters(digits, training.parameters(model))
    images = digits.test_inputs[:2]
    np.testing.assert_array_equal(digits.logits(back, images), digits.logits(model, images))
    other = training.parameters(training.initial_model(digits, 8))
    assert not np.array_equal(other, training.parameters(model))


@pytest.mark.slow
def test_accuracy_is_the_share_of_all_test_images(digits):
    [model] = trained(digits, training.initial_model(digits, 0), (2,))
    right = digits.logits(model, digits.test_inputs).argmax(-1) == digits.test_targets
    assert digits.test_inputs.shape == (360, 8, 8, 1)
    few = digits._replace(test_batch_size=100)  # Which does not divide 360.
    np.testing.assert_allclose(training.evaluate(few, model), np.mean(right), rtol=1e-6)


@pytest.mark.slow
def test_bits_are_the_loss_of_the_validation_text(char_lm):
    model = training.initial_model(char_lm, 0)
    # The head begins as zeros, so every character is as likely.
    vocabulary = model.head.bias.shape[0]
    np.testing.assert_allclose(training.evaluate(char_lm, model), np.log2(vocabulary), rtol=1e-5)
    np.testing.assert_array_equal(char_lm.test_inputs[:, 1:], char_lm.test_targets[:, :-1])


def test_models_are_fitted_on_training_data(digits, char_lm):
    images, _ = digits.train_batches(0)(0)
    assert digits.fit_inputs.shape == (5, 8, 8, 1)
    assert images.shape == (4, 8, 8, 1)
    tests = {image.tobytes() for image in digits.test_inputs}
    assert not tests & {image.tobytes() for image in digits.fit_inputs}
    rows = {row.tobytes() for row in char_lm.test_inputs}
    assert not rows & {row.tobytes() for row in char_lm.fit_inputs}


@pytest.mark.slow
def test_the_spread_is_that_of_each_layer(digits):
    model = training.initial_model(digits, 0)
    layers, _ = record(model, digits.logits, digits.test_inputs)
    x, y = (np.asarray(z, np.float64) / 2**0.5 for z in layers[1][:2])  # 4^(-1/4)
    expected = np.mean(np.sum((x[:, :, None] + y[:, None]) ** 2, axis=-1))
    ours = training.spread(digits, model)
    assert ours.shape == (2,)
    np.testing.assert_allclose(ours[1], expected, rtol=1e-5)
