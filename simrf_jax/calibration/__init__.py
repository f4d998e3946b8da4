"""Calibration: feature maps that fit the queries and keys of a trained model."""

from simrf_jax.calibration.api import calibrate
from simrf_jax.calibration.moments import Moments

__all__ = ["Moments", "calibrate"]
