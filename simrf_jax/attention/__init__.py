"""Random-feature attention: phi(Q) (phi(K)^T V)."""

from simrf_jax.attention.api import random_feature_attention

__all__ = ["random_feature_attention"]
