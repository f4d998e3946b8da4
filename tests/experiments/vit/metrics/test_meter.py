import time

import jax.numpy as jnp
import pytest

from experiments.harness.mistakes import UserError
from experiments.vit import train
from experiments.vit.metrics import meter
from experiments.vit.metrics.bar import Bar
from experiments.vit.training.due import due_after
from tests.experiments.vit import tiny


def metrics_of(loss, gradient_norm):
    return {
        "loss": jnp.float32(loss),
        "accuracy": jnp.float32(0.5),
        "gradient_norm": jnp.float32(gradient_norm),
    }


@pytest.mark.fast
def test_a_row_is_of_the_means_since_the_row_before_and_each_step_can_be_checked(monkeypatch):
    clock = iter([0.0, 6.0, 7.0, 9.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    window = meter.Meter(meter.Speed(batch_size=10, flops=60, peak=100.0))
    for loss, norm in ((1, 2), (2, 4), (6, jnp.inf)):
        window.add(metrics_of(loss, norm))
    row, each = window.read(5, 0.1)
    assert row["train_loss"] == 3
    assert (row["images_per_second"], row["flops_per_second"], row["mfu"]) == (5, 30, 0.3)
    assert each == {
        "loss": {3: 1.0, 4: 2.0, 5: 6.0},
        "gradient's norm": {3: 2.0, 4: 4.0, 5: float("inf")},
    }
    window.restart()
    window.add(metrics_of(7, 1))
    assert window.read(6, 0.1)[0]["train_loss"] == 7


@pytest.mark.fast
def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    with pytest.raises(UserError, match="The gradient's norm is inf at step 3 of 4"):
        train.check_finite(
            "gradient's norm", {2: 1.0, 3: float("inf")}, tiny.get_config(), tmp_path, range(0)
        )


@pytest.mark.fast
@pytest.mark.parametrize("shows", [True, False])
def test_lines_are_written_where_the_bar_shows(shows, capsys):
    with Bar(3, 0, shows=shows) as bar:
        bar.write("a line")
    assert ("a line" in capsys.readouterr().out) == shows


@pytest.mark.fast
def test_a_notice_stops_a_run_without_checkpoints_too():
    due = due_after(tiny.get_config(num_steps=9, log_interval=9, eval_interval=9), 4, stopping=True)
    assert (due.row, due.checkpoint, due.stop) == (True, False, True)
    with Bar(9, 0, shows=False) as bar, pytest.raises(SystemExit, match="4; the run kept no check"):
        train.stop(bar, 4, None)
