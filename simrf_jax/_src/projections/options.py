"""Earlier place of ``DrawOptions``, where pickled states of Flax models look for it."""

from simrf_jax._src.projections.record import DrawOptions

__all__ = ["DrawOptions"]
