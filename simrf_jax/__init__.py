"""Random-feature maps and random-feature attention in JAX.

A feature map phi turns a kernel into an inner product: K(x, y) = E[phi(x) . phi(y)].

- ``draw_projection``, ``draw_fast_projection``, ``project``: the random vectors W, with iid,
  orthogonal, simplex or cross-polytope coupling, as a matrix or as fast transforms.
- ``redraw_key``, ``redraw_projections``: a new W for all layers and heads, on a schedule.
  ``DrawOptions``: how W was drawn, which travels with it, so that a redraw repeats it.
- ``Projection``: W with all there is to know about it: weights of its rows, their negatives, and
  how it was drawn. ``draw_mixture_projection`` draws rows around several centers.
- ``positive_features`` and the other ``*_features``: feature maps. ``gaussian_kernel``,
  ``softmax_kernel`` and ``relu_kernel``: the exact kernels that they estimate.
- ``random_feature_attention``: softmax attention in linear time, bidirectional, causal or packed.
  ``RandomFeatures``, ``Band`` and ``Blend`` are the mechanisms as objects, which also decode
  token by token, from a state that does not grow. ``feature_maps``: feature maps as objects.
- ``calibrate``: positive features that fit the queries and keys of a trained model.
- ``banded_attention``: exact softmax attention to nearby keys, the near field.
  ``fmm_attention``: near field and far field together.
- ``attention_matrix``, ``attention_report``: the attention weights that random features imply, and
  their error.
- ``distillation_loss``: cross-entropy of these weights to softmax's, to learn a feature map by.
- ``theory``: the exact error of each coupling and feature map, in float64 NumPy.
- ``selection``: the feature map, coupling and number of features that reach an error on your data.

``theory`` and ``selection`` are imported when they are first used, because they need SciPy. Modules
that depend on Flax are not imported here. Import them by name: ``simrf_jax.integrations.nnx``,
``simrf_jax.integrations.linen``, ``simrf_jax.models``. So is ``simrf_jax.integrations.sklearn``,
the features as a scikit-learn transformer.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from simrf_jax import feature_maps
from simrf_jax._src.attention import (
    AttentionReport,
    AttentionState,
    Band,
    Blend,
    Mechanism,
    RandomFeatures,
    attention_matrix,
    attention_report,
    banded_attention,
    distillation_loss,
    fmm_attention,
    random_feature_attention,
)
from simrf_jax._src.calibration.api import calibrate
from simrf_jax._src.features import (
    BipolarProjection,
    ClusteredProjection,
    FeatureMap,
    angular_hybrid_features,
    clustered_hybrid_features,
    draw_bipolar_projection,
    elu_features,
    gaussian_hybrid_features,
    gaussian_kernel,
    hybrid_features,
    hyperbolic_features,
    optimal_positive_features,
    phase_features,
    positive_features,
    relu_features,
    relu_kernel,
    softmax_kernel,
    trigonometric_features,
)
from simrf_jax._src.projections import (
    DrawOptions,
    Projection,
    draw_fast_projection,
    draw_mixture_projection,
    draw_projection,
    project,
    redraw_key,
    redraw_projections,
)

if TYPE_CHECKING:
    from simrf_jax import selection, theory

__version__ = "0.1.0"

__all__ = [
    "AttentionReport",
    "AttentionState",
    "Band",
    "BipolarProjection",
    "Blend",
    "ClusteredProjection",
    "DrawOptions",
    "FeatureMap",
    "Mechanism",
    "Projection",
    "RandomFeatures",
    "angular_hybrid_features",
    "attention_matrix",
    "attention_report",
    "banded_attention",
    "calibrate",
    "clustered_hybrid_features",
    "distillation_loss",
    "draw_bipolar_projection",
    "draw_fast_projection",
    "draw_mixture_projection",
    "draw_projection",
    "elu_features",
    "feature_maps",
    "fmm_attention",
    "gaussian_hybrid_features",
    "gaussian_kernel",
    "hybrid_features",
    "hyperbolic_features",
    "optimal_positive_features",
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
    return sorted({*globals(), *__all__})
