"""Attention mechanisms: random features, phi(Q) (phi(K)^T V), an exact band, and both together.

A call of random-feature attention takes these steps:

1. ``Call.of`` (``inputs/call.py``) checks the arrays and holds them in one record.
   ``RandomFeatureMechanism`` checks W, the feature map and the options. Its base class
   ``Estimator`` (``estimator.py``) is what the next steps read.
2. ``choose`` (``implementations.py``) takes the first implementation that has no reason against the
   call. A new one is a module with a line in ``ENTRIES``. XLA's takes every call
   (``random_features/xla.py``).
3. ``Estimator.lay_out`` (``estimator.py``) arranges the tokens by key heads. Masks, biases and
   lengths become a log weight for each key, which is minus infinity for a hidden one.
4. ``HeadMaps.keys`` and ``queries`` (``estimator.py``) apply the feature map and W. The features of
   a hidden key have exponents of minus infinity, so the key adds zero to every sum.
5. The features of keys are summed (``random_features/state.py``), and queries read the sums. Causal
   attention scans over chunks (``random_features/causal.py``), where ``_Visibility`` masks the keys
   that come later.
6. ``Inputs.outputs`` (``inputs/call.py``) restores the caller's layout.

Pallas kernels take the steps from 3 on themselves. ``form_of`` (``pallas_inputs.py``) turns W and
the feature map into the arrays that they read.
"""

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
