"""Random projections W: functions that draw, apply and redraw them."""

from simrf_jax.projections.couplings import COUPLINGS, Coupling, FixedCoupling
from simrf_jax.projections.dense import draw_projection
from simrf_jax.projections.fast import FastProjection, draw_fast_projection
from simrf_jax.projections.mixture import draw_mixture_projection
from simrf_jax.projections.norms import FIXED_NORMS, NORMS, Norms
from simrf_jax.projections.options import DrawOptions
from simrf_jax.projections.paired import PairedProjection, both_signs, with_negatives
from simrf_jax.projections.project import (
    add_half_log_weights,
    as_projection,
    kind_of,
    product,
    project,
    rows_of,
)
from simrf_jax.projections.redraw import redraw_key, redraw_projections
from simrf_jax.projections.rotations import ROTATIONS, Rotation
from simrf_jax.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax.projections.structured import Projection, StructuredProjection
from simrf_jax.projections.tilt import check_chi_norms, tilted
from simrf_jax.projections.weighted import WeightedProjection

__all__ = [
    "BLOCK_MODES",
    "COUPLINGS",
    "FIXED_NORMS",
    "NORMS",
    "ROTATIONS",
    "BlockMode",
    "Coupling",
    "DrawOptions",
    "FastProjection",
    "FixedCoupling",
    "Norms",
    "PairedProjection",
    "Projection",
    "Rotation",
    "StructuredProjection",
    "WeightedProjection",
    "add_half_log_weights",
    "as_projection",
    "both_signs",
    "check_chi_norms",
    "draw_fast_projection",
    "draw_mixture_projection",
    "draw_projection",
    "kind_of",
    "product",
    "project",
    "redraw_key",
    "redraw_projections",
    "rows_of",
    "tilted",
    "with_negatives",
]
