import contextlib

import jax
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit.metrics.profiling import Profile

pytestmark = pytest.mark.fast


@pytest.fixture
def traced(monkeypatch):
    """What starts and stops a trace, in order."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


@pytest.mark.parametrize(
    ("steps", "first", "expected"),
    [
        (2, 0, [0, 1, "start", 2, 3, "stop", 4, 5]),
        (2, 3, ["start", 3, "stop", 4, 5]),  # A run that goes on.
        (2, 4, [4, 5]),
        (4, 0, [0, 1, "start", 2, 3, 4, 5, "stop"]),
        (0, 0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_chosen_steps_and_no_others_are_traced(traced, tmp_path, steps, first, expected):
    with Profile(tmp_path, start=2, steps=steps) as profile:
        for step in range(first, 6):
            profile.before(step)
            traced.append(step)
            profile.after(step, None)
    assert traced == expected


def test_a_run_that_fails_leaves_what_it_traced(traced, tmp_path):
    with contextlib.suppress(ZeroDivisionError), Profile(tmp_path, start=0, steps=5) as profile:
        profile.before(0)
        raise ZeroDivisionError
    assert traced == ["start", "stop"]


@pytest.fixture
def unwritable(traced, monkeypatch):
    """Makes the end of a trace fail as JAX does where the folder is a file."""

    def fail():
        raise jax.errors.JaxRuntimeError("FAILED_PRECONDITION: it is not a directory")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)


@pytest.mark.usefixtures("unwritable")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    profile = Profile(tmp_path / "profile", start=0, steps=1)
    profile.before(0)
    with pytest.raises(UserError, match=r"profile cannot be written: .*it is not a directory"):
        profile.after(0, None)


@pytest.mark.usefixtures("unwritable")
def test_the_error_of_a_step_is_shown_before_that_of_the_folder(tmp_path):
    def fail():
        with Profile(tmp_path / "profile", start=0, steps=5) as profile:
            profile.before(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
