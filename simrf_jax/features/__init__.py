"""Feature maps phi, and the exact kernels beside them."""

from simrf_jax.features.kernels import gaussian_kernel, softmax_kernel
from simrf_jax.features.log_space import KERNELS, LogFeatures
from simrf_jax.features.positive import positive_features, positive_log_features

# What attention knows by name: maps to log features, (x, projection, *, kernel) -> LogFeatures.
FEATURE_MAPS = {"positive": positive_log_features}

__all__ = [
    "FEATURE_MAPS",
    "KERNELS",
    "LogFeatures",
    "gaussian_kernel",
    "positive_features",
    "positive_log_features",
    "softmax_kernel",
]
