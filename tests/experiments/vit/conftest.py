"""What the runs of these tests share: their compiled programs, and curves that cost nothing."""

import functools

import ml_collections
import pytest
from matplotlib.figure import Figure

from experiments.harness import train_state
from experiments.vit import train
from experiments.vit.metrics import curves
from experiments.vit.training import train_step, trained

# Groups of fields of a config that its programs do not depend on.
OUTSIDE = ("checkpoint", "data_dir", "eval_interval", "held_out", "log_interval", "mirror")


@functools.cache
def _program(fields, mesh, shape, functions):
    del functions
    return train_step.build_program(fields, mesh, **dict(shape))


def _shared(config, mesh, **shape):
    """Returns the program of a config, built once for each version of the functions in it."""
    fields = {name: value for name, value in config.items() if name not in OUTSIDE}
    functions = (
        train_step.ViT,
        train_step.eval_step,
        train_step.train_step,
        train_state.init_state,
        train_state.redraw,
    )
    return _program(ml_collections.FrozenConfigDict(fields), mesh, tuple(shape.items()), functions)


@pytest.fixture(scope="package", autouse=True)
def _shared_programs():
    """Lets runs of the same config share a compiled program."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (train, trained):
            patch.setattr(module, "build_program", _shared)
        yield
    _program.cache_clear()


@pytest.fixture(scope="package", autouse=True)
def _blank_curves():
    """Leaves the curves of runs blank, as drawing them takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", lambda metrics: Figure())
        yield


@pytest.fixture
def drawn_curves(monkeypatch):
    """Draws the curves of runs nonetheless."""
    monkeypatch.setattr(curves, "draw_curves", draw_curves)


draw_curves = curves.draw_curves
