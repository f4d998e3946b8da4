"""Random-feature attention for Flax NNX: an ``attention_fn`` for ``nnx.MultiHeadAttention``."""

from simrf_jax._src.integrations.flax_versions import view
from simrf_jax._src.integrations.nnx.calibration import calibrate
from simrf_jax._src.integrations.nnx.distillation import distillation_loss
from simrf_jax._src.integrations.nnx.fmm import FMMAttention
from simrf_jax._src.integrations.nnx.linearize import linearize
from simrf_jax._src.integrations.nnx.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.nnx.report import attention_report
from simrf_jax._src.integrations.nnx.swap import swap_attention
from simrf_jax._src.integrations.nnx.variables import (
    FeatureMapState,
    LearnedRows,
    RandomProjection,
)

__all__ = [
    "FMMAttention",
    "FeatureMapState",
    "LearnedRows",
    "RandomFeatureAttention",
    "RandomProjection",
    "attention_report",
    "calibrate",
    "distillation_loss",
    "linearize",
    "swap_attention",
    "view",
]
