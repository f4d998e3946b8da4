"""The exact kernels that random features estimate."""

from simrf_jax._src.kernels.exact import gaussian_kernel, relu_kernel, softmax_kernel
from simrf_jax._src.kernels.scale_mixtures import (
    GAUSSIAN,
    Gaussian,
    Matern,
    PoweredExponential,
    RationalQuadratic,
    ScaleMixture,
    scaled,
)

__all__ = [
    "GAUSSIAN",
    "Gaussian",
    "Matern",
    "PoweredExponential",
    "RationalQuadratic",
    "ScaleMixture",
    "gaussian_kernel",
    "relu_kernel",
    "scaled",
    "softmax_kernel",
]
