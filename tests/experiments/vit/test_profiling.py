import contextlib

import jax
import pytest

from experiments.vit.profiling import Profile

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
