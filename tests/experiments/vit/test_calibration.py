"""Training with calibrated features."""

import chex
import jax
import numpy as np
import pytest

from experiments.vit import train
from experiments.vit.tools import evaluate
from experiments.vit.training import hosts, trained
from tests.experiments.vit import tiny
from tests.experiments.vit.test_train import build, make_batch, read_losses
from tests.experiments.vit.training.test_sharding import mesh_of

CALIBRATED = {
    "model__feature_map": "calibrated",
    "model__exact_bandwidth": 1,
    "calibrate_interval": 4,
    # The queries and keys must change, or all calibrations would be alike.
    "learning_rate": 0.01,
    "warmup_steps": 0,
}


def get_config(**changes):
    """A run of ten steps whose fits, redraws and checkpoints are out of step with each other."""
    schedule = {"num_steps": 10, "eval_interval": 10, "redraw_interval": 7}
    return tiny.get_config(**(CALIBRATED | schedule | {"checkpoint__interval": 3} | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped, and its calibration at the start of each step."""
    workdir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        return workdir, train_and_record(get_config(), workdir, patch)


def train_and_record(config, workdir, patch):
    """Trains, and returns the number of each step and the calibration that it is taken with."""
    seen = []
    original = train.build_program

    def recording(*args, **keywords):
        program = original(*args, **keywords)

        def train_step(state, batch):
            with jax.transfer_guard("allow"):
                seen.append((int(state.step), jax.device_get(jax.tree.leaves(state.calibrations))))
            return program.train_step(state, batch)

        return program._replace(train_step=train_step)

    patch.setattr(train, "build_program", recording)
    train.train(config, workdir)
    return seen


@pytest.mark.slow
def test_features_are_fitted_at_the_steps_of_the_schedule(whole):
    steps, calibrations = zip(*whole[1], strict=True)
    assert steps == tuple(range(10))
    changes = [
        all((a != b).any() for a, b in zip(calibrations[step], calibrations[step - 1], strict=True))
        for step in range(1, 10)
    ]
    assert [step for step, changed in enumerate(changes, start=1) if changed] == [4, 8]
    identity = jax.device_get(jax.tree.leaves(build(get_config()).init().calibrations))
    assert all((a != b).any() for a, b in zip(calibrations[0], identity, strict=True))


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_calibrations_of_the_whole_one(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(hosts.Preemption, "reached", lambda self, step: step == 6)
        with pytest.raises(SystemExit):
            train.train(get_config(), tmp_path)
    with monkeypatch.context() as patch:
        rest = train_and_record(get_config(), tmp_path, patch)
    assert [step for step, _ in rest] == [6, 7, 8, 9]
    chex.assert_trees_all_equal(rest, whole[1][6:])
    assert read_losses(tmp_path) == read_losses(whole[0])


@pytest.mark.slow
def test_a_checkpoint_holds_the_calibration_and_evaluation_takes_it(whole):
    workdir, seen = whole
    model = trained.load(workdir, mesh_of(), best=False)
    assert model.step == 10
    chex.assert_trees_all_equal(jax.device_get(jax.tree.leaves(model.states[2])), seen[-1][1])
    result = evaluate.evaluate(workdir, best=False)
    assert result["test_accuracy"] == model.test_accuracy


@pytest.mark.slow
@pytest.mark.devices(8)
def test_a_mesh_fits_as_one_device_does():
    def fitted(mesh, **changes):
        program = build(tiny.get_config(**CALIBRATED, **changes), mesh)
        with jax.set_mesh(mesh):
            state = program.calibrate(program.init(), make_batch()["image"])
            return jax.device_get(jax.tree.leaves(state.calibrations))

    for one, other in zip(fitted(mesh_of()), fitted(mesh_of(1, 2, 2, 2)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.devices(8)
def test_eight_devices_train_as_one_does(whole, tmp_path):
    config = get_config(mesh__data=2, mesh__fsdp=2, mesh__tensor=2, model__scan=True)
    train.train(config, tmp_path)
    np.testing.assert_allclose(read_losses(tmp_path), read_losses(whole[0]), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bandwidth", "is_exact"), [pytest.param(-1, False, marks=pytest.mark.slow), (16, True)]
)
def test_diagnostics_see_the_calibration_and_the_band(bandwidth, is_exact):
    changes = {"diagnostics__images": 5, "diagnostics__redraws": 3}
    program = build(
        tiny.get_config(**(CALIBRATED | changes | {"model__exact_bandwidth": bandwidth}))
    )
    images = make_batch()["image"]
    with jax.set_mesh(program.mesh):
        state = program.init()
        before = program.diagnose(state.model, state.key, images)["feature_variance"]
        state = program.calibrate(state, images)
        after = program.diagnose(state.model, state.key, images)["feature_variance"]
    if is_exact:  # The band has all tokens.
        np.testing.assert_allclose([before, after], 0, atol=1e-8)
    else:
        assert 0 < after < before
