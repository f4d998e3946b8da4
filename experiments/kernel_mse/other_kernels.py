"""Errors of trigonometric features of other kernels: which coupling wins, and by how much."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from matplotlib.figure import Figure
from ml_collections import ConfigDict

import simrf_jax
from experiments.harness import markdown, resumable, style, trials
from simrf_jax import theory
from simrf_jax._src.projections import Norms
from simrf_jax._src.theory.arguments import ClosedFormCoupling
from simrf_jax._src.theory.oscillating import pair_covariances
from simrf_jax.kernels import Gaussian, Matern, PoweredExponential, RationalQuadratic, ScaleMixture

KERNELS: dict[str, ScaleMixture] = {
    "Gaussian": Gaussian(),
    "Matérn 5/2": Matern(2.5),
    "Matérn 3/2": Matern(1.5),
    "Laplace": Matern(0.5),
    "rational quadratic": RationalQuadratic(1.0),
    "powered exponential, p = 3/2": PoweredExponential(1.5),
}


class Case(NamedTuple):
    """A coupling of the directions, and one of the norms."""

    name: str
    coupling: ClosedFormCoupling
    norms: Norms

    @property
    def look(self) -> dict[str, Any]:
        """The coupling's color; its own line for independent norms, and others for coupled ones."""
        look = dict(style.STYLES[self.coupling])
        if self.norms != "chi":
            look["linestyle"] = {"antithetic": "-.", "stratified": "-"}[self.norms]
        return look


CASES = (
    Case("orthogonal", "orthogonal", "chi"),
    Case("simplex", "simplex", "chi"),
    Case("cross-polytope", "cross_polytope", "chi"),
    Case("iid, stratified norms", "iid", "stratified"),
    Case("orthogonal, antithetic norms", "orthogonal", "antithetic"),
    Case("orthogonal, stratified norms", "orthogonal", "stratified"),
)
TRIAL_KERNELS = ("Matérn 3/2", "Laplace")
GRID = np.geomspace(0.1, 10, 49)  # Distances in length scales.
DRAWN_DIMS = (8, 64)
# Cosines at which the covariance of two rows must rise and be convex in the square of the cosine.
SQUARED_COSINES = np.linspace(0, 1, 41)


def ratio(
    z: np.ndarray, dim: int, kernel: ScaleMixture, coupling: ClosedFormCoupling, norms: Norms
) -> np.ndarray:
    """Returns errors of m = 2d rows divided by those of iid rows of independent norms."""
    ratios = theory.mse_ratio(
        z, 2 * dim, dim, coupling=coupling, features="trigonometric", norms=norms, kernel=kernel
    )
    return np.asarray(ratios)


def optimal_up_to(dim: int, kernel: ScaleMixture) -> float:
    """Returns the distance of ``GRID`` up to which the best fixed directions are known.

    If the covariance of two rows of independent norms rises with the squared cosine c^2 of their
    angle and is convex in it, then no fixed directions of m <= d + 1 rows have a smaller error than
    those whose squared cosines are all equal and as small as the bound of Welch allows: orthogonal
    rows for m <= d, and the simplex for m = d + 1.
    """
    values = pair_covariances(GRID**2, dim, np.sqrt(SQUARED_COSINES), kernel)
    slopes = np.diff(values, axis=0)
    resolution = 1e-12 * np.abs(values).max(axis=0)
    holds = np.all(slopes > -resolution, axis=0)
    holds &= np.all(np.diff(slopes, axis=0) > -resolution, axis=0)
    fails = np.flatnonzero(~holds)
    return float(GRID[-1] if not fails.size else GRID[fails[0] - 1] if fails[0] else np.nan)


def summary(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Returns ratios of errors for each kernel, dimension and case, and the trials."""
    of_theory = [
        {
            "kernel": name,
            "dim": dim,
            "ratios": {
                case.name: ratio(GRID, dim, kernel, case.coupling, case.norms).tolist()
                for case in CASES
            },
            "optimal_up_to": optimal_up_to(dim, kernel),
        }
        for name, kernel in tqdm.tqdm(KERNELS.items(), desc="kernels")
        for dim in config.kernels.dims
    ]
    of_trials = [
        _compare(name, dim, config, pieces)
        for name in TRIAL_KERNELS
        for dim in tqdm.tqdm(config.kernels.trial_dims, desc=name)
    ]
    return {"theory": of_theory, "trials": of_trials}


@functools.partial(jax.jit, static_argnames=("dim", "case", "kernel"))
def _squared_errors(
    keys: jax.Array, *, dim: int, case: tuple[ClosedFormCoupling, Norms], kernel: ScaleMixture
) -> jax.Array:
    """Returns squared errors at one length scale along each axis, their means for each key."""
    exact = kernel.profile(jnp.ones(()))

    def one(key: jax.Array) -> jax.Array:
        w = simrf_jax.draw_projection(
            key, 2 * dim, dim, coupling=case[0], norms=case[1], kernel=kernel
        )
        return jnp.mean(jnp.square(jnp.mean(jnp.cos(jnp.asarray(w)), axis=0) - exact))

    return jax.lax.map(one, keys, batch_size=max(1, trials.ENTRIES // (2 * dim**2)))


def _draw(seed: int, num_trials: int, **options: Any) -> np.ndarray:
    keys = jax.random.split(jax.random.key(seed), num_trials)
    return np.asarray(_squared_errors(keys, **options), np.float64)[:, None]


def _compare(name: str, dim: int, config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    kernel = KERNELS[name]

    def errors(coupling: ClosedFormCoupling, norms: Norms) -> np.ndarray:
        draw = functools.partial(_draw, dim=dim, case=(coupling, norms), kernel=kernel)
        piece = f"kernels-{name}-{dim}-{coupling}-{norms}".replace("/", ".")
        return pieces.get(piece, draw, config.seed, config.kernels.num_trials)

    iid = errors("iid", "chi")
    rows = {}
    for case in CASES:
        found = trials.ratio(errors(case.coupling, case.norms), iid)
        closed_form = ratio(np.ones(1), dim, kernel, case.coupling, case.norms)
        rows[case.name] = {
            "ratio": float(found.value[0]),
            "standard_error": float(found.standard_error[0]),
            "closed_form": float(closed_form[0]),
            "z_score": float(found.z_score(closed_form)[0]),
        }
    return {"kernel": name, "dim": dim, "cases": rows}


def table(results: dict[str, Any]) -> str:
    """Returns the tables of ratios at one length scale, of winners, and of trials."""
    names = [case.name for case in CASES]
    at = {z: int(np.argmin(np.abs(GRID - z))) for z in (0.1, 0.3, 1.0, 3.0, 10.0)}
    ratios: list[list[object]] = []
    winners: list[list[object]] = []
    for row in results["theory"]:
        first = [row["kernel"], row["dim"]]
        numbers = [f"{row['ratios'][name][at[1.0]]:.3f}" for name in names]
        ratios.append([*first, *numbers, f"{row['optimal_up_to']:.2g}"])
        cells = []
        for place in at.values():
            value, best = min((row["ratios"][name][place], name) for name in names)
            cells.append(f"{best} {value:.2f}" if value < 0.995 else "none")
        winners.append([*first, *cells])
    compared: list[list[object]] = []
    for row in results["trials"]:
        for name, one in row["cases"].items():
            found = f"{one['ratio']:.4f} ({one['standard_error']:.4f})"
            numbers = [found, f"{one['closed_form']:.4f}", f"{one['z_score']:+.1f}"]
            compared.append([row["kernel"], row["dim"], name, *numbers])
    tables = (
        markdown.table(["kernel", "d", *names, "proven up to z"], ratios),
        markdown.table(["kernel", "d", *(f"z = {z:g}" for z in at)], winners),
        markdown.table(["kernel", "d", "rows", "trials", "closed form", "z-score"], compared),
    )
    return "\n\n".join(tables)


def draw_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws ratios against the distance, a panel for each kernel and dimension."""
    dims = sorted({row["dim"] for row in results["theory"]})
    dims = [dim for dim in dims if dim in DRAWN_DIMS] or dims[:2]
    rows = [row for row in results["theory"] if row["dim"] in dims]
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    half = len(names) // 2  # Kernels side by side; the dimensions of a kernel stand in one column.
    size = 3 * half, 2.1 * 2 * len(dims) + 1
    figure, axes = style.subplots(*size, 2 * len(dims), half, sharex=True, sharey=True)
    for row in rows:
        below, column = divmod(names.index(row["kernel"]), half)
        place = axes[below * len(dims) + dims.index(row["dim"]), column]
        place.axhline(1, **style.STYLES["iid"], linewidth=1.4, label="iid")
        for case in CASES:
            place.plot(GRID, row["ratios"][case.name], **case.look, linewidth=1.4, label=case.name)
        place.set(xscale="log", ylim=(0, 1.25))
        place.set_title(f"{row['kernel']}, d = {row['dim']}", fontsize=10)
        style.ticks(place, (0.1, 1, 10))
        style.tidy(place)
    figure.supxlabel("distance in length scales", fontsize=10)
    figure.supylabel("mean squared error / that of iid rows", fontsize=10)
    style.legend(figure, axes[0, 0], "upper center", columns=3)
    return {"other_kernels": figure}
