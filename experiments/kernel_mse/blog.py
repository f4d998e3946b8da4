"""Two figures of a blog post, as written and corrected: errors of random-feature attention.

The post is Teddy Koker, "Performers: The Kernel Trick, Random Fourier Features, and Attention"
(2020), https://teddykoker.com/2020/11/performers/
Its code is at https://github.com/teddykoker/performer
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from ml_collections import ConfigDict

import simrf_jax
from experiments.harness import markdown, resumable, style
from simrf_jax._src.projections import Coupling

INPUTS, PROJECTION = range(2)  # Purposes of PRNG keys, which are folded in.


class Curve(NamedTuple):
    """One estimate of attention."""

    coupling: Coupling
    feature_map: str


class Panel(NamedTuple):
    """Setting that all curves of a panel share."""

    title: str
    scale: float  # Standard deviation of the queries, keys and values.
    as_written: bool


def draw_inputs(key: jax.Array, length: int, dim: int, scale: float) -> jax.Array:
    """Draws queries, keys and values, ``[3, length, dim]`` in float64."""
    key = jax.random.fold_in(key, INPUTS)
    return scale * jax.random.normal(key, (3, length, dim), jnp.float64)


def draw_projection(
    key: jax.Array, num_features: int, dim: int, curve: Curve, *, as_written: bool
) -> jax.Array:
    r"""Draws W as the post has it, or corrected; the library's attention then takes either.

    The post takes sines and cosines of :math:`2 \pi w \cdot x` instead of :math:`w \cdot x`. In its
    code every orthogonal row has the norm :math:`\sqrt{d / m}`, where :math:`\chi_d` is right.

    Args:
      key: A typed PRNG key.
      num_features: Number of rows m.
      dim: Dimension d.
      curve: Coupling, and the feature map that W is for.
      as_written: If true, draw the post's W; otherwise draw the corrected one.

    Returns:
      Projection ``[num_features, dim]`` in float64.
    """
    orthogonal_as_written = as_written and curve.coupling == "orthogonal"
    w = simrf_jax.draw_projection(
        jax.random.fold_in(key, PROJECTION),
        num_features,
        dim,
        coupling=curve.coupling,
        norms="sqrt_dim" if orthogonal_as_written else "chi",
        dtype=jnp.float64,
    )
    if orthogonal_as_written:
        w /= math.sqrt(num_features)
    if as_written and curve.feature_map == "trigonometric":
        w *= 2 * math.pi
    return w


@functools.partial(jax.jit, static_argnames="feature_map")
def squared_error(inputs: jax.Array, projection: jax.Array, *, feature_map: str) -> jax.Array:
    """Returns the mean squared error of the entries of attention's output.

    Args:
      inputs: Queries, keys and values, ``[3, length, dim]``.
      projection: W, ``[num_features, dim]``.
      feature_map: Name of a feature map; see ``random_feature_attention``.

    Returns:
      A scalar.
    """
    q, k, v = inputs[:, :, None]  # One head.
    estimate = simrf_jax.random_feature_attention(q, k, v, projection, feature_map=feature_map)
    return jnp.mean(jnp.square(estimate[:, 0] - exact_attention(inputs)))


@jax.jit
def uniform_error(inputs: jax.Array) -> jax.Array:
    """Returns the mean squared error of uniform attention, whose output is the mean value."""
    exact = exact_attention(inputs)
    uniform = jnp.mean(inputs[2], axis=0, keepdims=True)
    return jnp.mean(jnp.square(jnp.broadcast_to(uniform, exact.shape) - exact))


def exact_attention(inputs: jax.Array) -> jax.Array:
    """Computes softmax attention in the inputs' type.

    ``jax.nn.dot_product_attention`` would compute the softmax in float32.
    """
    q, k, v = inputs
    return jax.nn.softmax(q @ k.T / math.sqrt(q.shape[1])) @ v


CURVES = {
    Curve("iid", "trigonometric"): style.STYLES["iid"] | {"label": "sin/cos, iid"},
    Curve("orthogonal", "trigonometric"): (
        style.STYLES["orthogonal"] | {"label": "sin/cos, orthogonal"}
    ),
    # Blue is the color of simplex rows everywhere.
    Curve("orthogonal", "positive"): {"color": "#56B4E9", "label": "positive, orthogonal"},
}


def _panels(scale: float) -> tuple[Panel, ...]:
    return (
        Panel("as written", scale, as_written=True),
        Panel("corrected", scale, as_written=False),
        Panel("corrected", 0.5, as_written=False),  # Random features work at this scale.
    )


# The scales of the post are the `temperature` in its code, which its text does not mention.
FIGURES = {
    "iid_and_orthogonal": (tuple(CURVES)[:2], _panels(1.0)),
    "trigonometric_and_positive": (tuple(CURVES)[1:], _panels(1.5)),
}
# Both figures share some cases; each case is computed once.
CASES = tuple(
    dict.fromkeys((c, p) for curves, panels in FIGURES.values() for p in panels for c in curves)
)
SCALES = tuple({panel.scale: None for _, panel in CASES})
POST_UP_TO = 192  # The post's axis ends at this number of features.


def _sample_keys(seed: int, options: ConfigDict) -> list[jax.Array]:
    key = jax.random.key(seed)
    return [jax.random.fold_in(key, sample) for sample in range(options.num_samples)]


def _errors_at(seed: int, options: ConfigDict, size: int) -> np.ndarray:
    """Returns errors ``[cases, samples]``; all cases share a sample's inputs up to their scale."""

    def error(key: jax.Array, curve: Curve, panel: Panel) -> float:
        inputs = draw_inputs(key, options.length, options.dim, panel.scale)
        w = draw_projection(key, size, options.dim, curve, as_written=panel.as_written)
        return float(squared_error(inputs, w, feature_map=curve.feature_map))

    # In float64, a denominator near zero comes from the estimator and not from rounding.
    with jax.enable_x64(True):
        keys = _sample_keys(seed, options)
        return np.array([[error(key, *case) for key in keys] for case in CASES])


def _uniform_errors(seed: int, options: ConfigDict) -> np.ndarray:
    """Returns the errors of uniform attention, ``[scales, samples]``."""

    def error(key: jax.Array, scale: float) -> float:
        inputs = draw_inputs(key, options.length, options.dim, scale)
        return float(uniform_error(inputs))

    with jax.enable_x64(True):
        keys = _sample_keys(seed, options)
        return np.array([[error(key, scale) for key in keys] for scale in SCALES])


def summary(config: ConfigDict, pieces: resumable.Pieces) -> dict[str, Any]:
    """Returns the panels of each figure, whose curves are lists over the numbers of features."""
    seed, options, sizes = config.seed, config.attention, list(config.attention.num_features)
    kept = [
        pieces.get(f"attention-{size}", _errors_at, seed, options, size)
        for size in tqdm.tqdm(sizes, desc="attention")
    ]
    of_uniform = pieces.get("attention-uniform", _uniform_errors, seed, options).mean(axis=1)
    of_case = {c: _spread(e) for c, e in zip(CASES, np.stack(kept, axis=1), strict=True)}
    uniform = dict(zip(SCALES, of_uniform.tolist(), strict=True))
    results: dict[str, Any] = {"num_features": sizes}
    for name, (curves, panels) in FIGURES.items():
        results[name] = []
        for panel in panels:
            drawn = [curve._asdict() | of_case[curve, panel] for curve in curves]
            results[name].append(
                panel._asdict() | {"uniform": uniform[panel.scale], "curves": drawn}
            )
    return results


def _spread(errors: np.ndarray) -> dict[str, list[float]]:
    """Summarizes errors ``[sizes, samples]``; like the post, divides variances by the count."""
    return {
        "mean": errors.mean(axis=1).tolist(),
        "standard_deviation": errors.std(axis=1).tolist(),
        "median": np.median(errors, axis=1).tolist(),
        "least": errors.min(axis=1).tolist(),
    }


def table(results: dict[str, Any]) -> str:
    """Returns the table of errors at the end of the post's axis and at the end of ours."""
    sizes = results["num_features"]
    shown = [i for i, size in enumerate(sizes) if size in (POST_UP_TO, sizes[-1])]
    rows: list[list[object]] = []
    for panel in (panel for name in FIGURES for panel in results[name]):
        for curve in panel["curves"]:
            label = CURVES[Curve(curve["coupling"], curve["feature_map"])]["label"]
            cells = [
                f"{curve['mean'][i]:.2g} ({curve['standard_deviation'][i]:.1g}), "
                f"{curve['median'][i]:.2g}"
                for i in shown
            ]
            rows.append([panel["title"], panel["scale"], label, *cells, f"{panel['uniform']:.2g}"])
    columns = [f"m = {sizes[i]}: mean (sd), median" for i in shown]
    return markdown.table(["", "scale", "features", *columns, "mean of the values"], rows)


def draw_figures(results: dict[str, Any]) -> dict[str, Figure]:
    """Draws mean and standard deviation, as the post does, and medians as dots."""
    return {name: _draw_figure(results, name) for name in FIGURES}


def _draw_figure(results: dict[str, Any], name: str) -> Figure:
    figure, row = style.subplots(11, 3.8, 1, 3, sharey=True)
    for axes, panel in zip(row, results[name], strict=True):
        _draw_panel(axes, np.array(results["num_features"]), panel)
    row[0].set_ylabel("mean squared error of attention")
    row[2].plot([], [], "o", color="gray", markersize=3.5, label="median")
    style.legend(figure, row[2], "upper center")
    return figure


def _draw_panel(axes: Axes, sizes: np.ndarray, panel: dict[str, Any]) -> None:
    for curve in panel["curves"]:
        look = CURVES[Curve(curve["coupling"], curve["feature_map"])]
        mean, deviation = np.array(curve["mean"]), np.array(curve["standard_deviation"])
        # Where the deviation exceeds the mean, the band ends at the smallest sample.
        low = np.maximum(mean - deviation, curve["least"])
        style.band(axes, sizes, low, mean + deviation, color=look["color"])
        axes.plot(sizes, mean, **look, linewidth=1.3)
        axes.plot(sizes, curve["median"], "o", color=look["color"], markersize=3.5)
    axes.axhline(panel["uniform"], color="black", linewidth=1, label="uniform attention")
    axes.axvline(POST_UP_TO, color="gray", linewidth=0.8, label="end of the post's axis")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    style.ticks(axes, [m for m in (16, 64, 256, 1024, 4096) if sizes[0] <= m <= sizes[-1]])
    axes.set_xlabel("number of random features")
    axes.set_title(f"{panel['title']}, inputs of scale {panel['scale']:g}", fontsize=10)
    style.tidy(axes)
