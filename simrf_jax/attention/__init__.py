"""Attention mechanisms: random features, phi(Q) (phi(K)^T V), an exact band, and both together."""

from simrf_jax.attention.banded.attention import banded_attention
from simrf_jax.attention.banded.mechanism import Band, Window
from simrf_jax.attention.fmm.attention import fmm_attention
from simrf_jax.attention.fmm.mechanism import Blend, BlendState
from simrf_jax.attention.inspection.distillation import distillation_loss
from simrf_jax.attention.inspection.report import (
    AttentionReport,
    attention_matrix,
    attention_report,
)
from simrf_jax.attention.mechanism import Mechanism
from simrf_jax.attention.random_features.attention import random_feature_attention
from simrf_jax.attention.random_features.exact_band import ExactBandState
from simrf_jax.attention.random_features.mechanism import RandomFeatures
from simrf_jax.attention.random_features.state import AttentionState

__all__ = [
    "AttentionReport",
    "AttentionState",
    "Band",
    "Blend",
    "BlendState",
    "ExactBandState",
    "Mechanism",
    "RandomFeatures",
    "Window",
    "attention_matrix",
    "attention_report",
    "banded_attention",
    "distillation_loss",
    "fmm_attention",
    "random_feature_attention",
]
