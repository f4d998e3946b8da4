"""Attention mechanisms: random features, phi(Q) (phi(K)^T V), an exact band, and both together."""

from simrf_jax._src.attention.banded.band import Band, banded_attention
from simrf_jax._src.attention.banded.window import Window
from simrf_jax._src.attention.estimator import ExactKeys
from simrf_jax._src.attention.fmm import Blend, BlendState, fmm_attention
from simrf_jax._src.attention.inputs.call import Call
from simrf_jax._src.attention.inspection.distillation import distillation_loss
from simrf_jax._src.attention.inspection.report import (
    AttentionReport,
    attention_matrix,
    attention_report,
)
from simrf_jax._src.attention.mechanism import Mechanism
from simrf_jax._src.attention.random_feature_attention import (
    RandomFeatureMechanism,
    random_feature_attention,
)
from simrf_jax._src.attention.random_features.exact_band import ExactBandState
from simrf_jax._src.attention.random_features.state import AttentionState

__all__ = [
    "AttentionReport",
    "AttentionState",
    "Band",
    "Blend",
    "BlendState",
    "Call",
    "ExactBandState",
    "ExactKeys",
    "Mechanism",
    "RandomFeatureMechanism",
    "Window",
    "attention_matrix",
    "attention_report",
    "banded_attention",
    "distillation_loss",
    "fmm_attention",
    "random_feature_attention",
]
