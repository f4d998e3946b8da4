"""Calibration: feature maps that fit the queries and keys of a trained model."""

from simrf_jax._src.calibration.api import calibrate
from simrf_jax._src.calibration.mixture import Mixture, fit_mixture
from simrf_jax._src.calibration.moments import Moments

__all__ = ["Mixture", "Moments", "calibrate", "fit_mixture"]
