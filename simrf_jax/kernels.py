"""Isotropic kernels, and with them the laws of the row norms of W.

``draw_projection(..., kernel=Matern(1.5))`` draws W for a kernel, ``trigonometric_features`` and
``phase_features`` with the same kernel estimate it, and ``Matern(1.5)(x, y)`` is the kernel itself.
A custom class that derives from ``ScaleMixture`` is a kernel as well.
"""

from simrf_jax._src.kernels import (
    Gaussian,
    Matern,
    PoweredExponential,
    RationalQuadratic,
    ScaleMixture,
)

__all__ = ["Gaussian", "Matern", "PoweredExponential", "RationalQuadratic", "ScaleMixture"]
