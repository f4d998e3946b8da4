"""Projections W: how the random vectors are drawn, applied and redrawn."""

from simrf_jax.projections.blocks import BLOCK_MODES
from simrf_jax.projections.dense import COUPLINGS, NORMS, draw_projection, draw_stack, project
from simrf_jax.projections.redraw import redraw_key, redraw_projections

__all__ = [
    "BLOCK_MODES",
    "COUPLINGS",
    "NORMS",
    "draw_projection",
    "draw_stack",
    "project",
    "redraw_key",
    "redraw_projections",
]
