"""Fits to the queries and keys of a trained model, beyond ``simrf_jax.calibrate``.

``Moments`` sums means and covariances over batches, for ``calibrate``. ``fit_mixture`` fits the
centers around which ``draw_mixture_projection`` draws the rows of W.
"""

from simrf_jax._src.calibration.mixture import Mixture, fit_mixture
from simrf_jax._src.calibration.moments import Moments
from simrf_jax._src.projections.mixture import draw_mixture_projection

__all__ = ["Mixture", "Moments", "draw_mixture_projection", "fit_mixture"]
