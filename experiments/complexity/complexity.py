"""Complexity experiment: config, run and fitted exponents."""

from __future__ import annotations

import functools
import itertools
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.stats
import tqdm
from ml_collections import ConfigDict

from experiments.complexity import figures, tables
from experiments.complexity.configs import paper
from experiments.complexity.measure import FAST, MATRICES, MEMORIES, TIMES, measure
from experiments.harness import config_fields, files, resumable
from experiments.harness.mistakes import UserError, user_mistakes
from simrf_jax._src import checks
from simrf_jax._src.projections.hadamard import padded_dim

FIELDS = config_fields.types_of(paper.get_config())
NAMES = (*MATRICES, *FAST)
# Pairs whose times to draw are compared round by round. Both methods of a pair are of one kind, so
# their calls alternate.
RATIOS = (
    ("simplex", "orthogonal"),
    ("simplex_plus", "simplex"),
    ("fast_simplex", "fast_orthogonal"),
)
report = tables.report


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    config_fields.check_fields(config, FIELDS, {})
    finite = config_fields.Range("at least 0 and finite", lambda x: 0 <= x < math.inf)
    config_fields.check_range("seconds", config.seconds, finite)
    if config.fit_points < 3:
        raise UserError(
            "config.fit_points must be at least 3, or a slope has no standard error, "
            f"got {config.fit_points}."
        )
    if len(config.dims) < config.fit_points:
        raise UserError(
            f"config.dims must name at least fit_points={config.fit_points} dimensions, "
            f"got {config.dims}."
        )
    dims = (*config.dims, *config.fast_dims)
    with user_mistakes(TypeError, ValueError):
        for dim in dims:
            checks.integer("Each of config.dims and config.fast_dims", dim, least=2)
    for dim in dims:
        if padded_dim(dim) != dim:
            raise UserError(f"config.dims and config.fast_dims must be powers of two, got {dim}.")
    if any(low >= high for low, high in itertools.pairwise(dims)):
        raise UserError(f"config.dims and then config.fast_dims must increase, got {dims}.")


def fit_exponent(dims: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Fits the exponent p of values = c d^p by least squares of logarithms.

    Args:
      dims: Dimensions d.
      values: Positive values, one for each dimension.

    Returns:
      The exponent and its standard error.

    Example:
      >>> slope, error = fit_exponent([2, 4, 8], [12.0, 48.0, 192.0])
      >>> round(slope, 12), round(error, 6)
      (2.0, 0.0)
    """
    line = scipy.stats.linregress(np.log(dims), np.log(values))
    return float(line.slope), float(line.stderr)


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures at all dimensions that ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: ``curves``, for each method a list over dimensions of the
      quartiles of times in milliseconds and of bytes; ``ratios`` of the times to draw, round by
      round; and ``exponents``.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config)
    curves: dict[str, Any] = {name: [] for name in NAMES}
    ratios: dict[str, Any] = {" / ".join(pair): [] for pair in RATIOS}
    sizes = [("matrices", tuple(MATRICES), dim) for dim in config.dims]
    sizes += [("fast", tuple(FAST), dim) for dim in config.dims + config.fast_dims]
    with tqdm.tqdm(sizes, unit="size") as progress:
        for kind, names, dim in progress:
            progress.set_postfix(kind=kind, d=dim)
            measured = _measured(kind, names, dim, config, pieces)
            for number, name in enumerate(names):
                here = {quantity: values[number] for quantity, values in measured.items()}
                curves[name].append(_summary(dim, here))
            draws = dict(zip(names, measured["draw"], strict=True))
            for one, other in RATIOS:
                if one in draws:
                    quartiles = _quartiles(draws[one] / draws[other])
                    ratios[f"{one} / {other}"].append({"dim": dim, "quartiles": quartiles})
    exponents = {name: _exponents(name, curves[name][-config.fit_points :]) for name in NAMES}
    results = {
        "num_vectors": config.num_vectors,
        "curves": curves,
        "ratios": ratios,
        "exponents": exponents,
    }
    return files.finish(workdir, results, lambda: figures.draw(results))


def _measured(
    kind: str, names: Sequence[str], dim: int, config: ConfigDict, pieces: resumable.Pieces
) -> dict[str, np.ndarray]:
    options = {name: config[name] for name in ("num_vectors", "rounds", "seconds")}
    all_at_once = functools.cache(functools.partial(measure, names, dim, **options))
    return {
        quantity: pieces.get(f"{kind}-{dim}-{quantity}", lambda q: all_at_once()[q], quantity)
        for quantity in (*TIMES, "memory")
    }


def _quartiles(values: np.ndarray) -> list[float]:
    return [float(value) for value in np.percentile(values, [25, 50, 75])]


def _summary(dim: int, measured: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns one point of a method's curves."""
    medians = {quantity: _quartiles(measured[quantity]) for quantity in TIMES}
    memory = zip(MEMORIES, measured["memory"], strict=True)
    return {
        "dim": dim,
        "rounds": len(measured["draw"]),
        "ms": medians | {"draw_and_apply": medians["draw"][1] + medians["apply"][1]},
        "bytes": {what: int(number) for what, number in memory},
    }


def _exponents(name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """Fits exponents to median times and to bytes; divides times of fast forms by log d first."""
    dims = [point["dim"] for point in points]
    logs = np.log(dims) if name in FAST else np.ones(len(dims))
    fits: dict[str, Any] = {"first_dim": dims[0], "last_dim": dims[-1], "ms": {}, "bytes": {}}
    for quantity in (*TIMES, "draw_and_apply"):
        medians = [point["ms"][quantity] for point in points]
        values = medians if quantity == "draw_and_apply" else np.array(medians)[:, 1]
        fits["ms"][quantity] = fit_exponent(dims, values / logs)
    for quantity in MEMORIES:
        fits["bytes"][quantity] = fit_exponent(dims, [p["bytes"][quantity] for p in points])
    return fits
