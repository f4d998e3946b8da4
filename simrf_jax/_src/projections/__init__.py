"""Random projections W: functions that draw, apply and redraw them."""

from simrf_jax._src.projections.couplings import COUPLINGS, Coupling, FixedCoupling
from simrf_jax._src.projections.draws import draw_fast_projection, draw_projection
from simrf_jax._src.projections.mixture import draw_mixture_projection
from simrf_jax._src.projections.norms import FIXED_NORMS, NORMS, Norms
from simrf_jax._src.projections.project import product, project
from simrf_jax._src.projections.record import DrawOptions, Projection, as_projection
from simrf_jax._src.projections.redraw import redraw_key, redraw_projections
from simrf_jax._src.projections.rotations import ROTATIONS, Rotation
from simrf_jax._src.projections.row_blocks import BLOCK_MODES, BlockMode
from simrf_jax._src.projections.structured import ProjectionLike, StructuredProjection

__all__ = [
    "BLOCK_MODES",
    "COUPLINGS",
    "FIXED_NORMS",
    "NORMS",
    "ROTATIONS",
    "BlockMode",
    "Coupling",
    "DrawOptions",
    "FixedCoupling",
    "Norms",
    "Projection",
    "ProjectionLike",
    "Rotation",
    "StructuredProjection",
    "as_projection",
    "draw_fast_projection",
    "draw_mixture_projection",
    "draw_projection",
    "product",
    "project",
    "redraw_key",
    "redraw_projections",
]
