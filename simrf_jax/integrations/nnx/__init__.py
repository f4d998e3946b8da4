"""Random-feature attention for Flax NNX: an ``attention_fn`` for ``nnx.MultiHeadAttention``."""

from simrf_jax.integrations.nnx.calibration import calibrate
from simrf_jax.integrations.nnx.fmm import FMMAttention
from simrf_jax.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax.integrations.nnx.variables import (
    Calibration,
    CalibrationMoments,
    RandomProjection,
)

__all__ = [
    "Calibration",
    "CalibrationMoments",
    "FMMAttention",
    "RandomFeatureAttention",
    "RandomProjection",
    "calibrate",
]
