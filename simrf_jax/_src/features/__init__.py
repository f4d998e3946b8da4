"""Feature maps phi of random projections."""

from simrf_jax._src.features.bipolar import (
    BipolarProjection,
    draw_bipolar_projection,
)
from simrf_jax._src.features.clustered import ClusteredProjection
from simrf_jax._src.features.exponential import (
    hyperbolic_features,
    positive_features,
)
from simrf_jax._src.features.feature_map import (
    FEATURE_MAPS,
    Custom,
    FeatureMap,
    FeatureMapLike,
    as_feature_map,
    calls_function,
)
from simrf_jax._src.features.generalized import elu_features, relu_features
from simrf_jax._src.features.hybrid import hybrid_features
from simrf_jax._src.features.log_space import KERNELS, Kernel, LogFeatures, Side
from simrf_jax._src.features.trigonometric import phase_features, trigonometric_features

__all__ = [
    "FEATURE_MAPS",
    "KERNELS",
    "BipolarProjection",
    "ClusteredProjection",
    "Custom",
    "FeatureMap",
    "FeatureMapLike",
    "Kernel",
    "LogFeatures",
    "Side",
    "as_feature_map",
    "calls_function",
    "draw_bipolar_projection",
    "elu_features",
    "hybrid_features",
    "hyperbolic_features",
    "phase_features",
    "positive_features",
    "relu_features",
    "trigonometric_features",
]
