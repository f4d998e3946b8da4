"""Numbers of the README, from closed forms and, where there is none, from trials."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import tqdm
from ml_collections import ConfigDict

from experiments.beyond import figures
from experiments.beyond.configs import paper
from experiments.harness import config_fields, files, markdown, resumable, style, trials
from experiments.harness.mistakes import UserError
from simrf_jax import theory
from simrf_jax._src.theory.arguments import FEATURES

FIELDS = config_fields.types_of(paper.get_config())
BLOCKS: dict[str, dict[str, Any]] = {
    "orthogonal": {"coupling": "orthogonal"},
    "square": {"coupling": "simplex", "block": "square"},
    "regular": {"coupling": "simplex", "block": "regular"},
}
MOST_DISTANCE = 3.0  # Beyond it, errors have tails too heavy for means over draws.
SAMPLES = np.array([0.3, 1.0, 3.0])  # Distances in the table of feature maps.
DISTANCES = np.geomspace(0.03, 6, 121)
# Curves of the figure "reach"; "best" is the parameter that is best at each distance.
REACH: dict[str, dict[str, Any]] = {
    "iid": {"coupling": "iid"},
    "orthogonal": {"coupling": "orthogonal"},
    "simplex": {"coupling": "simplex"},
    "cross_polytope": {"coupling": "cross_polytope", "norms": "pair"},
    "simplex_best": {"coupling": "simplex", "parameter": "best"},
    "cross_polytope_best": {
        "coupling": "cross_polytope",
        "norms": "antithetic",
        "parameter": "best",
    },
}
REACH_DISTANCES = np.linspace(0.1, 5, 99)
REACH_SAMPLES = np.array([0.5, 1.0, 2.0, 3.0, 4.0])


def check(config: ConfigDict) -> None:
    """Refuses a config that cannot work.

    Raises:
      UserError: If fields are missing or unknown, or a value is of the wrong type or out of range.
    """
    two = ("blocks.dim", "blocks.num_features", "reach.dim", "reach.num_features", "plus.dims")
    values = config_fields.check_fields(config, FIELDS, dict.fromkeys((*two, "maps.dims"), 2))
    config_fields.check_ascending(values, [name for name, kind in FIELDS.items() if kind is tuple])
    config_fields.check_distances(values, ["blocks.distance", "plus.distances"], most=MOST_DISTANCE)
    config_fields.check_distances(values, ["reach.trained"], most=float(REACH_DISTANCES[-1]))
    if len(config.reach.trained) != 2:
        raise UserError(
            "config.reach.trained must be the least and the largest distance of a model, got "
            f"{config.reach.trained}."
        )


def run(config: ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Computes what ``workdir`` lacks, and writes results and figures there.

    Args:
      config: Config with the fields of ``FIELDS``.
      workdir: Folder for all output. A stopped run of the same config in it is continued.

    Returns:
      The content of ``results.json``: mean squared errors divided by those of iid rows.

    Raises:
      UserError: If ``check`` refuses the config, or the folder cannot be written or holds a run of
        another config.
    """
    check(config)
    pieces = resumable.Pieces(workdir, config)
    results = {
        "blocks": _blocks(**config.blocks),
        "plus": {str(dim): _plus(dim, config, pieces) for dim in tqdm.tqdm(config.plus.dims)},
        "maps": {str(dim): _maps(dim) for dim in config.maps.dims},
        "reach": _reach(**config.reach),
    }
    return files.finish(workdir, results, lambda: figures.draw(results))


def _ratios(distances: Any, num_features: Any, dim: int, **options: Any) -> list[float]:
    return np.asarray(theory.mse_ratio(distances, num_features, dim, **options)).tolist()


def _blocks(dim: int, distance: float, num_features: int) -> dict[str, Any]:
    """Returns ratios by number of features at one distance, and by distance."""
    sizes = list(range(2, 4 * dim + 1))
    return {
        "dim": dim,
        "distance": distance,
        "sizes": sizes,
        "against_size": {
            name: [float(theory.mse_ratio(distance, m, dim, **options)) for m in sizes]
            for name, options in BLOCKS.items()
        },
        "num_features": num_features,
        "distances": DISTANCES.tolist(),
        "against_distance": {
            name: _ratios(DISTANCES, num_features, dim, **options)
            for name, options in BLOCKS.items()
        },
    }


def _plus(dim: int, config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Returns trials of SimRFs+ and SimRFs for m = d, and the closed form of SimRFs."""
    distances = config.plus.distances
    options = (config.seed, max(2, config.plus.num_entries // dim**2), distances)
    draw = functools.partial(trials.draw_errors, *options, dim=dim, features="positive")
    errors = {
        coupling: pieces.get(f"plus-{dim}-{coupling}", draw, coupling=coupling)
        for coupling in ("simplex", "simplex_plus")
    }
    x = np.array(distances)[:, None] / 2 * np.eye(1, dim)  # With y = x the kernel is 1.
    iid = np.asarray(theory.kernel_mse(x, x, dim, coupling="iid"))
    results: dict[str, Any] = {"distances": list(distances)}
    for coupling, samples in errors.items():
        mean = trials.mean(samples)
        results[coupling] = (mean.value / iid).tolist()
        results[f"{coupling}_standard_error"] = (mean.standard_error / iid).tolist()
    closed = _ratios(np.array(distances), dim, dim, coupling="simplex")
    return results | {"simplex_closed_form": closed}


def _maps(dim: int) -> dict[str, Any]:
    """Returns the ratios of each feature map for m = d, by its distance."""
    results: dict[str, Any] = {"distances": DISTANCES.tolist()}
    for features in FEATURES:
        results[features] = {}
        for coupling in ("orthogonal", "simplex"):
            options: dict[str, Any] = {"coupling": coupling, "features": features}
            results[features][coupling] = {
                "limit": float(theory.small_distance_prefactor(dim, **options)),
                "samples": _ratios(SAMPLES, dim, dim, **options),
                "ratio": _ratios(DISTANCES, dim, dim, **options),
            }
    return results


def _reach(dim: int, num_features: int, trained: tuple[float, float]) -> dict[str, Any]:
    """Returns relative errors of an equal number of features, up to the distances of real models.

    Args:
      dim: Dimension d.
      num_features: Number of features.
      trained: Least and largest root mean square of |x + y| of a trained model.
    """

    def errors(distances: np.ndarray, options: dict[str, Any]) -> list[float]:
        if options.get("parameter") == "best":
            options = options | {"parameter": theory.optimal_parameter(distances**2, dim)}
        ratio = theory.mse_ratio(distances, num_features, dim, **options)
        return (np.asarray(ratio) * np.expm1(distances**2) / num_features).tolist()

    return {
        "dim": dim,
        "num_features": num_features,
        "trained": list(trained),
        "distances": REACH_DISTANCES.tolist(),
        "samples": {name: errors(REACH_SAMPLES, options) for name, options in REACH.items()},
        "errors": {name: errors(REACH_DISTANCES, options) for name, options in REACH.items()},
    }


def report(results: dict[str, Any]) -> str:
    """Returns the tables of the README."""
    tables = {
        "blocks": _blocks_table,
        "plus": _plus_table,
        "maps": _maps_table,
        "reach": _reach_table,
    }
    return "\n\n".join(table(results[name]) for name, table in tables.items())


def _blocks_table(blocks: dict[str, Any]) -> str:
    shown = [m for m in (2, 8, 32, 64, 65, 70, 130, 256) if m in blocks["sizes"]]
    rows = [
        [m, *(f"{blocks['against_size'][name][blocks['sizes'].index(m)]:.4f}" for name in BLOCKS)]
        for m in shown
    ]
    return markdown.table(["features", *(figures.BLOCK_LABELS[n] for n in BLOCKS)], rows)


def _plus_table(plus: dict[str, Any]) -> str:
    rows: list[list[object]] = []
    for dim, row in plus.items():
        for number, v in enumerate(row["distances"]):
            found = (
                f"{row[c][number]:.3g} ({row[f'{c}_standard_error'][number]:.0e})"
                for c in ("simplex", "simplex_plus")
            )
            rows.append([dim, v, f"{row['simplex_closed_form'][number]:.3g}", *found])
    header = ["d = m", "v", "SimRFs, closed form", "SimRFs, trials", "SimRFs+, trials"]
    return markdown.table(header, rows)


def _maps_table(maps: dict[str, Any]) -> str:
    rows: list[list[object]] = []
    for dim, row in maps.items():
        for features in FEATURES:
            for coupling, curve in row[features].items():
                cells = (f"{value:.4f}" for value in (curve["limit"], *curve["samples"]))
                rows.append([dim, features, style.LABELS[coupling], *cells])
    header = ["d = m", "features", "coupling", "limit at 0", *map("{:g}".format, SAMPLES)]
    return markdown.table(header, rows)


def _reach_table(reach: dict[str, Any]) -> str:
    iid = np.array(reach["samples"]["iid"])
    rows: list[list[object]] = [["positive, iid: the error itself", *map("{:.3g}".format, iid)]]
    for name, errors in reach["samples"].items():
        if name != "iid":
            rows.append([figures.REACH_LABELS[name], *map("{:.3g}".format, errors / iid)])
    return markdown.table(["features and rows", *map("{:g}".format, REACH_SAMPLES)], rows)
