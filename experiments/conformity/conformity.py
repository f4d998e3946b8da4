"""Conformity experiment (Figs. 2 to 5): config, run and table."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import tqdm
from ml_collections import ConfigDict

from experiments.conformity import couplings, densities, optimization
from experiments.conformity.configs import paper
from experiments.harness import config_fields, files, markdown, resumable
from experiments.harness.mistakes import UserError

FIELDS = config_fields.types_of(paper.get_config())
PICTURES, SINGLE, NORMS, PROJECTIONS = range(4)  # Purposes of PRNG keys, which are folded in.
BATCH = 100  # Draws of norms that are optimized and saved together.
LEAST_V, MOST_V = 0.01, 3.0


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    two = ("num_couplings", "num_projections", "num_optimized")
    config_fields.check_fields(config, FIELDS, dict.fromkeys(two, 2))
    if config.dim < 3:
        raise UserError(
            f"config.dim must be at least 3, got {config.dim}: in 2 dimensions the simplex is the "
            "optimum for any norms."
        )
    if config.num_draws < config.num_optimized:
        raise UserError(
            f"config.num_draws must be at least config.num_optimized, {config.num_optimized}, "
            f"got {config.num_draws}."
        )
    if not LEAST_V <= config.v <= MOST_V:
        raise UserError(
            f"config.v must be at least {LEAST_V:g}, for gains that rounding does not hide, and at "
            f"most {MOST_V:g}, for tails that means over draws can bear, got {config.v}."
        )


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Computes what ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``. ``single_draw`` is the result of ``optimization.curves``,
      ``many_draws`` that of ``optimization.summary``, and ``densities`` that of
      ``densities.summary`` for each coupling.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config)
    dim, v = config.dim, config.v

    def key(purpose: int) -> jax.Array:
        return jax.random.fold_in(jax.random.key(config.seed), purpose)

    norms = optimization.draw_norms(key(NORMS), config.num_draws, dim)
    best = optima(norms[: config.num_optimized], v, pieces)
    results: dict[str, Any] = {
        "single_draw": optimization.curves(
            key(SINGLE), v, dim, config.num_iterations, config.num_couplings
        ),
        "many_draws": optimization.summary(optimization.of_draws(key(NORMS), norms, v), best),
        "densities": {},
    }
    for coupling in densities.COUPLINGS:
        # All couplings get the same key, so that their draws are paired.
        lengths = densities.draw_lengths(key(PROJECTIONS), config.num_projections, dim, coupling)
        results["densities"][coupling] = densities.summary(lengths, v, dim, coupling)
    return files.finish(
        workdir,
        results,
        lambda: {
            "couplings": couplings.draw_figure(key(PICTURES)),
            "optimization": optimization.draw_figure(results["single_draw"], v, dim),
            "densities": densities.draw_figure(results["densities"], v, dim),
        },
    )


def optima(norms: np.ndarray, v: float, pieces: resumable.Pieces) -> np.ndarray:
    """Finds the least conformity of each draw of norms, which takes most of a run's time."""
    starts = tqdm.trange(0, len(norms), BATCH, unit=f" x {BATCH} optima")
    batches = ((start, norms[start : start + BATCH]) for start in starts)
    optimum = optimization.optimum
    return np.concatenate([pieces.get(f"optima-{i}", optimum, batch, v) for i, batch in batches])


def report(results: dict[str, Any]) -> str:
    """Returns the table of conformities, and SimRFs+' share of the possible gain."""
    single, many, drawn = (results[k] for k in ("single_draw", "many_draws", "densities"))
    rows: list[list[object]] = []
    for name in (*densities.COUPLINGS, "simplex_plus_from_iid", "optimized"):
        row: list[object] = [name, f"{np.ravel(single[name])[-1]:.4f}"]
        if density := drawn.get(name):
            row += [f"{closed:.6f}" if (closed := density["closed_form"]) else ""]
            row += [_with_error(density["mean"], density["standard_error"])]
        else:
            row += ["", ""]
        gain, error = many[name]["gain"], many[name]["gain_standard_error"]
        row += [_with_error(gain, error), f"{drawn['simplex']['closed_form'] - gain:.4f}"]
        rows.append(row)
    header = ["conformity", "one draw of norms", "closed form", "mean of f over projections"]
    table = markdown.table([*header, "below simplex, paired over norms", "hence"], rows)
    share = many["share"]
    return (
        f"{table}\nOf what the optimum gains over the simplex, simplex_plus has "
        f"{_with_error(share['mean'], share['standard_error'])}."
    )


def _with_error(mean: float, error: float) -> str:
    return f"{mean:.4f} ({error:.4f})"
