"""Names, colors and line styles of the attentions in tables and figures."""

from __future__ import annotations

from typing import Any

from experiments.harness import style
from experiments.swap.methods import METHODS

LABELS = {
    "softmax": "softmax",
    "uniform": "uniform attention",
    "band": "exact band alone",
} | {name: method.label for name, method in METHODS.items()}

# Methods of one family share a color (Okabe and Ito); couplings differ in the line and the marker.
LOOKS: dict[str, dict[str, Any]] = {
    "softmax": {"color": "#000000", "linestyle": "-"},
    "uniform": {"color": "#777777", "linestyle": ":"},
    "band": {"color": "#777777", "linestyle": "--"},
    "positive_iid": {"color": "#0072B2", "linestyle": ":", "marker": "o"},
    "positive_orthogonal": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "positive_simplex": {"color": "#0072B2", "linestyle": "-", "marker": "^"},
    "hyperbolic": {"color": "#009E73", "linestyle": "-.", "marker": "D"},
    "optimal": {"color": "#56B4E9", "linestyle": "-", "marker": "v"},
    "sderf": {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    "calibrated_iid": {"color": "#D55E00", "linestyle": ":", "marker": "o"},
    "calibrated_simplex": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
    "calibrated": {"color": "#D55E00", "linestyle": "--", "marker": "P"},
    "calibrated_pairs": {"color": "#D55E00", "linestyle": "-.", "marker": "D"},
    "mixture": {"color": "#8B4513", "linestyle": "-", "marker": "X"},
    "learned_from_random": {"color": "#117733", "linestyle": "--", "marker": "<"},
    "learned": {"color": "#117733", "linestyle": "-", "marker": ">"},
    "band_positive": {"color": "#CC79A7", "linestyle": "-", "marker": "^"},
    "band_calibrated": {"color": "#CC79A7", "linestyle": "--", "marker": "P"},
    "band_calibrated_pairs": {"color": "#CC79A7", "linestyle": ":", "marker": "D"},
    "band_mixture": {"color": "#8B4513", "linestyle": "--", "marker": "X"},
    "band_learned": {"color": "#CC79A7", "linestyle": "-.", "marker": ">"},
    "keys_calibrated": {"color": "#332288", "linestyle": ":", "marker": "P"},
    "keys_learned": {"color": "#332288", "linestyle": (0, (1, 3)), "marker": ">"},
    "band_keys_positive": {"color": "#332288", "linestyle": "-", "marker": "^"},
    "band_keys_calibrated": {"color": "#332288", "linestyle": "--", "marker": "P"},
    "band_keys_learned": {"color": "#332288", "linestyle": "-.", "marker": ">"},
}
_OPTIMAL = {"linestyle": ":"}
# Predicted errors are lines, and measured ones are markers. A coupling has its color everywhere.
PREDICTED_LOOKS: dict[str, dict[str, Any]] = {
    "iid": style.STYLES["iid"] | {"marker": "o"},
    "orthogonal": style.STYLES["orthogonal"] | {"marker": "s"},
    "simplex": style.STYLES["simplex"] | {"marker": "^"},
    "simplex_optimal": style.STYLES["simplex"] | _OPTIMAL | {"marker": "v"},
    "cross_polytope": style.STYLES["cross_polytope"] | {"marker": "P"},
    "cross_polytope_shared": style.STYLES["cross_polytope"] | {"linestyle": "-.", "marker": "D"},
    "cross_polytope_optimal": style.STYLES["cross_polytope"] | _OPTIMAL | {"marker": "X"},
}
TASKS = {
    "digits": "digits ViT",
    "fashion_mnist": "Fashion-MNIST ViT",
    "char_lm": "character language model",
}
SCORES = {"digits": "accuracy", "fashion_mnist": "accuracy", "char_lm": "bits per character"}
