"""Earlier place of projections with weights, where pickled states of Flax models look for them."""

from simrf_jax._src.projections.record import Projection as WeightedProjection

__all__ = ["WeightedProjection"]
