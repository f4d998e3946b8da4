"""The work that is due before and after a step, as the intervals of a config say."""

from __future__ import annotations

from typing import NamedTuple

from ml_collections import ConfigDict


class Due(NamedTuple):
    """The work that is due after a step.

    Attributes:
      row: True if a row of the log is due, as it is whenever anything else is.
      evaluation: True if an evaluation is due.
      checkpoint: True if a checkpoint is due, whatever the accuracy.
      stop: True if the run must stop before its last step.
    """

    row: bool
    evaluation: bool
    checkpoint: bool
    stop: bool


def due_after(config: ConfigDict, done: int, *, stopping: bool) -> Due:
    """Returns what is due after the step that makes ``done`` steps."""
    last = done == config.num_steps
    evaluation = last or done % config.eval_interval == 0
    interval = config.checkpoint.interval
    saves = bool(interval) and (last or stopping or done % interval == 0)
    row = evaluation or saves or stopping or done % config.log_interval == 0
    return Due(row, evaluation, saves, stopping and not last)


def redraws(config: ConfigDict, step: int) -> bool:
    """Returns whether this step has other projections than the last one."""
    interval = config.redraw_interval
    return step == 0 or bool(interval and step % interval == 0)


def calibrates(config: ConfigDict, step: int) -> bool:
    """Returns whether the features of this step are fitted to its batch, before it is taken."""
    interval = config.calibrate_interval
    return bool(interval and step % interval == 0)
