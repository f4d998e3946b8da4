"""Causal attention token by token or prompt by prompt, from states that do not grow.

- ``init_state``, ``append``, ``step``: random-feature attention, the far field.
- ``init_window``, ``window_step``: banded attention, the near field.
- ``init_fmm_state``, ``fmm_step``: both together.
"""

from simrf_jax.attention.decoding.far_field import append, init_state, step
from simrf_jax.attention.decoding.fmm import FMMState, fmm_step, init_fmm_state
from simrf_jax.attention.decoding.near_field import Window, init_window, window_step

__all__ = [
    "FMMState",
    "Window",
    "append",
    "fmm_step",
    "init_fmm_state",
    "init_state",
    "init_window",
    "step",
    "window_step",
]
