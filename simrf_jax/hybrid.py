"""Hybrid random features, which blend several estimators by weights that are estimated too.

A hybrid is exact wherever an exact base estimator has all the weight. ``draw_bipolar_projection``
draws W for ``AngularHybrid`` and ``GaussianHybrid``; ``ClusteredProjection`` holds that of
``ClusteredHybrid``. They are feature maps of attention, and their ``features`` those of the kernel.
``theory.hybrid_mse`` is their exact error.
"""

from simrf_jax._src.features.bipolar import (
    AngularHybrid,
    BipolarProjection,
    GaussianHybrid,
    draw_bipolar_projection,
)
from simrf_jax._src.features.clustered import ClusteredHybrid, ClusteredProjection
from simrf_jax._src.features.hybrid import hybrid_features

__all__ = [
    "AngularHybrid",
    "BipolarProjection",
    "ClusteredHybrid",
    "ClusteredProjection",
    "GaussianHybrid",
    "draw_bipolar_projection",
    "hybrid_features",
]
