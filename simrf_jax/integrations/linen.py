"""Random-feature attention for Flax Linen: ``attention_fn`` of ``MultiHeadDotProductAttention``."""

from simrf_jax._src.integrations.linen.calibration import calibrate
from simrf_jax._src.integrations.linen.distillation import distillation_loss, learned_rows
from simrf_jax._src.integrations.linen.fmm import FMMAttention
from simrf_jax._src.integrations.linen.linearize import linearize
from simrf_jax._src.integrations.linen.projection import RandomProjection
from simrf_jax._src.integrations.linen.random_features import RandomFeatureAttention
from simrf_jax._src.integrations.linen.report import attention_report
from simrf_jax._src.integrations.linen.swap import swap_attention

__all__ = [
    "FMMAttention",
    "RandomFeatureAttention",
    "RandomProjection",
    "attention_report",
    "calibrate",
    "distillation_loss",
    "learned_rows",
    "linearize",
    "swap_attention",
]
