"""Random-feature attention: phi(Q) (phi(K)^T V)."""

from simrf_jax.attention.api import random_feature_attention
from simrf_jax.attention.inspection import AttentionReport, attention_matrix, attention_report

__all__ = [
    "AttentionReport",
    "attention_matrix",
    "attention_report",
    "random_feature_attention",
]
