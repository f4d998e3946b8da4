"""Fig. 4: the conformity of rows with given norms while their directions are optimized."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import threadpoolctl
from matplotlib.figure import Figure

from experiments.conformity.densities import weight
from experiments.harness import style, trials
from simrf_jax import theory
from simrf_jax._src.projections.couplings import NUM_SWEEPS, minimize_resultant
from simrf_jax._src.projections.row_blocks import simplex_vertices
from simrf_jax._src.theory.optimum import descent

NORMS, DIRECTIONS = range(2)  # Purposes of PRNG keys, which are folded in.


def draw_norms(key: jax.Array, num_draws: int, dim: int) -> np.ndarray:
    """Draws norms of rows, ``[num_draws, dim]``, from chi with dim degrees of freedom."""
    key = jax.random.fold_in(key, NORMS)
    gaussian = jax.random.normal(key, (num_draws, dim, dim))
    return np.asarray(jnp.linalg.norm(gaussian, axis=-1), np.float64)


def draw_directions(key: jax.Array, num_draws: int, dim: int) -> np.ndarray:
    """Draws iid directions, ``[num_draws, dim, dim]``."""
    key = jax.random.fold_in(key, DIRECTIONS)
    gaussian = jax.random.normal(key, (num_draws, dim, dim))
    return np.asarray(gaussian / jnp.linalg.norm(gaussian, axis=-1, keepdims=True), np.float64)


def conformity(norms: np.ndarray, directions: np.ndarray, v: float) -> np.ndarray:
    """Returns the conformity of rows with norms ``[..., d]`` and directions ``[..., d, n]``."""
    rows = norms[..., None] * directions
    return np.exp(theory.log_conformity_of_rows(v, rows, dim=norms.shape[-1]))


def iid_conformity(norms: np.ndarray, v: float) -> np.ndarray:
    """Returns the mean conformity over iid directions, where a pair has f(a_i) f(a_j)."""
    f = weight(norms, v, norms.shape[-1])
    pairs = f.sum(axis=-1) ** 2 - (f**2).sum(axis=-1)
    return pairs / (f.shape[-1] * (f.shape[-1] - 1))


@jax.jit
def arrange(norms: jax.Array, starts: jax.Array, num_sweeps: jax.Array) -> jax.Array:
    """Returns SimRF+ directions for n draws of norms ``[n, d]``, each after its own sweeps.

    Args:
      norms: Norms ``[n, d]``.
      starts: Directions before the first sweep, ``[n, d, coordinates]``.
      num_sweeps: Number of sweeps of each draw, ``[n]``.
    """
    sweep = jax.vmap(lambda a, s, number: minimize_resultant(s, a, num_sweeps=number))
    return sweep(norms, starts, num_sweeps)


def swept_conformity(
    norms: np.ndarray, starts: np.ndarray, num_sweeps: np.ndarray, v: float
) -> np.ndarray:
    """Returns the conformity of SimRF+, ``[n]``; each argument but v has n entries or one."""
    num_draws = max(len(norms), len(num_sweeps))
    norms = np.broadcast_to(norms, (num_draws, norms.shape[1]))
    starts = np.broadcast_to(starts, (num_draws, *starts.shape[-2:]))
    num_sweeps = np.broadcast_to(num_sweeps, num_draws)
    given = jnp.asarray(norms, jnp.float32), jnp.asarray(starts, jnp.float32)
    return conformity(norms, np.asarray(arrange(*given, num_sweeps), np.float64), v)


def curves(key: jax.Array, v: float, dim: int, iterations: int, couplings: int) -> dict[str, Any]:
    """Returns the conformity of one draw of norms, also after 0, 1, ... iterations.

    Args:
      key: PRNG key of the norms and of iid directions for them.
      v: Distance :math:`|x + y|`.
      dim: Dimension d, and number of rows.
      iterations: Number of iterations. One iteration of SimRF+ is a sweep over all rows.
      couplings: Number of draws of iid directions. The optimizers start from the draw whose
        conformity is nearest to the mean.

    Returns:
      The norms and, for each coupling, a number or a list over the iterations.
    """
    norms = draw_norms(key, 1, dim)
    simplex, random = simplex_vertices(dim), draw_directions(key, couplings, dim)
    single = conformity(norms, random, v)
    start = random[np.argmin(np.abs(single - single.mean()))]
    steps = np.arange(iterations + 1)
    way = descent(start, norms[0], v, dim)
    # The optimizer may converge early; its last point then stands for all later iterations.
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
        "optimized_from_iid": conformity(norms, way, v).tolist(),
        "optimized": float(optimum(norms, v)[0]),
    }


def of_draws(key: jax.Array, norms: np.ndarray, v: float) -> dict[str, np.ndarray]:
    """Returns the conformities ``[n]`` of each coupling for draws of norms ``[n, d]``.

    ``simplex_plus_from_iid`` starts from iid directions, which the key draws for each of them.
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
    """Finds the least conformity ``[n]`` of each draw of norms ``[n, d]`` numerically."""
    dim = norms.shape[1]
    # The matrices are tiny. On a busy machine, several threads would take twenty times as long.
    with threadpoolctl.threadpool_limits(1):
        return np.exp([theory.optimal_directions(a, v, dim).log_conformity for a in norms])


def summary(draws: dict[str, np.ndarray], best: np.ndarray) -> dict[str, Any]:
    """Returns means over draws of norms, and the gain over the simplex with the same norms.

    Args:
      draws: Conformities that ``of_draws`` returned.
      best: Least conformities of the first few draws.

    Returns:
      For each coupling, the means of conformity and gain. ``share`` is SimRFs+' share of the
      possible gain. All have standard errors.
    """
    results: dict[str, Any] = {}
    for name, values in (draws | {"optimized": best}).items():
        gain = draws["simplex"][: len(values)] - values
        gained = trials.summary(gain)
        results[name] = {"num_draws": len(values), **trials.summary(values)}
        results[name] |= {"gain": gained["mean"], "gain_standard_error": gained["standard_error"]}
    possible = draws["simplex"][: len(best)] - best
    share = trials.ratio((draws["simplex"] - draws["simplex_plus"])[: len(best)], possible)
    error = float(share.standard_error)
    return results | {"share": {"mean": float(share.value), "standard_error": error}}


def draw_figure(results: dict[str, Any], v: float, dim: int) -> Figure:
    """Draws Fig. 4: conformity by iteration, with level lines for couplings without iterations."""
    figure, axes = style.subplots(5, 4.2)
    iterations = np.arange(len(results["simplex_plus"]))
    ends = iterations[[0, -1]]
    level, spread = np.full(2, results["iid"]), np.full(2, results["iid_deviation"])
    style.band(axes, ends, level - spread, level + spread, color=style.STYLES["iid"]["color"])
    for coupling in ("iid", "orthogonal", "simplex"):
        level = np.full(2, results[coupling])
        label = style.LABELS[coupling] + (" ± s.d. of a draw" if coupling == "iid" else "")
        axes.plot(ends, level, **style.STYLES[coupling], label=label)
    plus = style.STYLES["simplex_plus"]
    axes.plot(iterations, results["simplex_plus"], **plus, linewidth=2, label="SimRFs+")
    thin: dict[str, Any] = {"linewidth": 0.9, "markersize": 3.5, "zorder": 3}
    for name, label, look in (
        ("simplex_plus", "SimRFs+ from iid directions", {"color": plus["color"], "marker": "o"}),
        ("optimized", "numerically optimized", style.STYLES["exact"] | {"marker": "s"}),
    ):
        axes.plot(iterations, results[f"{name}_from_iid"], **(thin | look), label=label)
    axes.set(xlabel="iterations", ylabel=r"RF-conformity $\hat\rho(x, y)$")
    axes.set_xlim(-0.2, ends[1] + 0.2)
    axes.set_title(f"RF-conformity optimization, v = {v:g}, d = {dim}", fontsize=10)
    style.tidy(axes)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    return figure
