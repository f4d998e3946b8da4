"""Random-feature maps and random-feature attention in JAX.

A feature map phi turns a kernel into an inner product: K(x, y) = E[phi(x) . phi(y)].

- ``draw_projection``, ``draw_fast_projection``, ``project``: the random vectors W, with iid,
  orthogonal, simplex or cross-polytope coupling, as a matrix or as fast transforms. ``Projection``:
  W with all there is to know about it.
- ``redraw_key``, ``redraw_projections``: a new W for all layers and heads, on a schedule.
  ``DrawOptions``: how W was drawn, which travels with it, so that a redraw repeats it.
- ``positive_features`` and the other ``*_features``: feature maps. ``gaussian_kernel``,
  ``softmax_kernel`` and ``relu_kernel``: the exact kernels that they estimate.
- ``random_feature_attention``: softmax attention in linear time, bidirectional, causal or packed.
  ``banded_attention``: exact softmax attention to nearby keys. ``RandomFeatureMechanism`` and
  ``Band`` are both as objects, which also decode token by token, from a state that does not grow.
  ``ExactKeys``: a few keys with exact weights, and the rule that chooses them.
- ``calibrate``: positive features that fit the queries and keys of a trained model.
- ``attention_matrix``, ``attention_report``: the attention weights that random features imply, and
  their error. ``distillation_loss``: their cross-entropy to softmax's, to learn a feature map by.

These modules have the rest:

- ``feature_maps``: feature maps as objects, which attention takes. ``calibration``: those that fit
  data, and rows of W around several centers.
- ``kernels``: the Matérn, rational quadratic and powered exponential kernels, which trigonometric
  features estimate under every coupling.
- ``hybrid``: feature maps that blend several estimators. ``fmm``: near and far field, blended.
- ``theory``: the exact error of each coupling and feature map, in float64 NumPy.
- ``selection``: the feature map, coupling and number of features that reach an error on your data.
- ``integrations.nnx``, ``integrations.linen``: adapters for Flax. ``integrations.sklearn``: the
  features as a scikit-learn transformer. ``models``: the Performer ViT.

``theory`` and ``selection`` are imported when they are first used, because they need SciPy. Import
``integrations`` and ``models`` by name, because they need Flax. Names behind ``_src`` may change at
any time.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from simrf_jax import calibration, feature_maps, fmm, hybrid, kernels
from simrf_jax._src.attention import (
    AttentionState,
    Band,
    ExactKeys,
    Mechanism,
    RandomFeatureMechanism,
    attention_matrix,
    attention_report,
    banded_attention,
    distillation_loss,
    random_feature_attention,
)
from simrf_jax._src.calibration.api import calibrate
from simrf_jax._src.features import (
    FeatureMap,
    elu_features,
    hyperbolic_features,
    phase_features,
    positive_features,
    relu_features,
    trigonometric_features,
)
from simrf_jax._src.kernels import gaussian_kernel, relu_kernel, softmax_kernel
from simrf_jax._src.projections import (
    DrawOptions,
    Projection,
    draw_fast_projection,
    draw_projection,
    project,
    redraw_key,
    redraw_projections,
)

if TYPE_CHECKING:
    from simrf_jax import selection, theory

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "Band",
    "DrawOptions",
    "ExactKeys",
    "FeatureMap",
    "Mechanism",
    "Projection",
    "RandomFeatureMechanism",
    "attention_matrix",
    "attention_report",
    "banded_attention",
    "calibrate",
    "calibration",
    "distillation_loss",
    "draw_fast_projection",
    "draw_projection",
    "elu_features",
    "feature_maps",
    "fmm",
    "gaussian_kernel",
    "hybrid",
    "hyperbolic_features",
    "kernels",
    "phase_features",
    "positive_features",
    "project",
    "random_feature_attention",
    "redraw_key",
    "redraw_projections",
    "relu_features",
    "relu_kernel",
    "selection",
    "softmax_kernel",
    "theory",
    "trigonometric_features",
]


def __getattr__(name: str) -> ModuleType:
    """Imports ``theory`` and ``selection`` when they are first used."""
    if name in ("theory", "selection"):
        return importlib.import_module(f"simrf_jax.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
