"""Accuracy of finished runs, by attention: ``python -m experiments.vit.tools.report DIR...``."""

from __future__ import annotations

import argparse
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from experiments.harness import config_fields, files, markdown, style
from experiments.harness.mistakes import UserError, exit_on_user_error
from experiments.vit.config import config_differences
from experiments.vit.metrics import log
from simrf_jax._src.models.config import ATTENTIONS

# The numbers of ``results.json`` that are read, and the least that each may be.
_LEAST = {
    "test_accuracy": 0,
    "test_loss": 0,
    "images_per_second": 0,
    "seconds": 0,
    "num_train": 1,
    "config.seed": 0,
    "config.batch_size": 1,
}
# Fields that may differ between the runs of a comparison; each run has its own checkpoints.
_COMPARED = {"seed", "model.attention", "checkpoint.folder"}


class Run(NamedTuple):
    """A finished run.

    Attributes:
      folder: Folder of the run.
      results: Content of its ``results.json``.
      tests: Step and accuracy of each evaluation, ``[evaluations, 2]``, of what is held out or, if
        nothing is, of the test set.
    """

    folder: pathlib.Path
    results: dict[str, Any]
    tests: np.ndarray

    @property
    def attention(self) -> str:
        """Attention of its config."""
        return self.results["config"]["model"]["attention"]

    @property
    def seed(self) -> int:
        """Seed of its config."""
        return self.results["config"]["seed"]

    @property
    def epochs(self) -> np.ndarray:
        """Epoch of each evaluation, a fraction if it was in the middle of one."""
        batch_size = self.results["config"]["batch_size"]
        return self.tests[:, 0] * batch_size / self.results["num_train"]


# By attention.
Runs = Mapping[str, Sequence[Run]]


def find_runs(folders: Iterable[str | pathlib.Path]) -> dict[str, list[Run]]:
    """Reads finished runs that are to be compared.

    Args:
      folders: Folders of runs, or folders that hold some.

    Returns:
      The runs of each attention, by seed.

    Raises:
      UserError: If there is no run in a folder, or one that is not finished or whose files are
        damaged or contradict each other; or if the runs differ in more than the attention and the
        seed, do not, or were not evaluated after the same steps. Fields that one of two configs has
        not, as it is of an older version, are not compared.
    """
    found = [run for folder in folders for run in _runs_in(pathlib.Path(folder))]
    if unfinished := [str(run) for run in found if not (run / "results.json").exists()]:
        raise UserError(
            f"Not finished, without results.json: {', '.join(unfinished)}. The command that "
            "started a run goes on with it; or name the finished ones."
        )
    runs = [_read(run) for run in found]
    for run in runs[1:]:
        _check_alike(runs[0], run)
    by_attention: dict[str, list[Run]] = {}
    for attention in ATTENTIONS:
        some = sorted((run for run in runs if run.attention == attention), key=lambda run: run.seed)
        _check_seeds(some)
        if some:
            by_attention[attention] = some
    return by_attention


def _runs_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folder if it is that of a run, or else the folders of runs in it."""
    if (folder / "config.json").exists():
        return [folder]
    inside = sorted(path.parent for path in folder.glob("*/config.json"))
    if not inside:
        raise UserError(f"There is no run in {folder}, and none in the folders in it.")
    return inside


def _read(folder: pathlib.Path) -> Run:
    results = read_results(folder)
    metrics = log.read_metrics(folder)
    for name in ("test_loss", "test_accuracy"):
        if not metrics.get(name):
            raise UserError(f"{folder / 'metrics.csv'} is damaged: it has no {name}.")
        (step, last), result = metrics[name][-1], results[name]
        if not math.isclose(last, result):
            raise UserError(
                f"{folder} contradicts itself: {name} is {result} in results.json, and {last} at "
                f"the end of metrics.csv, after step {step}."
            )
    curve = metrics.get("held_out_accuracy") or metrics["test_accuracy"]
    return Run(folder, results, np.array(curve))


def read_results(folder: pathlib.Path) -> dict[str, Any]:
    """Reads ``results.json`` of a finished run.

    Raises:
      UserError: If it cannot be read, is damaged, or lacks what is needed of it.
    """
    path = folder / "results.json"
    results = files.read_json(path)
    given = config_fields.flatten(results)
    for name, least in _LEAST.items():
        number = given.get(name, "nothing")
        if type(number) not in (int, float) or not least <= number < math.inf:
            raise UserError(
                f"{path} is damaged: {name} must be a number of at least {least}, got {number!r}."
            )
    name = "config.model.attention"
    config_fields.check_one_of(f"{path} is damaged: {name}", given.get(name), ATTENTIONS)
    return results


def _check_alike(first: Run, other: Run) -> None:
    configs = [config_fields.flatten(run.results["config"]) for run in (first, other)]
    shared = configs[0].keys() & configs[1].keys() - _COMPARED
    theirs, ours = ({k: v for k, v in config.items() if k in shared} for config in configs)
    if differ := config_differences(theirs, ours):
        raise UserError(
            f"{other.folder} differs from {first.folder} in more than the seed and the attention: "
            f"{'; '.join(differ)}."
        )
    if not np.array_equal(first.tests[:, 0], other.tests[:, 0]):
        raise UserError(f"{first.folder} and {other.folder} were evaluated after other steps.")


def _check_seeds(runs: Sequence[Run]) -> None:
    for before, run in itertools.pairwise(runs):
        if before.seed == run.seed:
            raise UserError(
                f"{before.folder} and {run.folder} both are of {run.attention} with seed "
                f"{run.seed}; name each run once."
            )


def make_table(runs: Runs) -> str:
    """Makes a table with a row for each attention: means and spread over seeds, median speed."""
    header = ["attention", "test accuracy", "s.d.", "test loss", "s.d.", "seeds"]
    header += ["images/s", "seconds a run"]
    rows = []
    for attention, some in runs.items():
        cells = [attention]
        for name in ("test_accuracy", "test_loss"):
            values = np.array([run.results[name] for run in some])
            spread = f"{values.std(ddof=1):.4f}" if len(some) > 1 else "-"
            cells += [f"{values.mean():.4f}", spread]
        cells.append(str(len(some)))
        for name in ("images_per_second", "seconds"):
            cells.append(f"{np.median([run.results[name] for run in some]):.0f}")
        rows.append(cells)
    return markdown.table(header, rows) + "\n"


def draw(runs: Runs) -> Figure:
    """Draws accuracy against the epoch, as in Fig. 9 of the paper, and differences at the end.

    Lines are means over seeds, bands one standard deviation of a run to either side. Curves hide
    one another, so the other panel has the test accuracy of each run minus that of the first
    attention with the same seed: dots for the seeds, and their means with standard errors.

    References:
      Reid et al., Simplex Random Features (ICML 2023), Fig. 9.
    """
    figure, (curves, ends) = style.subplots(10, 4, 1, 2)
    names = [style.LABELS.get(attention, attention) for attention in runs]
    ends.axvline(0, color="black", linewidth=0.8)
    first = {run.seed: run.results["test_accuracy"] for run in next(iter(runs.values()))}
    for row, (attention, some) in enumerate(runs.items()):
        look = style.STYLES[attention]
        _draw_curve(curves, some, look | {"label": names[row]})
        _draw_differences(ends, row, some, first, look["color"])
    held_out = any(run.results["config"].get("held_out") for some in runs.values() for run in some)
    measured_on = "held-out" if held_out else "test"
    curves.set(xlabel="epoch", ylabel=f"{measured_on} accuracy")
    curves.legend()
    style.tidy(curves)
    ends.set_xlabel(f"test accuracy minus that of {names[0]}, same seed")
    ends.set_yticks(range(len(runs)), names)
    ends.set_ylim(len(runs) - 0.5, -0.5)
    ends.locator_params(axis="x", nbins=5)
    style.tidy(ends)
    ends.grid(visible=False, axis="y")
    return figure


def _draw_curve(axes: Axes, runs: Sequence[Run], look: dict[str, Any]) -> None:
    accuracies = np.stack([run.tests[:, 1] for run in runs])
    epochs, mean = runs[0].epochs, accuracies.mean(axis=0)
    axes.plot(epochs, mean, **look)
    if len(runs) > 1:
        spread = accuracies.std(axis=0, ddof=1)
        style.band(axes, epochs, mean - spread, mean + spread, color=look["color"])


def _draw_differences(
    axes: Axes, row: int, runs: Sequence[Run], first: Mapping[int, float], color: str
) -> None:
    """Draws test accuracies minus those of the first attention, by seed."""
    gains = [run.results["test_accuracy"] - first[run.seed] for run in runs if run.seed in first]
    if len(gains) > 1:
        error = np.std(gains, ddof=1) / len(gains) ** 0.5
        axes.errorbar(np.mean(gains), row, xerr=error, color=color, fmt="D", capsize=4)
    below = 0.2 if len(gains) > 1 else 0.0  # Not on the mean.
    axes.plot(gains, [row + below] * len(gains), "o", color=color, ms=5, alpha=0.6)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table and draws the figure of the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="A run, or a folder of runs.")
    parser.add_argument("--figure", default="report.png", help="File to draw into: report.png.")
    arguments = parser.parse_args(argv)
    figure = pathlib.Path(arguments.figure)
    formats = FigureCanvasBase.get_supported_filetypes()
    if figure.suffix.removeprefix(".") not in formats:
        parser.error(f"--figure must end in one of .{', .'.join(formats)}, got {figure}.")
    with exit_on_user_error():
        runs = find_runs(arguments.folders)
        print(make_table(runs))
        files.save_figure(figure, draw(runs), dpi=150)
    print(f"The curves are in {figure}.")


if __name__ == "__main__":
    main()
