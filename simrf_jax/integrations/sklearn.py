"""Random features as a scikit-learn transformer."""

from simrf_jax._src.integrations.sklearn import RandomFeatures

__all__ = ["RandomFeatures"]
