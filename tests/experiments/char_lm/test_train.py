import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.char_lm import corpus, train
from experiments.char_lm.model import ATTENTIONS, CharLM, rotate
from experiments.harness.mistakes import UserError
from tests.experiments.char_lm import tiny

TEXT = corpus.split("The question: to be, or not to be, that is the question: " * 20)


def make_model(attention, **changes):
    config = tiny.get_config(**changes)
    rngs = nnx.Rngs(params=0, features=1)
    return CharLM(20, attention=attention, **config.model.to_dict(), rngs=rngs)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_models_see_what_was_before_and_the_near_field_only_what_is_near(attention):
    model = make_model(attention)
    kernel = model.head.kernel  # The kernel starts at zero.
    kernel[...] = jax.random.normal(jax.random.key(0), kernel.shape)
    run = nnx.jit(lambda model, indices: model(indices))
    indices = jnp.arange(40).reshape(2, 20) % 20
    logits = run(model, indices)
    assert logits.shape == (2, 20, 20)
    changed = (logits != run(model, indices.at[0, 12].set(0))).any(axis=-1)
    expected = np.zeros((2, 20), bool)
    expected[0, 12 : 12 + 2 + 1 if attention == "near" else None] = True
    np.testing.assert_array_equal(changed, expected)


@pytest.mark.slow
def test_attentions_begin_with_the_same_parameters():
    models = [nnx.state(make_model(attention), nnx.Param) for attention in ATTENTIONS]
    for state in models[1:]:
        ours = dict(nnx.to_flat_state(state))
        for path, value in nnx.to_flat_state(models[0]):
            np.testing.assert_array_equal(ours[path][...], value[...])


def test_rotation_tells_distances_and_keeps_lengths():
    vectors = np.random.default_rng(0).normal(size=(2, 1, 1, 6)).astype(np.float32)
    rotated = jax.jit(rotate)(np.broadcast_to(vectors, (2, 10, 3, 6)))  # Equal at all positions.
    x, y = np.asarray(rotated, np.float64)[:, :, 0]
    np.testing.assert_allclose(np.linalg.norm(x, axis=-1), np.linalg.norm(vectors[0]), rtol=1e-6)
    products = x @ y.T
    for distance in range(-9, 10):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert len(np.unique(products.round(5))) == 19


@pytest.mark.slow
def test_loss_falls_and_a_run_is_a_function_of_its_seed():
    config = tiny.get_config(num_steps=60, eval_interval=20, learning_rate=1e-2)
    program = train.make_program(config, "softmax", len(TEXT.alphabet))
    runs = [
        train.train(program, TEXT, config, seed=seed, name=f"run {number}")
        for number, seed in enumerate((0, 0, 1))
    ]
    losses, sample = runs[0]
    assert losses.shape == (3,)
    assert losses[-1] < losses[0] < np.log(len(TEXT.alphabet))
    for ours, theirs in zip(runs[0], runs[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (runs[2][0] != losses).all()
    assert sample.shape == (config.context,)
    assert corpus.decode(sample, TEXT.alphabet).startswith("The ")


@pytest.mark.slow
def test_near_and_far_learn_their_weights_and_redraws_change_only_projections():
    config = tiny.get_config(redraw_interval=2)
    program = train.make_program(config, "near_far", len(TEXT.alphabet))
    before = program.init(jax.random.key(0))
    after = program.init(jax.random.key(0))
    batch = corpus.train_batch(TEXT.train, batch_size=4, context=16, seed=0, step=0)
    for _ in range(3):  # The head's kernel starts at zero, and so do all other gradients.
        after, loss = program.train_step(after, batch)
    assert 0 < loss < np.log(len(TEXT.alphabet))
    assert after.step == 3
    for path, value in nnx.to_flat_state(before.params):
        assert (dict(nnx.to_flat_state(after.params))[path][...] != value[...]).any(), path
    chex.assert_trees_all_equal(before.projections, after.projections)
    drawn = program.redraw(jax.tree.map(jnp.copy, after))
    chex.assert_trees_all_equal(drawn.params, after.params)
    same, other = (jax.tree.leaves(s.projections) for s in (after, drawn))
    assert all((a != b).any() for a, b in zip(same, other, strict=True))


def fake_program(**functions):
    """Returns a program whose state is a list of the calls."""
    functions = {
        "init": lambda key: [],
        "redraw": lambda state: [*state, "redraw"],
        "calibrate": None,
        "train_step": lambda state, batch: ([*state, batch.shape], 0.0),
        "calibrates_once": False,
        "evaluate": lambda state, batch: float(len(state)),
        "sample": lambda state, prompt: np.array(state, object),
    } | functions
    return train.Program(**functions)


@pytest.mark.fast
def test_projections_are_drawn_again_before_the_steps_of_the_interval():
    config = tiny.get_config(redraw_interval=2)
    losses, done = train.train(fake_program(), TEXT, config, seed=0, name="far-0")
    assert done.tolist() == ["redraw", (4, 17), (4, 17), "redraw", (4, 17), (4, 17)]
    assert losses.tolist() == [3.0, 6.0]


@pytest.mark.fast
def test_features_are_fitted_before_the_steps_of_the_interval_to_batches_of_no_step():
    batches = []

    def calibrate(state, batch):
        batches.append(batch)
        return [*state, "fit"]

    def train_step(state, batch):
        batches.append(batch[:, :-1])
        return [*state, "step"], 0.0

    config = tiny.get_config(calibrate_interval=2)
    program = fake_program(calibrate=calibrate, train_step=train_step)
    _, done = train.train(program, TEXT, config, seed=0, name="band_calibrated-0")
    assert done.tolist() == ["fit", "step", "step", "fit", "step", "step"]
    assert len(np.unique(batches, axis=0)) == 6
    program = program._replace(calibrates_once=True)
    _, done = train.train(program, TEXT, config, seed=0, name="band_learned-0")
    assert done.tolist() == ["fit", "step", "step", "step", "step"]


@pytest.mark.slow
def test_a_fit_changes_the_features_alone_and_no_character_sees_later_ones():
    program = train.make_program(tiny.get_config(), "band_calibrated", 20)
    state = program.init(jax.random.key(0))
    before = jax.device_get((state.params, state.projections, state.calibrations))
    batch = np.arange(64).reshape(4, 16) % 20
    state = program.calibrate(state, batch)
    chex.assert_trees_all_equal(state.params, before[0])
    fitted = jax.tree.leaves(state.calibrations)
    assert all((a != b).any() for a, b in zip(fitted, jax.tree.leaves(before[2]), strict=True))

    model = make_model("band_calibrated")
    nnx.update(model, state.projections, state.calibrations)
    kernel = model.head.kernel  # The kernel starts at zero.
    kernel[...] = jax.random.normal(jax.random.key(0), kernel.shape)
    run = nnx.jit(lambda model, indices: model(indices))
    changed = (run(model, batch) != run(model, np.where(np.arange(16) < 9, batch, 0))).any(-1)
    np.testing.assert_array_equal(changed.all(0), np.arange(16) >= 9)
    assert not changed[:, :9].any()


@pytest.mark.fast
def test_a_loss_that_is_not_finite_stops_the_run():
    program = fake_program(evaluate=lambda state, batch: np.nan)
    with pytest.raises(UserError, match="validation loss of near-0 is nan at step 2"):
        train.train(program, TEXT, tiny.get_config(), seed=0, name="near-0")


@pytest.mark.fast
def test_an_unknown_attention_is_refused():
    with pytest.raises(ValueError, match=r"attention must be one of softmax, .*, got 'sofmax'"):
        train.make_program(tiny.get_config(), "sofmax", len(TEXT.alphabet))
