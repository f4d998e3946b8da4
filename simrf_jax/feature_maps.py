"""The feature maps of attention, as objects: the namespace ``simrf_jax.feature_maps``."""

from simrf_jax._src.features.bipolar import AngularHybrid, GaussianHybrid
from simrf_jax._src.features.calibrated import Calibrated
from simrf_jax._src.features.clustered import ClusteredHybrid
from simrf_jax._src.features.exponential import Hyperbolic, OptimalPositive, Positive
from simrf_jax._src.features.feature_map import FEATURE_MAPS, Custom, named
from simrf_jax._src.features.folded import Folded
from simrf_jax._src.features.generalized import Elu, Relu
from simrf_jax._src.features.learned import Learned
from simrf_jax._src.features.log_space import LogFeatures
from simrf_jax._src.features.trigonometric import Phase, Trigonometric

__all__ = [
    "FEATURE_MAPS",
    "AngularHybrid",
    "Calibrated",
    "ClusteredHybrid",
    "Custom",
    "Elu",
    "Folded",
    "GaussianHybrid",
    "Hyperbolic",
    "Learned",
    "LogFeatures",
    "OptimalPositive",
    "Phase",
    "Positive",
    "Relu",
    "Trigonometric",
    "named",
]
