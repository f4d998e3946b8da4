"""The feature maps of attention, as objects; hybrids are in ``simrf_jax.hybrid``."""

from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.exponential import Hyperbolic, OptimalPositive, Positive
from simrf_jax._src.features.feature_map import Custom
from simrf_jax._src.features.folded import Folded
from simrf_jax._src.features.generalized import Elu, Relu
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.features.log_space import LogFeatures
from simrf_jax._src.features.trigonometric import Phase, Trigonometric

__all__ = [
    "Calibrated",
    "Custom",
    "Elu",
    "Folded",
    "Hyperbolic",
    "Learned",
    "LogFeatures",
    "OptimalPositive",
    "Phase",
    "Positive",
    "Relu",
    "Trigonometric",
]
