"""Fig. 4: the conformity of rows whose norms are given, while their directions are optimised."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import threadpoolctl

from experiments.conformity.densities import weight
from experiments.harness import style
from simrf_jax import theory
from simrf_jax.projections.couplings import NUM_SWEEPS, minimise_resultant
from simrf_jax.projections.row_blocks import simplex_vertices
from simrf_jax.theory.optimum import descent

NORMS, DIRECTIONS = range(2)  # What a key is for.


def draw_norms(key: jax.Array, num_draws: int, dim: int) -> np.ndarray:
    """Draws norms of the rows of projections, ``[num_draws, dim]``, each chi of dim degrees."""
    key = jax.random.fold_in(key, NORMS)
    gaussian = jax.random.normal(key, (num_draws, dim, dim))
    return np.asarray(jnp.linalg.norm(gaussian, axis=-1), np.float64)


def draw_directions(key: jax.Array, num_draws: int, dim: int) -> np.ndarray:
    """Draws iid directions, ``[num_draws, dim, dim]``."""
    key = jax.random.fold_in(key, DIRECTIONS)
    gaussian = jax.random.normal(key, (num_draws, dim, dim))
    return np.asarray(gaussian / jnp.linalg.norm(gaussian, axis=-1, keepdims=True), np.float64)


def conformity(norms: np.ndarray, directions: np.ndarray, v: float) -> np.ndarray:
    """Computes conformity, given ``[..., d]`` norms and ``[..., d, coordinates]`` directions."""
    rows = norms[..., None] * directions
    return np.exp(theory.log_conformity_of_rows(v, rows, dim=norms.shape[-1]))


def iid_conformity(norms: np.ndarray, v: float) -> np.ndarray:
    """Averages over iid directions: a pair's f is then the product of f(a_i) and f(a_j)."""
    f = weight(norms, v, norms.shape[-1])
    pairs = f.sum(axis=-1) ** 2 - (f**2).sum(axis=-1)
    return pairs / (f.shape[-1] * (f.shape[-1] - 1))


@jax.jit
def arrange(norms: jax.Array, starts: jax.Array, num_sweeps: jax.Array) -> jax.Array:
    """Arranges SimRF+ ``[n, d, coordinates]`` of norms ``[n, d]``, after ``[n]`` sweeps."""
    sweep = jax.vmap(lambda a, s, number: minimise_resultant(s, a, num_sweeps=number))
    return sweep(norms, starts, num_sweeps)


def swept_conformity(
    norms: np.ndarray, starts: np.ndarray, num_sweeps: np.ndarray, v: float
) -> np.ndarray:
    """Computes conformity of SimRF+, ``[n]``; norms, starts and sweep counts are n or one."""
    num_draws = max(len(norms), len(num_sweeps))
    norms = np.broadcast_to(norms, (num_draws, norms.shape[1]))
    starts = np.broadcast_to(starts, (num_draws, *starts.shape[-2:]))
    num_sweeps = np.broadcast_to(num_sweeps, num_draws)
    given = jnp.asarray(norms, jnp.float32), jnp.asarray(starts, jnp.float32)
    return conformity(norms, np.asarray(arrange(*given, num_sweeps), np.float64), v)


def curves(key: jax.Array, v: float, dim: int, iterations: int, couplings: int) -> dict[str, Any]:
    """Computes conformity of one draw of norms, constant or after 0, 1, ... iterations.

    Args:
      key: Draws the norms, and iid directions for them.
      v: The distance :math:`|x + y|`.
      dim: Dimension d, and number of rows.
      iterations: Iterations of the optimisers: sweeps over all rows for SimRF+.
      couplings: Draws of iid directions; the optimisers start from those whose conformity
        is nearest to the mean.

    Returns:
      For each coupling a number or a list over the iterations, and the norms.
    """
    norms = draw_norms(key, 1, dim)
    simplex, random = simplex_vertices(dim), draw_directions(key, couplings, dim)
    single = conformity(norms, random, v)
    start = random[np.argmin(np.abs(single - single.mean()))]
    steps = np.arange(iterations + 1)
    way = descent(start, norms[0], v, dim)
    # An optimiser that has arrived stays there.
    way = way[np.minimum(steps, len(way) - 1)]
    return {
        "norms": norms[0].tolist(),
        "iid": float(iid_conformity(norms, v)[0]),
        "iid_sample_mean": float(single.mean()),
        "iid_deviation": float(single.std(ddof=1)),
        "orthogonal": float(conformity(norms, np.eye(dim), v)[0]),
        "simplex": float(conformity(norms, simplex, v)[0]),
        "simplex_plus": swept_conformity(norms, simplex, steps, v).tolist(),
        "simplex_plus_from_iid": swept_conformity(norms, start, steps, v).tolist(),
        "optimised_from_iid": conformity(norms, way, v).tolist(),
        "optimised": float(optimum(norms, v)[0]),
    }


def of_draws(key: jax.Array, norms: np.ndarray, v: float) -> dict[str, np.ndarray]:
    """Computes conformities of draws of norms ``[n, d]``: ``[n]`` for each coupling.

    ``simplex_plus_from_iid`` starts from iid directions, drawn for each from the key.
    """
    num_draws, dim = norms.shape
    simplex, random = simplex_vertices(dim), draw_directions(key, num_draws, dim)
    num_sweeps = np.array([NUM_SWEEPS])
    return {
        "iid": iid_conformity(norms, v),
        "orthogonal": conformity(norms, np.eye(dim), v),
        "simplex": conformity(norms, simplex, v),
        "simplex_plus": swept_conformity(norms, simplex, num_sweeps, v),
        "simplex_plus_from_iid": swept_conformity(norms, random, num_sweeps, v),
    }


def optimum(norms: np.ndarray, v: float) -> np.ndarray:
    """Finds the least conformity of each draw of norms ``[n, d]`` numerically, ``[n]``."""
    dim = norms.shape[1]
    # Its matrices are tiny: threads, where others are at work, take twenty times as long.
    with threadpoolctl.threadpool_limits(1):
        return np.exp([theory.optimal_directions(a, v, dim).log_conformity for a in norms])


def summary(draws: dict[str, np.ndarray], best: np.ndarray) -> dict[str, Any]:
    """Means over draws of norms, and what is gained over the simplex of the same norms.

    Args:
      draws: Conformities from ``of_draws``.
      best: The optima of the first few.

    Returns:
      For each coupling the means of conformity and gain, and as ``share`` the part of the possible
      gain that SimRF+ has; with standard errors.
    """
    results: dict[str, Any] = {}
    for name, values in (draws | {"optimised": best}).items():
        gain = draws["simplex"][: len(values)] - values
        results[name] = {
            "num_draws": len(values),
            "mean": float(values.mean()),
            "standard_error": _standard_error(values),
            "gain": float(gain.mean()),
            "gain_standard_error": _standard_error(gain),
        }
    possible = draws["simplex"][: len(best)] - best
    gain = (draws["simplex"] - draws["simplex_plus"])[: len(best)]
    share = gain.mean() / possible.mean()
    # To first order in its errors, the ratio of two means is a mean.
    error = _standard_error((gain - share * possible) / possible.mean())
    return results | {"share": {"mean": float(share), "standard_error": error}}


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5)


def draw_figure(results: dict[str, Any], v: float, dim: int) -> matplotlib.figure.Figure:
    """Draws Fig. 4: conformity against iterations; level lines are what does not iterate."""
    figure = matplotlib.figure.Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    iterations = np.arange(len(results["simplex_plus"]))
    ends = iterations[[0, -1]]
    level, spread = np.full(2, results["iid"]), np.full(2, results["iid_deviation"])
    style.band(axes, ends, level - spread, level + spread, color=style.STYLES["iid"]["color"])
    for coupling in ("iid", "orthogonal", "simplex"):
        level = np.full(2, results[coupling])
        axes.plot(ends, level, **style.STYLES[coupling], label=style.LABELS[coupling])
    plus = style.STYLES["simplex_plus"]
    axes.plot(iterations, results["simplex_plus"], **plus, linewidth=2, label="SimRFs+")
    thin: dict[str, Any] = {"linewidth": 0.9, "markersize": 3.5, "zorder": 3}
    axes.plot(
        iterations,
        results["simplex_plus_from_iid"],
        **thin | {"color": plus["color"], "marker": "o"},
        label="SimRFs+ from iid directions",
    )
    axes.plot(
        iterations,
        results["optimised_from_iid"],
        **thin | style.STYLES["exact"] | {"marker": "s"},
        label="numerically optimised",
    )
    axes.set(
        xlabel="iterations", ylabel=r"RF-conformity $\hat\rho(x, y)$", xlim=(-0.2, ends[1] + 0.2)
    )
    axes.set_title(f"RF-conformity optimisation, v = {v:g}, d = {dim}", fontsize=10)
    style.tidy(axes)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    return figure
