"""Random-feature attention, phi(Q) (phi(K)^T V), and the exact attention of its near field."""

from simrf_jax.attention import decoding
from simrf_jax.attention.api import random_feature_attention
from simrf_jax.attention.fmm import fmm_attention
from simrf_jax.attention.inspection import AttentionReport, attention_matrix, attention_report
from simrf_jax.attention.near_field import banded_attention
from simrf_jax.attention.state import AttentionState

__all__ = [
    "AttentionReport",
    "AttentionState",
    "attention_matrix",
    "attention_report",
    "banded_attention",
    "decoding",
    "fmm_attention",
    "random_feature_attention",
]
