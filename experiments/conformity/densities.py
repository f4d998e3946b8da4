"""Fig. 5: the density of |w_i + w_j|, and the function f whose mean is the conformity."""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np
from matplotlib.figure import Figure
from scipy import integrate

import simrf_jax
from experiments.harness import style, trials
from simrf_jax import theory
from simrf_jax._src.theory.arguments import PairCoupling
from simrf_jax._src.theory.quadrature import log_hyp0f1
from simrf_jax._src.theory.resultant import squared_resultants

# Those of the paper.
DensityCoupling: TypeAlias = Literal[PairCoupling, "simplex_plus"]
COUPLINGS: tuple[DensityCoupling, ...] = get_args(DensityCoupling)


def weight(w: np.ndarray, v: float, dim: int) -> np.ndarray:
    r"""Returns :math:`f(w, v) = {}_0F_1(; d/2; v^2 w^2 / 4)`, whose mean is the conformity.

    Args:
      w: Lengths of :math:`w_i + w_j`, of any shape.
      v: The distance :math:`|x + y|`.
      dim: Dimension d.

    Returns:
      float64 array of the shape of ``w``, at least 1.

    Example:
      >>> import numpy as np
      >>> print(np.round(weight(np.array([0.0, 10.0]), 1.0, 6), 1))
      [  1.  182.5]

    References:
      Reid et al., Simplex Random Features (ICML 2023), Eq. 10 and the scale of Fig. 5,
      https://arxiv.org/abs/2301.13856
    """
    return np.exp(log_hyp0f1(dim / 2, (v * w / 2) ** 2))


def draw_lengths(
    key: jax.Array, num_projections: int, dim: int, coupling: DensityCoupling
) -> np.ndarray:
    """Returns all |w_i + w_j| of projections of d rows, ``[num_projections, d (d - 1) / 2]``."""
    draw = functools.partial(
        simrf_jax.draw_projection, num_features=dim, dim=dim, coupling=coupling
    )
    w = jax.vmap(draw)(jax.random.split(key, num_projections))
    return np.sqrt(squared_resultants(np.asarray(w, np.float64)))


def integral(coupling: PairCoupling, v: float, dim: int) -> float:
    """Returns the mean of f over theory's density, by quadrature."""

    def integrand(w: float) -> float:
        density = theory.resultant_norm_pdf(w, dim, coupling=coupling)
        return float(density * weight(np.array(w), v, dim))

    # The longest resultants are those of iid rows. Their part of the mean of f lies near
    # sqrt(2 d) + 2 v.
    return float(integrate.quad(integrand, 0, longest(dim) + 2 * v + 10, limit=200)[0])


def longest(dim: int) -> int:
    """Returns a length beyond which no coupling has visible mass."""
    return int(np.ceil(np.sqrt(2 * dim) + 6))


def summary(lengths: np.ndarray, v: float, dim: int, coupling: DensityCoupling) -> dict[str, Any]:
    """Returns the conformity by draws and, if theory has it, by quadrature and in closed form."""
    conformity = weight(lengths, v, dim).mean(axis=1)
    density, edges = np.histogram(lengths, 10 * longest(dim), (0, longest(dim)), density=True)
    result = {
        **trials.summary(conformity),
        "integral": None,
        "closed_form": None,
        "edges": edges.tolist(),
        "histogram": density.tolist(),
    }
    if coupling != "simplex_plus":
        result["integral"] = integral(coupling, v, dim)
        result["closed_form"] = float(np.exp(theory.log_conformity(v, dim, coupling=coupling)))
    return result


def draw_figure(results: dict[str, Any], v: float, dim: int) -> Figure:
    """Draws Fig. 5: densities as lines over histograms of draws, and f with its own axis."""
    figure, axes = style.subplots(5, 3.8)
    w = np.linspace(0, longest(dim), 400)
    for coupling in COUPLINGS:
        row, look = results[coupling], style.STYLES[coupling]
        steps = {"color": look["color"], "linewidth": 0.8, "alpha": 0.5}
        label = f"{style.LABELS[coupling]}, mean of f: {row['closed_form'] or row['mean']:.3f}"
        if coupling == "simplex_plus":
            steps |= {"alpha": 1, "label": label}
        else:
            density = theory.resultant_norm_pdf(w, dim, coupling=coupling)
            axes.plot(w, density, **look, linewidth=1.6, label=label)
        axes.stairs(row["histogram"], row["edges"], **steps)
    scale = axes.twinx()
    [curve] = scale.plot(w, weight(w, v, dim), color="0.35", linewidth=1)
    style.tidy(axes)
    scale.spines["top"].set_visible(False)
    axes.set(xlabel="$w_{ij} = |w_i + w_j|$", ylabel="density $p(w_{ij})$")
    axes.set(xlim=(0, longest(dim)), ylim=(0, None))
    scale.set(ylabel=f"$f(w_{{ij}}, v)$ at v = {v:g}", ylim=(0, None))
    axes.set_title(f"Densities of $w_{{ij}}$, d = {dim}: lines theory, steps draws", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    place = {"bbox_to_anchor": (0.97, 1), "loc": "upper right"}
    entries = [*handles, curve], [*labels, "f, right scale"]
    axes.legend(*entries, frameon=False, fontsize=8, **place)
    return figure
