"""FMM attention: exact attention to near keys, blended with random features for all keys.

``random_feature_attention`` with ``exact_bandwidth`` weighs near keys exactly under one normalizer.
FMM attention has a normalizer for each field, and weights between the fields that a model can learn
(Nguyen et al., FMMformer, NeurIPS 2021, https://arxiv.org/abs/2108.02347).
"""

from simrf_jax._src.attention.fmm import Blend, fmm_attention

__all__ = ["Blend", "fmm_attention"]
